"""Questions without a field that their task reads are refused with file and line, before training."""

import json

import pytest
from soren_align.evaluate.suite.tasks import missing_field

TASK = {"test_split": "test", "doc_to_text": "{{question}}", "doc_to_target": "{{ answer }}"}
RIGHT = {"question": "Where?", "answer": "Here."}


@pytest.fixture
def found(tmp_path):
    """found(task, *questions) -> `missing_field`, with "test.jsonl" in place of the file's path."""

    def find(task, *questions):
        file = tmp_path / "test.jsonl"
        file.write_text("".join(json.dumps(each) + "\n" for each in questions))
        (tmp_path / "train.jsonl").write_text('{"other": 1}\n')
        return missing_field(task, tmp_path).replace(str(file), "test.jsonl")

    return find


@pytest.mark.parametrize(("questions", "message"), [
    ([{"question": "Where?", "anwser": "Here."}],
     "test.jsonl:1: the question has no 'answer', which doc_to_target of the task reads, but only"),
    ([RIGHT, {"question": "Where?", "anwser": "Here."}], "but only question, anwser; rename 'anwser' to 'answer'"),
    ([RIGHT, RIGHT | {"answer": None}], "but only question, answer; add 'answer', or remove this question"),
    ([RIGHT, {"answer": "Here."}], "test.jsonl:2: the question has no 'question', which doc_to_text of the task reads"),
])  # fmt: skip
def test_the_first_question_without_a_field_is_named(found, questions, message):
    assert message in found(TASK, *questions)


@pytest.mark.parametrize("setting", ["doc_to_target", "doc_to_choice"])
def test_a_setting_without_braces_is_a_field(found, setting):
    assert f"has no 'key', which {setting} of the task reads" in found({setting: "key"}, RIGHT)


@pytest.mark.parametrize("task", [
    TASK,
    {"doc_to_text": "{% if hint %}{{hint}}{% endif %}{{question}}"},
    {"doc_to_text": "{{ hint | default('') }}"},
    {"doc_to_text": "question"},  # text, as lm-eval reads it where no field has that name
    {"doc_to_target": "The answer"},
    {"doc_to_target": 0},
    TASK | {"doc_to_target": "{{key}}", "process_docs": "utils.process_docs"},
])  # fmt: skip
def test_fields_that_may_be_missing_are_not_asked_for(found, task):
    assert found(task, RIGHT) == ""
