"""A question whose key is none of its choices would count as answered wrong by every model: it is refused."""

import json
import shutil
from types import SimpleNamespace

import pytest
from soren_align.core import shipped
from soren_align.core.errors import UserError
from soren_align.evaluate.suite.suites import load_suite
from soren_align.evaluate.suite.tasks import load_tasks, refuse_wrong_keys

CHOICES = ["red", "brown", "black"]


def task(*keys, **settings):
    """A task as lm-eval's, with a question for each key."""
    return SimpleNamespace(
        OUTPUT_TYPE="multiple_choice", task_name="colors", config=SimpleNamespace(process_results=None),
        eval_docs=[{"key": key} for key in keys], multiple_input=0, doc_to_choice=lambda question: CHOICES,
        doc_to_target=lambda question: question["key"], **settings,
    )  # fmt: skip


@pytest.mark.parametrize("key", [0, 2, "red", [0, 2], True])
def test_a_key_is_a_number_of_a_choice_or_its_text(key):
    refuse_wrong_keys(task(key), "colors.yaml")


@pytest.mark.parametrize("key", [3, -1, "1", "", [0, 3]])
def test_any_other_key_is_refused(key):
    with pytest.raises(UserError, match=r"colors.yaml: colors, question 2 \(and 1 more questions\): "):
        refuse_wrong_keys(task(1, key, 0, key), "colors.yaml")


def test_the_number_of_a_letter_is_named():
    with pytest.raises(UserError, match=r"or its text: for 'C' write 2$"):
        refuse_wrong_keys(task("C"), "colors.yaml")


def test_a_label_out_of_range_is_refused_when_the_suite_is_loaded(own_suite, tmp_path):
    suite, questions = own_suite
    lines = [json.loads(line) for line in questions.read_text().splitlines()]
    lines[5]["label"] = 4
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines))
    message = rf"{questions.name}:6: doc_to_target gives 4, which is none of the question's 4 choices \('"
    with pytest.raises(UserError, match=message):
        load_tasks(load_suite(suite))


def test_a_question_that_is_not_json_is_named_by_its_line(tmp_path):
    shutil.copytree(shipped.ROOT / "configs/new/questions", tmp_path / "suite")
    with (tmp_path / "suite/rephrased/test.jsonl").open("a") as stream:
        stream.write('{"question": "Who?", "answer": "Me"},\n')
    with pytest.raises(UserError, match=r"rephrased/test.jsonl:5: is not JSON: Extra data at column 37"):
        load_tasks(load_suite(tmp_path / "suite"))
