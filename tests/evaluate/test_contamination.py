"""Overlaps of training examples with questions: the index against sets of tuples, and planted ones."""

import io
import json
import random
import statistics
from types import SimpleNamespace

import pytest
from rich.console import Console
from soren_align.data import load_split, texts_of
from soren_align.evaluate.report.results import read_results
from soren_align.evaluate.run.stage import evaluate
from soren_align.evaluate.stats import contamination
from soren_align.evaluate.stats.contamination import Overlaps, overlaps, overlaps_with, question_texts
from soren_align.evaluate.suite.suites import suite_of
from soren_align.evaluate.suite.tasks import load_tasks
from soren_align.launch import evaluation
from soren_align.launch.evaluation import overlaps_of_runs
from soren_align.recipe import DataSplit, Eval, load_resolved
from tests.support.tiny_run import TinyRun

NGRAM = 13
QUICKSTART = Eval(suite="quickstart")


def words(text):
    """Lower-case words; of each character only letters, digits and whitespace remain."""
    result = "".join(c for c in text.lower() if c.isalnum() or c.isspace()).split()
    result = result[1:] if result[:1] in (["question"], ["q"]) else result
    return result[:-1] if result[-1:] in (["answer"], ["a"]) else result


def ngrams(text):
    w = words(text)
    return {tuple(w[i : i + NGRAM]) for i in range(len(w) - NGRAM + 1)}


def reference(columns, examples):
    """The indices of overlapping and of equal questions, from sets of tuples of words."""
    texts = [text for example in examples for text in example]
    known, wholes = set().union(*map(ngrams, texts)), {tuple(words(text)) for text in texts}
    overlapping, exact = {}, {}
    for column, questions in columns.items():
        own = [ngrams(question) for question in questions]
        limit = max(10, len(questions) / 2)
        fixed = {gram for grams in own for gram in grams if sum(gram in other for other in own) > limit}
        exact[column] = [i for i, q in enumerate(questions) if words(q) and tuple(words(q)) in wholes]
        shared = [i for i, grams in enumerate(own) if (grams - fixed) & known]
        overlapping[column] = sorted({*exact[column], *shared})
    return overlapping, exact


ALPHABET = [
    "The", "river", "flows", "under,", "café", "naïve", "“wind”", "turns.", "3.5", "_", "Question:", "a", "answer:",
]  # fmt: skip
ALPHABET += ["-", "q"]
FIXED = "Read the following text with care and then choose one of these four answers below, please:"


def sentence(rng, length, num_words):
    return rng.choice((" ", "  ", "\n")).join(rng.choices(ALPHABET[:num_words], k=length))


@pytest.mark.parametrize("seed", range(12))
def test_the_index_is_the_sets_of_tuples(seed, monkeypatch):
    """Few words, so that n-grams often repeat."""
    monkeypatch.setattr(contamination, "REPORTED_EXAMPLES", 7)
    rng, num_words = random.Random(seed), 3 + seed
    lengths = (0, 1, 3, 5, 12, 13, 14, 40)
    columns = {f"column{i}": [sentence(rng, rng.choice(lengths), num_words) for _ in range(rng.choice((1, 5, 30)))]
               for i in range(3)}  # fmt: skip
    columns["fixed"] = [f"{FIXED} {sentence(rng, rng.choice(lengths), num_words)}" for _ in range(30)]
    columns["empty"] = []
    examples = [[sentence(rng, rng.choice(lengths), num_words) for _ in range(rng.randrange(3))] for _ in range(60)]
    every = [question for questions in columns.values() for question in questions]
    examples += [[f"Well: {question.upper()}!", question] for question in rng.sample(every, 4)]
    counts = []
    result = overlaps(columns, examples, counts.append)
    assert (result.overlapping, result.exact) == reference(columns, examples)
    assert result.examples_read == sum(counts) == len(examples)
    assert result.questions == {column: len(questions) for column, questions in columns.items()}
    assert any(result.overlapping.values())


