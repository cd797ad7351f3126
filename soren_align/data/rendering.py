"""The sandbox of chat templates: what one rendering makes and repeats is counted, and limited.

A template is a program of another author. Jinja's sandbox keeps it from files and the network, but
not from nested loops or gigabytes of text. Here each rendering has a budget: every operation that
makes text or lists is charged for them before it makes them, and every iteration and call is
charged too.
"""

import functools
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup
from transformers.utils import chat_template_utils

from ..core.errors import UserError
from ..core.patches import patched

BUDGET, BUDGET_PER_CHARACTER = 20_000_000, 100
"""Of one rendering: a number, and so many more for each character of its input: about 1 GB of
memory at most, and seconds. 1 for a character that is made, and:"""
PER_ELEMENT, PER_CALL = 10, 20
"""Of a list; and a call or an iteration."""
MAX_OUTPUT, MAX_OUTPUT_PER_CHARACTER = 100_000, 20
"""Characters of one rendering: a number, and so many more for each character of its input."""
MAX_DEPTH = 100
MAX_WIDTH_DIGITS = 4
MAX_BITS = 10_000
"""Of an integer; Python writes no more than 4300 digits."""
MAX_TEMPLATES = 100
"""Compiled ones that an environment keeps."""
_LAZY_FILTERS = {
    *(
        "abs",
        "attr",
        "count",
        "d",
        "default",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
    ),
    *("random", "reject", "rejectattr", "reverse", "select", "selectattr"),
}
"""Filters that neither make text of a list (as `sort` does, for its keys) nor repeat what they are
given."""
_WIDENING = {"center", "ljust", "replace", "rjust", "zfill"}
"""Methods of texts whose result may be longer than the text by more than a small factor; and
`join`."""
_FORBIDDEN = {"encode", "expandtabs", "maketrans", "to_bytes", "translate"}
"""Methods that multiply in ways of their own, and that no template needs."""


