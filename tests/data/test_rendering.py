"""A chat template ends in seconds, or is refused before training."""

import errno

import pytest
from datasets import Dataset

from soren_align.data import account, check_template, encoding, rendering
from soren_align.errors import UserError
from tests.support.conversations import CHATML, chat
from tests.support.cpu_time import cpu_seconds

SFT = Dataset.from_list([{"messages": chat(1)}])
ROUND = "{% for i in range(99999) %}"
ENDLESS = {
    "loops in loops": ROUND * 3 + "{% endfor %}" * 3,
    "loops in loops, for prompts only": "{% if add_generation_prompt %}"
    + ROUND * 3
    + "{% endfor %}" * 3
    + "{% endif %}",
    "macros that call themselves twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a text of 100 GB": "{{ 'x' * 10 ** 11 }}",
    "a text of 100 MB": "{{ 'x' * 10 ** 8 }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a wide filter": "{{ 'x' | center(10 ** 11) }}",
    "a list that grows": "{% set n = namespace(a=[1]) %}" + ROUND + "{% set n.a = n.a + n.a %}{% endfor %}",
}


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_without_end_is_refused(make_tokenizer, case):
    tokenizer = make_tokenizer(CHATML + ENDLESS[case])
    before = cpu_seconds()
    with pytest.raises(UserError, match=r"the chat template (takes more than 2 seconds|renders more than 10,000,000)"):
        check_template(tokenizer, "sft", True, SFT)
    assert cpu_seconds() - before < 10


def test_without_a_second_process_no_template_is_tried(make_tokenizer, monkeypatch):
    def fork():
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(rendering.os, "fork", fork)
    with pytest.raises(UserError, match=r"none can be started: Cannot allocate memory$"):
        check_template(make_tokenizer(CHATML), "sft", True, SFT)


def test_a_range_beyond_the_sandbox_is_a_template_that_fails(make_tokenizer):
    tokenizer = make_tokenizer(CHATML + "{% for i in range(10 ** 9) %}{% endfor %}")
    with pytest.raises(UserError, match=r"the chat template fails on the first example: Range too big"):
        check_template(tokenizer, "sft", True, SFT)


def test_a_template_that_fails_on_a_later_row_is_refused(make_tokenizer):
    picky = CHATML + "{% if messages[0]['content'] == 'no' %}{{ raise_exception('not this one') }}{% endif %}"
    other = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    rows = Dataset.from_list([{"messages": chat(1)}, {"messages": other}])
    with pytest.raises(UserError, match=r"fails on a later one: not this one"):
        account(rows, "sft", make_tokenizer(picky), max_length=None)


def test_a_template_without_end_for_a_later_row_is_stopped(make_tokenizer, monkeypatch):
    picky = CHATML + "{% if messages[0]['content'] == 'no' %}" + ROUND * 3 + "{% endfor %}" * 3 + "{% endif %}"
    other = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    rows = Dataset.from_list([{"messages": chat(1)}, {"messages": other}])
    monkeypatch.setattr(encoding, "cpu_time_limit", lambda _, what: rendering.cpu_time_limit(0.5, what))
    with pytest.raises(
        UserError, match=r"fails on a later one: it takes more than 0.5 seconds; it may have nested loops"
    ):
        account(rows, "sft", make_tokenizer(picky), max_length=None)