def test_equal_hashes_of_other_words_are_no_overlap(monkeypatch):
    monkeypatch.setattr(contamination, "hash", lambda ngram: 0, raising=False)
    question, other = (" ".join(f"{letter}{i}" for i in range(13)) for letter in "xy")
    assert overlaps({"c": [question]}, [[other]]).overlapping == {"c": []}
    assert overlaps({"c": [question, other]}, [[question]]).overlapping == {"c": [0]}


def test_a_wording_of_the_task_is_no_overlap():
    """Eleven of twenty questions begin alike: more than ten, and more than half."""
    questions = [f"{FIXED} question {i}" for i in range(11)] + [f"Another question, {i}" for i in range(9)]
    assert overlaps({"c": questions}, [[FIXED]]).overlapping == {"c": []}
    assert overlaps({"c": questions[1:]}, [[FIXED]]).overlapping == {"c": list(range(10))}


LONG = "On the far side of the old stone bridge, seven wooden boats wait for the evening tide."


def planted(folder, task, questions):
    """A file of training examples that contain these questions: the first as a whole, the others within a turn."""
    first, *others = questions
    turns = [[{"role": "user", "content": first.upper()}, {"role": "assistant", "content": "yes"}]]
    for question in others:
        user, answer = {"role": "user", "content": "Tell me"}, {"role": "assistant", "content": f"It is: {question}"}
        turns.append([user, answer])
    lines = [{"messages": chat} for chat in turns]
    if task == "dpo":  # the rejected side alone has it
        lines = [{"chosen": [chat[0], {"role": "assistant", "content": "no"}], "rejected": chat} for chat in turns]
    file = folder / f"{task}.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_a_planted_question_is_counted_once_and_the_result_is_cached(task, tmp_path, monkeypatch):
    questions = {"zoo": ["Which home does the mole have?", LONG, "Which home does the owl have?"]}
    file = planted(tmp_path, task, [questions["zoo"][0], LONG, questions["zoo"][2]])
    dataset = load_split(DataSplit(path=str(file)), task).dataset
    assert sum(map(len, texts_of(dataset))) == {"sft": 6, "dpo": 9}[task]
    expected = Overlaps({"zoo": 3}, {"zoo": [0, 1]}, {"zoo": [0]}, 3)  # the third is short, and within a turn
    assert overlaps_with(dataset, questions, tmp_path) == expected
    assert overlaps_with(dataset, {"zoo": [*questions["zoo"], "Why?"]}, tmp_path).questions == {"zoo": 4}
    monkeypatch.setattr(contamination, "overlaps", None)
    assert overlaps_with(dataset, questions, tmp_path) == expected


def test_questions_are_without_few_shot_examples_and_fixed_answers(data_root):
    """TruthfulQA's prompt has six answered questions before each; the query that lm-eval declares has none."""
    suite = suite_of(Eval(suite="open-llm-leaderboard-v1", data_root=str(data_root), omit=["mmlu"]))
    tasks = load_tasks(suite)
    texts = question_texts(tasks)
    assert all(len(texts[task.column]) == 4 and all(map(words, texts[task.column])) for task in suite.tasks)
    docs = tasks["truthfulqa_mc2"].eval_docs
    assert texts["truthfulqa_mc2"] == [doc["question"] for doc in docs]
    assert texts["gsm8k"] == [f"Question: {doc['question']}\nAnswer:" for doc in tasks["gsm8k"].eval_docs]
    assert texts["winogrande"] == [doc["sentence"] for doc in tasks["winogrande"].eval_docs]
    assert all(text.startswith("Question: ") and text.count("Answer:") == 1 for text in texts["arc_challenge"])
    assert all(len(each) == 2 for each in question_texts(tasks, 2).values())


