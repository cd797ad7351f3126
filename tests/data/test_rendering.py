"""A chat template renders as in jinja's own sandbox, or is refused before it has taken much memory."""

import resource
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from jinja2.sandbox import ImmutableSandboxedEnvironment
from soren_align.core.errors import UserError
from soren_align.data import check_template, dataset_stats
from soren_align.data.rendering import BUDGET, BoundedEnvironment
from tests.support.conversations import CHATML, chat
from tests.support.cpu_time import cpu_seconds
from transformers.utils import chat_template_utils

SFT = Dataset.from_list([{"messages": chat(1)}])
PICKY = Dataset.from_list(
    [{"messages": chat(1)}, {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}]
)
ROUND = "{% for i in range(99999) %}"
MILLION = "{% set a = 'x' * 10 ** 6 %}"
NESTED = "{% set n = namespace(a=['x']) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% endfor %}"
MUCH, WIDE, UNSAFE = r"the template \w+ more than [\d,]+ characters", "the width in a format", "is unsafe"
BOMBS = {
    "loops in loops": (ROUND * 3 + "{% endfor %}" * 3, MUCH),
    "loops over what a condition leaves out": (
        ROUND + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}", MUCH),
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", MUCH),
    "a macro that calls itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a block that calls itself": ("{% block a %}{{ self.a() }}{% endblock %}", "recursion"),
    "a power": ("{{ 10 ** (10 ** 10) }}", "an integer of more than"),
    "squares of squares": ("{% set n = namespace(a=3) %}{% for i in range(60) %}{% set n.a = n.a * n.a %}{% endfor %}",
                           "an integer of more than"),
    "a text of 100 GB": ("{{ 'x' * 10 ** 11 }}", MUCH),
    "a text of 100 MB": ("{{ 'x' * 10 ** 8 }}", MUCH),
    "a text of 1 MB": ("{{ 'x' * 10 ** 6 }}", r"the template prints more than [\d,]+ characters for one example"),
    "a list of 100 GB": ("{{ ([0] * 10 ** 11) | length }}", MUCH),
    "a list that grows": ("{% set n = namespace(a=[1]) %}" + ROUND + "{% set n.a = n.a + n.a %}{% endfor %}", MUCH),
    "a text that grows": ("{% set n = namespace(a='x') %}" + ROUND + "{% set n.a = n.a ~ n.a %}{% endfor %}", MUCH),
    "a block that grows": ("{% set n = namespace(a='x') %}" + ROUND
                           + "{% set b %}{{ n.a }}{{ n.a }}{% endset %}{% set n.a = b %}{% endfor %}", MUCH),
    "slices": (MILLION + "{% set n = namespace(a=[]) %}" + ROUND + "{% set n.a = n.a + [a[1:]] %}{% endfor %}", MUCH),
    "a nested list, printed": (NESTED + "{{ n.a }}", MUCH),
    "a nested list in a namespace": (NESTED + "{{ n }}", MUCH),
    "a nested list as JSON": (NESTED + "{{ n.a | tojson }}", MUCH),
    "a nested list as upper case": (NESTED + "{{ n.a | upper | length }}", MUCH),
    "a nested list, formatted": (NESTED + "{{ '{!r}'.format(n.a) | length }}", MUCH),
    "a nested list and %": (NESTED + "{{ ('%s' % [n.a]) | length }}", MUCH),
    "a nested mapping": (
        NESTED.replace("[n.a, n.a]", "{'a': n.a, 'b': n.a}") + "{{ n.a.items() }}", "nested more than"),
    "a sum of lists": ("{% set a = [0] * 10 ** 5 %}{{ ([a] * 10 ** 5) | sum(start=[]) | length }}", MUCH),
    "a nested list, printed nicely": (NESTED + "{{ n.a | pprint }}", MUCH),
    "a nested list as the reason of an error": (NESTED + "{{ raise_exception(n.a) }}", MUCH),
    "keys to sort by": ("{{ ([{'a': 'X' * 10 ** 6}] * 10 ** 4) | sort(attribute='a') | length }}", MUCH),
    "a key to group by": ("{{ ([{}] * 10 ** 4) | groupby('a', default='X' * 10 ** 6) | length }}", MUCH),
    "a joined list": (MILLION + "{{ ([a] * 10 ** 5) | join | length }}", MUCH),
    "a joined list, by the method": (MILLION + "{{ ''.join([a] * 10 ** 5) | length }}", MUCH),
    "a joined generator": (MILLION + "{{ ''.join(([a] * 10 ** 5) | map('trim')) | length }}", MUCH),
    "replace": (MILLION + "{{ a.replace('x', 'y' * 10 ** 4) | length }}", MUCH),
    "the filter replace": (MILLION + "{{ a | replace(new='y' * 10 ** 4, old='x') | length }}", MUCH),
    "translate": ("{{ 'x'.translate({120: 'y' * 1000}) }}", UNSAFE),
    "bytes": ("{{ (1).to_bytes(10 ** 10, 'big') }}", UNSAFE),
    "a wide %": ("{{ '%10000000000d' % 1 }}", WIDE),
    "a wide % with a name": ("{{ '%(a)10000000000d' % {'a': 1} }}", WIDE),
    "a wide % of an argument": ("{{ '%*d' % (10 ** 10, 1) }}", WIDE),
    "a wide % as a filter": ("{{ '%10000000000d' | format(1) }}", WIDE),
    "a wide format": ("{{ '{:>10000000000}'.format(1) }}", WIDE),
    "a wide format of an argument": ("{{ '{:>{}}'.format(1, 10 ** 10) }}", WIDE),
    "a wide format of a mapping": ("{{ '{a:>10000000000}'.format_map({'a': 1}) }}", WIDE),
    "center": ("{{ 'x'.center(10 ** 11) }}", MUCH),
    "center of a text by its name": ("{{ 'x'['center'](10 ** 11) }}", MUCH),
    "center of an escaped text": ("{{ ('x' | escape).center(10 ** 11) }}", MUCH),
    "the filter center": ("{{ 'x' | center(10 ** 11) }}", MUCH),
    "the filter center of each": ("{{ ['x'] | map('center', 10 ** 11) | list }}", MUCH),
    "center of a block": ("{% filter center(10 ** 11) %}x{% endfilter %}", MUCH),
    "indent": ("{{ ('a\n' * 10 ** 5) | indent(10 ** 9) }}", MUCH),
    "tojson with a wide indent": ("{{ [1] | tojson(indent=10 ** 10) }}", MUCH),
    "wordwrap": ("{{ ('a ' * 10 ** 5) | wordwrap(1, wrapstring='x' * 10 ** 5) | length }}", MUCH),
    "batch": ("{{ [1] | batch(10 ** 10, 'x') | list | length }}", MUCH),
    "round": ("{{ 1.5 | round(10 ** 10, 'ceil') }}", MUCH),
    "a date": ("{{ strftime_now('%c' * 10 ** 6) | length }}", MUCH),
    "lipsum": ("{{ lipsum(n=10 ** 9) }}", "undefined"),
    "include": ("{% include 'x' %}", "no loader"),
    "an argument that tojson does not have": ("{{ 1 | tojson(default=messages) }}", "default"),
}  # fmt: skip


