"""A function of one variable by its formula, as text: parsed by a list of what is allowed, never
evaluated as code.

    numbers, x, parameters by name, + - * / ^ (or **), parentheses, exp log tanh sqrt of one
    argument, min max of two

x is a singular value over its normalization. Python's parser reads the text, and every node of its
tree must be one of the above. The formula is then evaluated on numpy arrays, on tensors, and on
intervals (`intervals`), for certificates.
"""

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from soren_align.core.errors import UserError, did_you_mean

from . import intervals

MAX_CHARACTERS = 500
MAX_NODES = 200
MAX_DEPTH = 50
"""Of nested operations and parentheses."""
FUNCTIONS = {"exp": 1, "log": 1, "tanh": 1, "sqrt": 1, "min": 2, "max": 2}
"""The number of arguments of each function."""
_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "^"}
_ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": operator.pow,
}
_NAMES = {"min": "minimum", "max": "maximum"}
"""Of functions in numpy, torch and `intervals`, where they differ."""

Node = Any
"""A float, "x", or a tuple of an operation and its arguments."""


@dataclass(frozen=True)
class Formula:
    """A function of x. str(formula) is its text with the numbers of its parameters."""

    root: Node

    def __call__(self, x: Any) -> Any:
        """f(x), of an array, a tensor or a `Jet`; an array has NaN or an infinity where f is not
        defined.
        """
        if isinstance(x, np.ndarray):
            with np.errstate(all="ignore"):
                numbers = _value(self.root, x, np, lambda number, _: np.float64(number))
            return np.broadcast_to(np.asarray(numbers), x.shape)
        if isinstance(x, intervals.Jet):
            with np.errstate(all="ignore"):
                return _value(self.root, x, intervals, intervals.number)
        return _value(
            self.root, x, import_module("torch"), lambda number, like: like.new_tensor(number)
        )

    def __str__(self) -> str:
        return _text(self.root)


def parse(text: str, parameters: Mapping[str, float] | None = None) -> Formula:
    """The formula of a text; parameters: the numbers of names in it.

    Raises UserError, in one sentence, for a text that is no formula, that has another name,
    function or operator, or that is longer, larger or nested more deeply than the limits.
    """
    if not isinstance(text, str) or not text.strip():
        raise UserError("formula: is empty; write a function of x, such as tanh(x / 0.1)")
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"formula: has {len(text):,} characters; write at most {MAX_CHARACTERS}")
    depth = deepest = 0
    for character in text:  # before Python's parser, whose own limits differ between versions
        depth += (character == "(") - (character == ")")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise UserError(f"formula: nests {deepest} parentheses; nest at most {MAX_DEPTH}")
    try:
        # ^ is Python's exclusive or, which binds less than +: hence before parsing.
        tree = ast.parse(" ".join(text.split()).replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = (
            error.msg
            if isinstance(error, SyntaxError) and error.msg
            else "nested too deeply, or no text"
        )
        raise UserError(
            f"formula: {text!r} cannot be read ({reason}); write such as x / sqrt(x^2 + 0.01)"
        ) from None
    count = [0]
    root = _checked(tree, dict(parameters or {}), count, 0)
    return Formula(root)


def _checked(node: ast.AST, parameters: Mapping[str, float], count: list[int], depth: int) -> Node:
    """The tree of a formula. Raises UserError for all that is not on the list."""
    count[0] += 1
    if count[0] > MAX_NODES:
        raise UserError(
            f"formula: has more than {MAX_NODES} numbers, names and operations; write a shorter one"
        )
    if depth > MAX_DEPTH:
        raise UserError(f"formula: nests more than {MAX_DEPTH} operations; write a shorter one")
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        constant: Any = node.value
        try:
            value = float(constant)
        except OverflowError:  # of a whole number
            value = math.inf
        if not math.isfinite(value):
            raise UserError("formula: has a number beyond 1e308; write smaller numbers")
        return value
    if isinstance(node, ast.Name):
        if node.id == "x":
            return "x"
        if node.id in parameters:
            return float(parameters[node.id])
        known = ("x", *parameters, *FUNCTIONS)
        raise UserError(f"formula: unknown name {node.id!r}{did_you_mean(node.id, known)}")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        operand = _checked(node.operand, parameters, count, depth + 1)
        if isinstance(node.op, ast.UAdd):
            return operand
        return -operand if isinstance(operand, float) else ("neg", operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        sides = (_checked(side, parameters, count, depth + 1) for side in (node.left, node.right))
        return (_OPERATORS[type(node.op)], *sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS:
        name, wanted = node.func.id, FUNCTIONS[node.func.id]
        if len(node.args) != wanted or node.keywords:
            raise UserError(
                f"formula: {name} has {wanted} argument{'s' * (wanted > 1)}; write {name}(x{', 1' * (wanted > 1)})"
            )
        return (name, *(_checked(argument, parameters, count, depth + 1) for argument in node.args))
    allowed = f"numbers, x, + - * / ^, and {', '.join(FUNCTIONS)}"
    raise UserError(f"formula: {ast.unparse(node)[:60]!r} is not allowed; write {allowed}")


def _value(node: Node, x: Any, module: Any, number: Any) -> Any:
    """A node's value on x, by the functions of a module (numpy, torch, intervals); number: makes
    one of a float.
    """
    if isinstance(node, float):
        return number(node, x)
    if isinstance(node, str):
        return x
    name, *operands = node
    # an interval's power of a whole number needs no logarithm
    if name == "^" and isinstance(operands[1], float):
        return _value(operands[0], x, module, number) ** operands[1]
    values = [_value(operand, x, module, number) for operand in operands]
    if name == "neg":
        return -values[0]
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](*values)
    return getattr(module, _NAMES.get(name, name))(*values)


def _text(node: Node) -> str:
    if isinstance(node, float):
        return f"{node:g}" if float(f"{node:g}") == node else repr(node)
    if isinstance(node, str):
        return node
    name, *operands = node
    texts = [_text(operand) for operand in operands]
    if name == "neg":
        return f"-({texts[0]})" if isinstance(operands[0], tuple) else f"-{texts[0]}"
    if name in _ARITHMETIC:
        sides = []
        for position, (side, text) in enumerate(zip(operands, texts, strict=True)):
            rank = _RANK.get(side[0], 9) if isinstance(side, tuple) else 9
            if isinstance(side, float) and side < 0:
                rank = _RANK["neg"]
            binds_other_side = position == (0 if name == "^" else 1)
            needs_parentheses = rank < _RANK[name] or (rank == _RANK[name] and binds_other_side)
            sides.append(f"({text})" if needs_parentheses else text)
        return f" {name} ".join(sides) if name != "^" else "^".join(sides)
    return f"{name}({', '.join(texts)})"


_RANK = {"+": 1, "-": 1, "*": 2, "/": 2, "neg": 3, "^": 4}