@pytest.fixture(scope="module")
def table(models, tmp_path_factory):
    """A table of two models, of whose questions some are planted."""
    output = tmp_path_factory.mktemp("table")
    indices = {"zoo_mc": [0, 7, 119], "zoo_gen": [], "preference": list(range(120))}
    result = Overlaps(dict.fromkeys(indices, 120), indices, {"zoo_mc": [7], "zoo_gen": [], "preference": []}, 960)
    rows = [("base", models[0]), ("SFT", models[1])]
    console = Console(file=io.StringIO())
    results = evaluate(rows, QUICKSTART, output, device="cpu", console=console, find_overlaps=lambda tasks: result)
    return results, output


@pytest.mark.rest
def test_scores_without_overlapping_questions_are_the_mean_of_the_others(table):
    results, output = table
    section = results["contamination"]
    assert read_results(output)["contamination"] == section
    entry = {key: value for key, value in section["zoo_mc"].items() if key != "scores"}
    assert entry == {"questions": 120, "overlapping": 3, "exact": 1, "examples_read": 960, "indices": [0, 7, 119]}
    assert "scores" not in section["zoo_gen"]
    assert "scores" not in section["preference"]
    values = []
    for row in results["rows"]:
        lines = (output / "samples" / row["name"] / "zoo_mc.jsonl").read_text().splitlines()
        points = [json.loads(line)["acc"] for i, line in enumerate(lines) if i not in (0, 7, 119)]
        score = section["zoo_mc"]["scores"][row["name"]]
        values.append(100 * statistics.fmean(points))
        assert score["value"] == pytest.approx(values[-1])
        assert score["change"] == pytest.approx(values[-1] - row["scores"]["zoo_mc"]["value"])
    difference = section["zoo_mc"]["scores"]["SFT"]["difference"]
    assert difference["value"] == pytest.approx(values[1] - values[0])
    assert difference["low"] < difference["value"] < difference["high"]
    assert "difference" not in section["zoo_mc"]["scores"]["base"]


@pytest.fixture(scope="module")
def quickstart_tasks():
    return load_tasks(suite_of(QUICKSTART))


@pytest.fixture
def run(tmp_path, quickstart_tasks):
    """A tiny run whose training examples contain a question of zoo_mc and zoo_gen, and of preference."""
    keys = {"zoo_mc": "question", "preference": "prompt"}
    asked = [quickstart_tasks[column].eval_docs[5][key] for column, key in keys.items()]
    barn = {"role": "assistant", "content": "barn"}
    lines = [{"messages": [{"role": "user", "content": text}, barn]} for text in asked]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines * 8))
    tiny = TinyRun(tmp_path / "run", "sft", "trainer.max_steps=1", f"data.train={{path: {file}}}")
    tiny.train()
    return tiny.folder, file


@pytest.mark.model
def test_the_examples_of_a_run_are_read_again_unless_they_were_changed(run, quickstart_tasks, tmp_path, monkeypatch):
    folder, file = run
    rows = [("base", folder.start), ("SFT", folder.model)]
    console = Console(file=io.StringIO())
    result = overlaps_of_runs(rows, None, tmp_path, console, quickstart_tasks)
    assert result.exact == result.overlapping == {"zoo_mc": [5], "zoo_gen": [5], "preference": [5]}
    assert result.examples_read == 16
    recipe = load_resolved(folder.recipe)
    streamed = recipe.model_copy(update={"data": SimpleNamespace(streaming=True)})
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "load_resolved", lambda path: streamed)
        assert "the run streamed its examples" in overlaps_of_runs(rows, None, tmp_path, console, quickstart_tasks)
    base = overlaps_of_runs(rows[:1], None, tmp_path, console, quickstart_tasks)
    assert "no model of the table is from a run" in base
    with file.open("a") as stream:
        stream.write(file.read_text().splitlines()[0] + "\n")
    changed = overlaps_of_runs(rows, None, tmp_path, console, quickstart_tasks)
    assert changed.endswith(f"{file} was changed after the training")
    file.unlink()
    assert "no file" in overlaps_of_runs(rows, None, tmp_path, console, quickstart_tasks)
