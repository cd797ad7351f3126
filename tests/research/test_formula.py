"""A formula is read by a list of what is allowed, and has one value on arrays, tensors and intervals."""

import numpy as np
import pytest
import torch
from research.formula import parse
from soren_align.core.errors import UserError

from research import intervals

pytestmark = pytest.mark.rest
FORMULAS = {
    "tanh(x / 0.1)": lambda x: np.tanh(x / 0.1),
    "x / sqrt(x^2 + tau^2)": lambda x: x / np.sqrt(x**2 + 0.01),
    "min(x / .3, 1)": lambda x: np.minimum(x / 0.3, 1),
    "max(x - 0.2, 0) * 2": lambda x: np.maximum(x - 0.2, 0) * 2,
    "2^-x": lambda x: 2.0**-x,
    "x ** 0.5": lambda x: x**0.5,
    "x^x": lambda x: x**x,
    "-x^2 + 3": lambda x: 3 - x**2,
    "1 - (x - 1)": lambda x: 2 - x,
    "2^3^x": lambda x: 2 ** (3**x),
    "log(1 + 100 * x) / exp(x)": lambda x: np.log(1 + 100 * x) / np.exp(x),
    "x^-2": lambda x: x**-2.0,
}
EVERY_FORMULA = pytest.mark.parametrize(("text", "function"), FORMULAS.items(), ids=FORMULAS)


@EVERY_FORMULA
def test_a_formula_has_the_value_of_its_text(text, function):
    formula, x = parse(text, {"tau": 0.1}), np.geomspace(1e-3, 1, 101)
    assert formula(x) == pytest.approx(function(x), rel=1e-14)
    assert formula(torch.from_numpy(x)).numpy() == pytest.approx(function(x), rel=1e-14)
    assert parse(str(formula))(x) == pytest.approx(function(x), rel=1e-14)


@EVERY_FORMULA
def test_intervals_contain_the_value_and_the_derivative(text, function):
    formula, ends = parse(text, {"tau": 0.1}), np.geomspace(1e-3, 1, 2001)
    jet = formula(intervals.variable(ends[:-1], ends[1:]))
    for share in (0.0, 0.3, 1.0):
        x = ends[:-1] + share * (ends[1:] - ends[:-1])
        assert (jet.value.low <= function(x)).all()
        assert (function(x) <= jet.value.high).all()
    h = (ends[1:] - ends[:-1]) / 2
    chord = (function(ends[1:]) - function(ends[:-1])) / (2 * h)  # the derivative somewhere between, or a kink's hull
    slack = 1e-15 * np.abs(function(x)) / h + 1e-9 * np.abs(chord)
    assert (jet.slope.low - slack <= chord).all()
    assert (chord <= jet.slope.high + slack).all()
    assert np.isfinite(jet.slope.high).all()


def test_an_interval_without_a_value_is_not_a_number_whatever_follows():
    box = intervals.variable(np.array([-0.5]), np.array([0.5]))
    for text in ("1 / x", "log(x)", "sqrt(x)", "x^0.5", "x^-1", "x^x", "tanh(log(x))", "min(max(sqrt(x), 0), 1)"):
        value = parse(text)(box).value
        assert np.isnan(value.largest()).all(), text
    assert parse("x^2")(box).value.low[0] == 0


@pytest.mark.parametrize(("text", "message"), [
    ("", "is empty; write a function of x"),
    ("foo(x)", "'foo(x)' is not allowed; write numbers, x, + - * / ^, and exp, log, tanh, sqrt, min, max"),
    ("__import__('os').system('true')", "is not allowed"),
    ("x.__class__", "is not allowed"), ("[x]", "is not allowed"), ("lambda: x", "is not allowed"),
    ("x if x else 1", "is not allowed"), ("x < 1", "is not allowed"), ("x @ x", "is not allowed"),
    ("True * x", "'True' is not allowed"), ("1j * x", "'1j' is not allowed"), ("'x'", "is not allowed"),
    ("(y := x)", "is not allowed"), ("x; x", "cannot be read"), ("x +", "cannot be read"), ("\0x", "cannot be read"),
    ("tanh(x, 2)", "tanh has 1 argument; write tanh(x)"), ("min(x)", "min has 2 arguments; write min(x, 1)"),
    ("tanh(*x)", "is not allowed"), ("exp(x=x)", "exp has 1 argument"),
    ("x / taun", "unknown name 'taun'; did you mean 'tau'?"), ("1e999 * x", "a number beyond 1e308"),
    ("9" * 450 + " * x", "a number beyond 1e308"),
])  # fmt: skip
def test_what_is_no_formula_is_refused_with_a_sentence(text, message):
    with pytest.raises(UserError) as caught:
        parse(text, {"tau": 1.0})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