@contextmanager
def limited_memory(num_bytes):
    """More of it is a MemoryError, in place of a dead machine."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + num_bytes, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


SLOW_BOMBS = {"loops over what a condition leaves out", "macros that call themselves twice", "a sum of lists"}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW_BOMBS)) for case in BOMBS]
)
def test_a_template_that_takes_too_much_for_a_later_example_is_refused(make_tokenizer, case):
    bomb, reason = BOMBS[case]
    later = "{% if messages[0]['content'] == 'no' %}{% block b %}" + bomb + "{% endblock %}{% endif %}"
    tokenizer = make_tokenizer(CHATML + later)
    before = cpu_seconds()
    with limited_memory(1 << 30), pytest.raises(UserError, match=rf"fails on a later one: .*{reason}"):
        dataset_stats(PICKY, "sft", tokenizer, max_length=None)
    assert cpu_seconds() - before < 30


@pytest.mark.rest
@pytest.mark.parametrize("case", ["loops in loops", "a text of 100 GB"])
def test_a_template_that_takes_too_much_for_the_first_example_is_refused(make_tokenizer, case):
    with pytest.raises(UserError, match=rf"the chat template fails on the first example: {MUCH}"):
        check_template(make_tokenizer(CHATML + BOMBS[case][0]), "sft", True, SFT)


def test_a_template_is_compiled_once_and_has_its_budget_at_each_rendering():
    environment = BoundedEnvironment()
    source = "{{ ('x' * number) | length }}"
    template = environment.from_string(source)
    assert environment.from_string(source) is template
    assert [template.render(number=BUDGET // 3) for _ in range(4)] == [str(BUDGET // 3)] * 4


def test_a_template_that_takes_too_much_for_prompts_alone_is_refused(make_tokenizer):
    tokenizer = make_tokenizer(CHATML + "{% if add_generation_prompt %}" + BOMBS["a text of 100 GB"][0] + "{% endif %}")
    dataset = Dataset.from_list([{"prompt": chat(1)[:-1], "completion": chat(1)[-1:]}])
    with pytest.raises(UserError, match=MUCH):
        dataset_stats(dataset, "sft", tokenizer, max_length=None)


def test_a_range_beyond_the_sandbox_is_a_template_that_fails(make_tokenizer):
    tokenizer = make_tokenizer(CHATML + "{% for i in range(10 ** 9) %}{% endfor %}")
    with pytest.raises(UserError, match=r"the chat template fails on the first example: Range too big"):
        check_template(tokenizer, "sft", True, SFT)


def test_a_template_that_fails_on_a_later_row_is_refused(make_tokenizer):
    picky = CHATML + "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    with pytest.raises(UserError, match=r"fails on a later one: not this one"):
        dataset_stats(PICKY, "sft", make_tokenizer(picky), max_length=None)


FEATURES = """\
{%- macro f(x, y=2) -%}{{ x ~ y ~ caller() }}{%- endmacro -%}
{%- set n = namespace(a=[], t='') -%}
{%- for m in messages if m.role != 'tool' recursive -%}
{{ loop.index ~ loop.last ~ m['content'][1:-1] + '|' }}{% set n.a = n.a + [loop.length, 'x' * 3, 7 // 2, -3, 2 ** 5] %}
{%- else -%}none{%- endfor -%}
{%- call f(1) -%}c{%- endcall -%}{% filter upper %}up{% endfilter %}{% set b %}<{{ n.a }}>{% endset %}{{ b }}
{{- '%s %5.2f %(a)s' | replace('%', '') }}{{ '%5.2f-%s' % (1.5, 'a') }}{{ '%(a)s' | format(a=1) }}
{{- '{:>5}{a!r}'.format('x', a=[1]) }}{{ '{a}'.format_map({'a': 2}) }}{{ ','.join(n.a | map('string')) }}
{{- [3, 1] | sort | join('-') }}{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{- {'a': {'b': [1, none, true]}} | tojson(indent=2) }}{{ 'a b'.split() }}{{ 'x'.center(5) }}{{ 'x' | indent(4) }}
{{- dict(a=1).items() | list }}{{ range(3) | list }}{{ ('a' | escape) + '<' }}
{{- ('{}' | escape).format('<') + '<' }}{{ [1] | pprint }}{{ 1.234 | round(1) }}{{ missing }}
{%- block z %}{{ messages[0].content.replace('a', 'b').strip().upper()[:4] }}{% endblock %}{{ self.z() }}
"""
TRLS = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": "b" * 50}}}
TOOLS = [
    {"type": "function", "function": {"name": f"f{i}", "description": "d " * 50, "parameters": {}}} for i in range(9)
]
CHATS = [
    chat(1, turns=50),
    [*chat(1), {"role": "user", "content": "<b> 'x' é" * 2000},
     {"role": "assistant", "content": "<think>\na</think>\nb"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
]  # fmt: skip


def rendered(monkeypatch, environment, template, turns, tools):
    """The text; or the error."""
    monkeypatch.setattr(chat_template_utils, "ImmutableSandboxedEnvironment", environment)
    names: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        return chat_template_utils.render_jinja_template([turns], tools=tools, chat_template=template, **names)[0][0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.rest
def test_templates_render_as_in_jinjas_own_sandbox(monkeypatch):
    texts = [FEATURES, *(file.read_text() for file in TRLS)]
    num_rendered = 0
    for template in texts:
        ours, jinjas = [], []
        for environment, results in ((BoundedEnvironment, ours), (ImmutableSandboxedEnvironment, jinjas)):
            chat_template_utils._compile_jinja_template.cache_clear()
            for turns, tools in zip(CHATS, (None, None, TOOLS), strict=True):
                results.append(rendered(monkeypatch, environment, template, turns, tools))
        assert ours == jinjas
        num_rendered += sum("Error: " not in text[:30] for text in ours)
    assert num_rendered > 2 * len(texts)  # the others fail: they want alternating roles, for example
    chat_template_utils._compile_jinja_template.cache_clear()