@contextmanager
def template_errors(subject: str) -> Iterator[None]:
    """Render chat templates with BoundedEnvironment within this context.

    Any exception of a template becomes a UserError of one line that starts with `subject`.
    """
    try:
        with patched(
            "transformers.utils.chat_template_utils._compile_jinja_template", _bounded_template
        ):
            yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = f" (line {error.lineno} of the template)" if hasattr(error, "lineno") else ""  # pyright: ignore
        raise UserError(f"{subject}: {reason}{line}") from None


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget for each rendering; beyond it, SecurityError is raised."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    intercepted_unops = frozenset(ImmutableSandboxedEnvironment.default_unop_table)

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.left = self.budget = BUDGET
        self._templates: dict[Any, Any] = {}
        self.finalize = lambda value: self.charge(1 + _size(value, self.left)) and value
        self.filters: Any = _Filters(self, self.filters)
        del self.globals["lipsum"]

    def charge(self, amount: float) -> bool:
        """Take `amount` from the budget. Returns True. Raises SecurityError if it is spent."""
        self.left -= amount
        if self.left < 0:
            raise SecurityError(
                f"the template takes more than {self.budget:,} characters and steps for one example; remove nested "
                "loops"
            )
        return True

    def charged(self, result: Any) -> Any:
        """Return the result of an operation, charged for its length."""
        self.charge(_length(result))
        return result

    def charge_repeated(self, value: Any, others: Iterable[Any]) -> None:
        """Charge for text that is made of `value`, and by widths and texts among `others` for each
        character of it.
        """
        widths = sum(
            max(0, other) if isinstance(other, int) else _size(other, self.left) for other in others
        )
        self.charge((1 + _size(value, self.left)) * (1 + widths))

    def joined(self, values: Sequence[Any]) -> str:
        """The operator `~`."""
        self.charge(_size(values, self.left))
        return "".join(map(str, values))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the parts of a macro, of a {% set %} block or of the whole."""
        return "".join(part for part in parts if self.charge(1 + len(part)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Charge for the result, then compute it."""
        if isinstance(left, int) and isinstance(right, int):
            power = max(0, right) if operator == "**" else 1
            if left.bit_length() * power + right.bit_length() > MAX_BITS:
                remedy = "use smaller numbers"
                raise SecurityError(
                    f"the template computes an integer of more than {MAX_BITS:,} bits; {remedy}"
                )
        elif operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
            self.charge_repeated(right, ["%" * left.count("%")])
            self.charge(len(left))
        elif operator == "*":
            repeated, times = (right, left) if isinstance(left, int) else (left, right)
            self.charge(_length(repeated) * max(0, times) if isinstance(times, int) else 1)
        self.charge(1 + _length(left) + _length(right))
        return super().call_binop(context, operator, left, right)

    def call_unop(self, context: Any, operator: str, arg: Any) -> Any:
        """Charge for the result, then compute it."""
        self.charge(1 + _length(arg))
        return super().call_unop(context, operator, arg)

    def call(__self, __context: Any, __obj: Any, *args: Any, **options: Any) -> Any:
        """Charge for the call and its result.
        The names are jinja's: `options` may have any other.
        """
        __self.charge(PER_CALL)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str) and name == "join" and args:
            args = ([*args[0]],)  # of a generator
            __self.charge_repeated(args[0], [owner])
        elif isinstance(owner, str) and name in _WIDENING:
            __self.charge_repeated(owner, args[1:] if name == "replace" else args)
        elif isinstance(owner, str) and name in ("split", "rsplit", "splitlines"):
            __self.charge(PER_ELEMENT // 2 * len(owner))
        elif name in ("raise_exception", "strftime_now"):
            # the C library's limit for each directive of a date
            __self.charge_repeated(args, [256])
        return __self.charged(super().call(__context, __obj, *args, **options))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether a template may use the attribute."""
        return attr not in _FORBIDDEN and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` and `str.format_map` with limited widths; None for other values."""
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        formatter: Any = (
            _EscapeFormatter(self, escape=text.escape)
            if isinstance(text, Markup)
            else _Formatter(self)
        )
        return lambda *args, **options: type(text)(
            formatter.vformat(text, *(((), *args) if is_map else (args, options)))
        )

    def from_string(self, source: Any, globals: Any = None, template_class: Any = None) -> Any:
        """Return the template, each rendering of which has a budget."""
        assert globals is None
        assert template_class is None
        # lm-eval asks for the same template at each question; to compile it takes longer than to
        # render it.
        if source not in self._templates:
            template = super().from_string(source)
            template.root_render_func = functools.partial(self._render, template.root_render_func)
            if len(self._templates) == MAX_TEMPLATES:
                self._templates.clear()
            self._templates[source] = template
        return self._templates[source]

    def _render(self, root: Callable[[Any], Iterator[str]], context: Any) -> Iterator[str]:
        num_input = len(str(context.parent))
        self.left = self.budget = BUDGET + BUDGET_PER_CHARACTER * num_input
        limit, length = MAX_OUTPUT + MAX_OUTPUT_PER_CHARACTER * num_input, 0
        for part in root(context):
            length += len(part)
            if length > limit:
                raise SecurityError(
                    f"the template prints more than {limit:,} characters for one example"
                )
            yield part

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        _Counting().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **options)


