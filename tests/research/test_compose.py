"""Certificates of compositions are proved, and what no composition reaches is refused with what is reachable."""

import time

import numpy as np
import pytest
from research.bound import largest_error
from research.compose import MOST_STEPS, compose, over_muon, refuse_unsuitable, target_of
from soren_align.core.errors import UserError
from soren_align.core.files import read_json
from soren_align.spectral.composition import SHIPPED, TOP, Composition, from_dict, value

pytestmark = pytest.mark.rest


def made(*arguments, **settings):
    """The target of a suitable formula."""
    target = target_of(*arguments, **settings)
    refuse_unsuitable(target)
    return target


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.json")), ids=lambda file: file.stem)
def test_the_certificate_of_a_shipped_map_is_proved_again(file):
    record = from_dict(read_json(file))
    target = made(record.formula, of=record.of, resolution=record.resolution, limit=record.limit)
    for low, high, error in ((record.resolution, TOP, record.error), (0.0, record.resolution, record.error_below)):
        bound, _ = largest_error(record.composition, target, low, high)
        assert bound / record.largest == pytest.approx(error, rel=1e-9)


def test_a_bound_is_proved_where_a_sample_misses_the_error():
    target = made("tanh(x / 0.1) + exp(-((x - 0.50001) / 0.00003)^2) / 10")
    plain = compose(made("tanh(x / 0.1)"), 0.005).composition
    grid = np.linspace(target.resolution, 1, 1000)
    assert np.abs(value(plain, grid) - target(grid)).max() < 0.03
    bound, where = largest_error(plain, target, target.resolution, TOP)
    assert 0.095 < bound < 0.11
    assert where == pytest.approx(0.50001, abs=1e-5)


def test_a_bound_of_a_wrong_composition_is_its_error():
    target = made("x")
    bound, where = largest_error(Composition(((1.1, 0.0, 0.0),), 0.0, 1.1), target, 0.01, 1.0)
    assert bound == pytest.approx(0.1, rel=0.03)
    assert bound >= 0.1
    assert where > 0.98


@pytest.mark.parametrize(("text", "message"), [
    ("1 / (x - 0.5)", "is not finite at or near x = 0.5; write a function that is finite on [0.0004, 1]"),
    ("1 / (x - 0.12345)", "is not finite at or near x = 0.123"),
    ("exp(1000 * x)", "is not finite"), ("log(x - 0.5)", "is not finite at or near x = 0.0004"),
    ("sqrt(-x)", "is not finite"), ("exp(exp(exp(9 * x)))", "is not finite"), ("10^5000 * x", "is not finite"),
    ("0 * x", "the largest value of 0 * x on [0.0004, 1] is 0"),
    ("x - 0.5", "is -0.5 at x = 0.0004, and with a negative value the update would raise the loss; write max("),
    ("1e40 * x", "write one between 1e-30 and 1e30"),
])  # fmt: skip
def test_a_formula_without_finite_positive_values_is_refused(text, message):
    start = time.process_time()
    with pytest.raises(UserError) as caught:
        made(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 2


def test_a_refusal_states_what_is_reachable_at_which_cost_and_that_is_reached():
    target = made("min(x / 0.03, 1)")
    with pytest.raises(UserError) as caught:
        compose(target, 0.001)
    sentence = str(caught.value)
    assert "no polynomials reach the error 0.001 for min(x / 0.03, 1); possible errors: 0.0" in sentence
    assert "of Muon's FLOPs)" in sentence
    offer = float(sentence.split("write --error ")[1].split(",")[0])
    assert offer < 0.05
    assert compose(target, offer).error <= offer


def test_the_cheapest_composition_is_chosen_and_its_record_is_read_again():
    composed = [compose(made("tanh(x / 0.1)"), error) for error in (0.1, 0.005, 0.0005)]
    counts = [len(each.composition.steps) for each in composed]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] <= MOST_STEPS
    for each in composed:
        assert from_dict(each.as_dict()) == each
    assert over_muon(lambda m, n: m * m * n) < 1
