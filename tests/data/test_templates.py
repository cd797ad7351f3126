"""check_template: a template that cannot carry the training is refused on the first example, or on a later one."""

from itertools import islice
from types import SimpleNamespace

import pytest
from datasets import Dataset
from soren_align.core.errors import UserError
from soren_align.data import check_template, dataset_stats, load_split, open_stream, tokenize, without_empty_answers
from soren_align.training.packing import TokenStream
from tests.support.conversations import CHATML, chat, pair_row, split

SFT = Dataset.from_list([{"messages": chat(1)}])
TWO = Dataset.from_list([{"messages": chat(1, turns=2)}])
DPO = Dataset.from_list([{column: pair_row(1)[column] for column in ("chosen", "rejected")}])
PICKY = Dataset.from_list([{"messages": chat(1)}, {"messages": [
    {"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]}])  # fmt: skip
PLAIN = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
WITHOUT_REASONING = PLAIN.replace("{{ m['content']", "{{ m['content'].split('</think>')[-1]")


def refused(tokenizer, task="sft", assistant_only_loss=True, rows=SFT):
    with pytest.raises(UserError) as caught:
        check_template(tokenizer, task, assistant_only_loss, rows if task == "sft" else DPO)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("trim", ["{% generation %}", "{%- generation -%}", "{%generation%}"])
def test_a_template_with_markers_passes(make_tokenizer, trim):
    template = CHATML.replace("{% generation %}", trim)
    check_template(make_tokenizer(template), "sft", True, SFT)
    check_template(make_tokenizer(template), "dpo", False, DPO)


def test_without_markers_the_answers_are_derived_or_the_template_is_refused(make_tokenizer):
    check_template(make_tokenizer(PLAIN), "sft", False, SFT)
    check_template(make_tokenizer(PLAIN), "dpo", True, DPO)  # DPO needs no markers
    assert check_template(make_tokenizer(PLAIN), "sft", True, SFT) == []
    hidden = PLAIN.replace("'<|im_end|>' }}", "'<|im_end|>' if loop.last else '' }}")
    assert "renders earlier turns differently when later turns are added" in refused(make_tokenizer(hidden), rows=TWO)


def test_a_tokenizer_without_a_template_is_refused(make_tokenizer):
    assert "has no chat template; set model.chat_template" in refused(make_tokenizer(None))
    assert "has no chat template; set model.chat_template" in refused(make_tokenizer(None), "dpo")
    named = make_tokenizer({"tool_use": CHATML, "rag": CHATML})
    assert "has the chat templates tool_use, rag, but none named default" in refused(named)


@pytest.mark.parametrize(("template", "reason"), [
    ("{% generation %}{{ raise_exception('no users\nhere') }}{% endgeneration %}", "example: no users"),
    ("{% generation %}{{ messages", "(line 1 of the template)"),
    ("{% generation %}{{ 1 / 0 }}{% endgeneration %}", "division by zero"),
    ("{% generation %}{{ messages[0]['content'] + none }}{% endgeneration %}", "can only concatenate str"),
])  # fmt: skip
def test_a_template_that_fails_is_refused_in_one_line(make_tokenizer, template, reason):
    message = refused(make_tokenizer(template))
    assert "the chat template fails on the first example" in message
    assert reason in message


@pytest.mark.parametrize(("later", "reason"), [
    ("raise_exception('not this one')", "not this one"),
    ("messages.__class__.__mro__", "access to attribute '__class__' of 'list' object is unsafe"),
    ("messages.append(1)", "access to attribute 'append' of 'list' object is unsafe"),
    ("range(10 ** 9) | list", "Range too big"),
])  # fmt: skip
def test_a_template_that_fails_on_a_later_example_or_leaves_the_sandbox_is_refused(make_tokenizer, later, reason):
    picky = CHATML + "{% if messages[0]['content'] == 'no' %}{{ " + later + " }}{% endif %}"
    with pytest.raises(UserError, match=rf"fails on a later one: {reason}"):
        dataset_stats(PICKY, "sft", make_tokenizer(picky), max_length=None)


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_template_that_leaves_out_the_answer_is_refused(make_tokenizer, task):
    mute = CHATML.replace("m['content'] + '<|im_end|>'", "'<|im_end|>'")
    assert "without the answer 'Animal number 1" in refused(make_tokenizer(mute), task)


def reasoned(content="The sum is 3."):
    return {"role": "assistant", "content": f"<think>\nI add 1 and 2.\n</think>\n\n{content}"}


# the examples of a file whose first one has no reasoning, and the number of those whose last answer is cut
CUT = {
    "messages": ("sft", [{"messages": chat(1)}, *[{"messages": [*chat(1)[:-1], reasoned()]}] * 2], 2),
    "completions": ("sft", [{"prompt": chat(1)[:-1], "completion": [answer]} for answer in (chat(1)[-1], reasoned())],
                    1),
    "equal pairs": ("dpo", [pair_row(1), *[{"chosen": [*chat(1)[:-1], reasoned()], "rejected": [*chat(1)[:-1],
                    {"role": "assistant", "content": "The sum is 3."}]}] * 2], 2),
}  # fmt: skip


@pytest.mark.parametrize("form", CUT)
def test_a_last_answer_of_which_the_template_prints_a_part_is_refused_wherever_it_is(
    make_tokenizer, write, tmp_path, form
):
    task, rows, number = CUT[form]
    loaded = load_split(split(write("rows.jsonl", rows)), task)
    for template in (PLAIN, PLAIN.replace("m['content']", "m['content'] | replace('\n\n', '\n') | trim")):
        tokens = tokenize(loaded.dataset, task, make_tokenizer(template), tmp_path / "cache")
        assert len(without_empty_answers(loaded, tokens)[1]) == len(rows)
    tokens = tokenize(loaded.dataset, task, make_tokenizer(WITHOUT_REASONING), tmp_path / "cache")
    with pytest.raises(
        UserError, match=f"part of the last answer.* in {number} of {len(rows)} examples.*; set model.c"
    ):
        without_empty_answers(loaded, tokens)


def test_reasoning_that_the_template_removes_from_earlier_answers_is_counted(make_tokenizer):
    earlier = [chat(1)[0], reasoned(), *chat(2)]
    rows = [{"messages": turns} for turns in (chat(1), earlier, [earlier[0], {**earlier[1], "weight": 0}, *chat(2)])]
    counted = dataset_stats(Dataset.from_list(rows), "sft", make_tokenizer(WITHOUT_REASONING), max_length=None)
    assert counted.num_left_out == {"a part of earlier answers": 1}


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_turn_that_the_template_does_not_print_is_counted(make_tokenizer, task):
    system = {"role": "system", "content": "Answer in French."}
    rows = {
        "sft": {"messages": [system, *chat(1)]},
        "dpo": {k: [system, *pair_row(1)[k]] for k in ("chosen", "rejected")},
    }
    others = {"sft": {"messages": chat(1)}, "dpo": {k: pair_row(1)[k] for k in ("chosen", "rejected")}}
    silent = make_tokenizer("{% set messages = messages | rejectattr('role', 'eq', 'system') | list %}" + PLAIN)
    for tokenizer, number in ((make_tokenizer(PLAIN), {}), (silent, {"a part of system turns": 2})):
        dataset = Dataset.from_list([rows[task], rows[task], others[task]])
        assert dataset_stats(dataset, task, tokenizer, max_length=None).num_left_out == number


def test_a_stream_drops_each_answer_that_the_template_cuts(make_tokenizer, write):
    rows = [{"messages": chat(i)} if i % 3 else {"messages": [chat(i)[0], reasoned()]} for i in range(30)]
    preview, _ = open_stream([split(write("rows.jsonl", rows), weight=1)], "sft", 30, 0)
    args = SimpleNamespace(max_length=None)
    stream = TokenStream(preview.stream, "sft", make_tokenizer(WITHOUT_REASONING), args, (False, True))
    assert len(list(islice(stream.rows(), 20))) == 20
    (reason,) = stream.dropped
    assert "leaves out a part of the last answer" in reason
    assert stream.dropped[reason] == 10


def test_a_template_that_marks_nothing_is_refused(make_tokenizer):
    nothing = PLAIN + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    assert "marks no token of an answer" in refused(make_tokenizer(nothing))


def test_plain_texts_need_no_template_but_an_end(make_tokenizer):
    texts = Dataset.from_list([{"text": "A lynx."}])
    assert check_template(make_tokenizer(None), "sft", False, texts) == []
    with pytest.raises(UserError, match=r"has no eos_token, which ends plain texts; write model.eos_token"):
        check_template(make_tokenizer(None, eos=None), "sft", False, texts)
    message = r"assistant_only_loss: true needs conversations, but these examples are plain texts \(columns te"
    with pytest.raises(UserError, match=message):
        check_template(make_tokenizer(), "sft", True, texts)


def test_completion_only_loss_needs_completions(make_tokenizer):
    rows = Dataset.from_list([{"prompt": "A lynx ", "completion": "sleeps."}])
    assert check_template(make_tokenizer(None), "sft", False, rows, True) == []
    with pytest.raises(UserError, match=r"completion_only_loss needs .* these examples have messages; remove this key"):
        check_template(make_tokenizer(), "sft", False, SFT, True)


def test_prompts_and_completions_as_turns_are_rendered_whole(make_tokenizer):
    turns = chat(1)
    rows = Dataset.from_list([{"prompt": turns[:-1], "completion": turns[-1:]}])
    for completion_only in (None, True, False):
        assert check_template(make_tokenizer(), "sft", True, rows, completion_only) == []
    (notice,) = check_template(make_tokenizer(eos="<|endoftext|>"), "sft", False, rows)
    assert notice.startswith("answers end with <|im_end|>, but the model stops at <|endoftext|>")
    with pytest.raises(UserError, match="has no chat template"):
        check_template(make_tokenizer(None), "sft", False, rows)


def test_a_stop_token_outside_the_markers_is_refused(make_tokenizer):
    outside = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}<|im_end|>")
    assert "leaves <|im_end|> out of {% generation %}" in refused(make_tokenizer(outside))
    assert "leaves <|im_end|> out" in refused(make_tokenizer(outside, eos="<|endoftext|>"))
    assert check_template(make_tokenizer(outside), "sft", False, SFT) == []  # all of it is trained


@pytest.mark.parametrize(("task", "rows"), [("sft", SFT), ("dpo", DPO)])
def test_a_stop_token_that_is_not_the_templates_is_told(make_tokenizer, task, rows):
    (notice,) = check_template(make_tokenizer(eos="<|endoftext|>"), task, False, rows)
    words = "answers end with <|im_end|>, but the model stops at <|endoftext|>: add model.eos_token: '<|im"
    assert notice.startswith(words)
    endless = PLAIN.replace("+ '<|im_end|>'", "").replace("<|im_end|>", "")
    (notice,) = check_template(make_tokenizer(endless), task, False, rows)
    assert "ends answers without a stop token, so the model will not learn to stop at <|im_end|>; set model" in notice
    if task == "sft":  # the answers alone are trained: nothing would follow them
        assert "ends answers without a stop token, so the model will not learn to stop; set" in refused(
            make_tokenizer(endless)
        )
    assert check_template(make_tokenizer(), task, False, rows) == []