class _Counting(NodeTransformer):
    """Adds to a template the charges for which the environment has no hook."""

    def visit_For(self, node: Any) -> Any:
        """Charge at the start of each iteration, of a macro and of a block: more for a longer
        body.
        """
        num_nodes = sum(1 for _ in node.find_all(nodes.Node))
        self.generic_visit(node)
        if getattr(node, "test", None) is not None:
            node.test = nodes.And(
                _call("charge", nodes.Const(1), node), node.test, lineno=node.lineno
            )
        node.body.insert(
            0,
            nodes.ExprStmt(_call("charge", nodes.Const(num_nodes // 2), node), lineno=node.lineno),
        )
        return node

    visit_Macro = visit_CallBlock = visit_Block = visit_For

    def visit_Concat(self, node: Any) -> Any:
        """Let the environment join the texts."""
        self.generic_visit(node)
        return _call("joined", nodes.List(node.nodes, lineno=node.lineno), node)

    def visit_Getitem(self, node: Any) -> Any:
        """Charge for a slice, which is a copy."""
        self.generic_visit(node)
        return _call("charged", node, node) if isinstance(node.arg, nodes.Slice) else node


def _call(method: str, argument: nodes.Expr, place: nodes.Node) -> nodes.Call:
    line = {"lineno": place.lineno}
    return nodes.Call(
        nodes.EnvironmentAttribute(method, **line), [argument], [], None, None, **line
    )


class _Filters(UserDict[str, Any]):
    """The filters of an environment, each charged for what it makes."""

    def __init__(self, environment: BoundedEnvironment, filters: Mapping[str, Any]):
        self.environment = environment
        super().__init__(filters)

    def __setitem__(self, name: str, function: Any) -> None:
        # its first argument is then the environment or context
        num_hidden = int(hasattr(function, "jinja_pass_arg"))
        environment = self.environment

        @functools.wraps(function)  # with jinja's mark
        def charged(*args: Any, **options: Any) -> Any:
            hidden, (value, *others) = args[:num_hidden], args[num_hidden:]
            environment.charge(PER_CALL)
            if name not in _LAZY_FILTERS or isinstance(value, str):
                value = [*value] if isinstance(value, Iterator) else value
                if name == "format":
                    _refuse_wide_format(str(value))
                repeating = others[1:] if name == "replace" else others
                environment.charge_repeated(value, [*repeating, *options.values()])
            return environment.charged(function(*hidden, value, *others, **options))

        self.data[name] = charged


class _Formatter(SandboxedFormatter):
    """`str.format` with limited widths."""

    _env: Any

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Charge for text that is made by !r and !s."""
        self._env.charge(_size(value, self._env.left))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> str:
        """Refuse a large width."""
        _refuse_width(format_spec)
        return self._env.charged(super().format_field(value, format_spec))


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    """`Markup.format` with limited widths."""


def _refuse_wide_format(text: str) -> None:
    """Raise SecurityError for a large width, or one among the arguments, in a text with %."""
    for part in text.split("%")[1:]:
        spec = part.partition(")")[2] if part.startswith("(") else part
        _refuse_width(re.match("[^a-zA-Z]*", spec)[0])  # pyright: ignore


def _refuse_width(spec: str) -> None:
    if "*" in spec or re.search(rf"\d{{{MAX_WIDTH_DIGITS + 1}}}", spec):
        raise SecurityError(
            f"the width in a format string, such as 10 in %10d, may have at most {MAX_WIDTH_DIGITS} digits"
        )


def _length(value: Any) -> int:
    """The length of a text, of the digits of an integer, or PER_ELEMENT for each element of a
    list.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    return (
        PER_ELEMENT * len(value)
        if isinstance(value, Mapping | list | tuple | set | frozenset)
        else 0
    )


def _size(value: Any, limit: float, depth: int = 0) -> int:
    """At least the number of characters of str(value); of more than `limit` any number above it.

    An element counts wherever it occurs: a list of twice the same list of twice the same list is
    small in memory, and not as text. Raises SecurityError if `value` is nested too deeply.
    """
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # pyright: ignore
    if isinstance(value, Mapping):
        value = value.items()
    if not isinstance(value, list | tuple | set | frozenset | MappingView):
        return _length(value)
    if depth == MAX_DEPTH:
        raise SecurityError(f"a value is nested more than {MAX_DEPTH} levels deep")
    total = 0
    elements: Any = value
    for element in elements:
        total += PER_ELEMENT + _size(element, limit - total, depth + 1)
        if total > limit:
            break
    return total


@functools.lru_cache
def _bounded_template(source: str) -> Any:
    # Not into the cache of transformers, whose templates have no budget.
    with patched(
        "transformers.utils.chat_template_utils.ImmutableSandboxedEnvironment", BoundedEnvironment
    ):
        return chat_template_utils._cached_compile_jinja_template(source)
