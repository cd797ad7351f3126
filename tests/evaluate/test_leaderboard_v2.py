"""The Open LLM Leaderboard v2 on invented questions in the hub's formats: as plain lm-eval, question by question."""

import contextlib
import shutil
import tempfile
from pathlib import Path

import lm_eval
import nltk
import pytest
import yaml
from lm_eval.tasks import TaskManager
from rich.console import Console
from soren_align.evaluate.run import harness
from soren_align.evaluate.run.harness import Options, evaluate_model
from soren_align.evaluate.run.stage import evaluate
from soren_align.evaluate.stats.paired import read_points
from soren_align.evaluate.stats.significance import compare
from soren_align.evaluate.suite.suites import load_suite
from soren_align.evaluate.suite.tasks import load_tasks, subtasks
from soren_align.recipe import Eval
from sympy.parsing.latex import parse_latex
from tests.support.leaderboard_v2_data import EQUAL, followed, write_nltk_data, write_v2_datasets
from tests.support.lm_eval_reference import TASKS
from tests.support.scripted_model import Script, ScriptedLM, workers
from tests.support.tiny_models import make_reader
from transformers import AutoTokenizer

pytestmark = [pytest.mark.model, pytest.mark.rest]  # 20 seconds of loading 76 data sets

DATASETS = {
    "ifeval": "wis-k/instruction-following-eval", "bbh": "SaylorTwift/bbh", "gpqa": "Idavidrein/gpqa",
    "math_hard": "DigitalLearningGmbH/MATH-lighteval", "musr": "TAUR-Lab/MuSR", "mmlu_pro": "TIGER-Lab/MMLU-Pro",
}  # fmt: skip
FEWSHOT = {"ifeval": 0, "bbh": 3, "math_hard": 4, "gpqa": 0, "musr": 0, "mmlu_pro": 5}
MUSR = {"murder_mysteries": 2, "object_placements": 5, "team_allocation": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, the six data sets, and nltk's data."""
    root = tmp_path_factory.mktemp("v2")
    make_reader(root / "model", chat_template=True)
    write_v2_datasets(root / "data")
    write_nltk_data(root / "nltk")
    nltk.data.path.insert(0, str(root / "nltk"))
    yield root
    nltk.data.path.remove(str(root / "nltk"))


@pytest.fixture(scope="module")
def suite(folder):
    return load_suite("open-llm-leaderboard-v2").model_copy(update={"data_root": str(folder / "data")})


@pytest.fixture(scope="module")
def tasks(suite):
    return load_tasks(suite)


@pytest.fixture(scope="module")
def scripts(tasks):
    """Two models. They answer about half of the questions rightly."""
    right = {doc["prompt"]: followed(doc) for doc in tasks["ifeval"].eval_docs}
    for subtask in subtasks(tasks["math_hard"]):
        for doc in subtask.eval_docs:
            end = "Final Answer: The final answer is ${}$. I hope it is correct."
            right[doc["problem"]] = end.format(EQUAL[doc["answer"]])
    return Script(right, "first"), Script(right, "second")


@pytest.fixture(scope="module")
def results(suite, folder, tasks, scripts):
    """Our results of both models."""
    found = []
    for script in scripts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(harness, "InProcess", workers(script))
            found.append(evaluate_model(folder / "model", suite, Options(device="cpu"), tasks=tasks))
    return found


@pytest.fixture(scope="module")
def plain(suite, folder, scripts):
    """lm-eval's own results of the first model, by column: its task files, loaded and run by simple_evaluate."""
    parse_latex("1")  # within its limit of a second, a busy machine may not load the grammar
    lm = ScriptedLM(scripts[0], AutoTokenizer.from_pretrained(folder / "model"))
    outputs = {}
    for task in suite.tasks:
        with tempfile.TemporaryDirectory() as place:
            settings = {"dataset_path": str(folder / "data" / DATASETS[task.column]),
                        "dataset_kwargs": {"cache_dir": f"{place}/cache"}}  # fmt: skip
            file = TASKS / task.file.removeprefix("lm-eval:")
            kind = "group" if "group" in yaml.load(file.read_text(), yaml.BaseLoader) else "task"
            group = {"group": "reference", "task": [{kind: task.task, **settings}]}
            Path(place, "reference.yaml").write_text(yaml.safe_dump(group))
            manager = TaskManager(include_path=[str(file.parent), place], include_defaults=False)
            outputs[task.column] = lm_eval.simple_evaluate(
                lm, tasks=["reference"], task_manager=manager, apply_chat_template=True, fewshot_as_multiturn=True,
                bootstrap_iters=0,
            )  # fmt: skip
    return outputs


def raw(output, name, metric):
    return output["results"][name][f"{metric},none"]


def normalized(value, num_choices):
    return (value - 1 / num_choices) / (1 - 1 / num_choices)


def test_every_prompt_answer_and_point_is_lm_evals_own(suite, results, plain):
    """GPQA's choices are shuffled with the seed, whatever was loaded before."""
    for task in suite.tasks:
        output, samples = plain[task.column], results[0].samples[task.column]
        names = {name for name in output["samples"] if name != "reference"}
        own = {(name, s["doc_id"]): s for name in names for s in output["samples"][name]}
        assert len(own) == len(samples) > 0
        for sample in samples:
            other = own[sample["task"], sample["doc_id"]]
            for key in ("doc_hash", "prompt_hash", "arguments", "filtered_resps", *sample["metrics"]):
                assert sample[key] == other[key], (task.column, key)


def test_right_and_wrong_answers_occur_in_each_task(results):
    for column, points in results[0].points.items():
        assert len(set(points)) > 1, column


def test_the_scores_are_those_of_the_leaderboards_page(results, plain):
    scores = {column: score["value"] / 100 for column, score in results[0].scores.items()}
    strict = [raw(plain["ifeval"], "leaderboard_ifeval", f"{part}_level_strict_acc") for part in ("prompt", "inst")]
    assert strict[0] != strict[1]
    assert scores["ifeval"] == pytest.approx(sum(strict) / 2, rel=1e-12)
    assert scores["math_hard"] == pytest.approx(raw(plain["math_hard"], "leaderboard_math_hard", "exact_match"))
    gpqa = raw(plain["gpqa"], "leaderboard_gpqa", "acc_norm")
    assert scores["gpqa"] == pytest.approx(normalized(gpqa, 4), rel=1e-12)
    pro = raw(plain["mmlu_pro"], "leaderboard_mmlu_pro", "acc")
    assert scores["mmlu_pro"] == pytest.approx(normalized(pro, 10), rel=1e-12)
    musr = [normalized(raw(plain["musr"], f"leaderboard_musr_{name}", "acc_norm"), n) for name, n in MUSR.items()]
    assert scores["musr"] == pytest.approx(sum(musr) / 3, rel=1e-12)
    bbh = []
    for file in (TASKS / "leaderboard/bbh_mc").glob("*.yaml"):
        content = yaml.safe_load(file.read_text())
        if "group" not in content:
            bbh.append(normalized(raw(plain["bbh"], content["task"], "acc_norm"), len(content["doc_to_choice"])))
    assert len(bbh) == 24
    assert scores["bbh"] == pytest.approx(sum(bbh) / 24, rel=1e-12)
    assert scores["average"] == pytest.approx(sum(scores[c] for c in DATASETS) / 6, rel=1e-12)
    clipped = {c: score["also"]["below random as 0"]["value"] / 100 for c, score in results[0].scores.items()
               if c not in ("ifeval", "math_hard")}  # fmt: skip
    assert clipped["bbh"] == pytest.approx(sum(max(0, each) for each in bbh) / 24)
    assert clipped["bbh"] > scores["bbh"]  # some subtasks are below random
    average = sum(clipped.get(c, scores[c]) for c in DATASETS) / 6
    assert clipped["average"] == pytest.approx(average)


def test_few_shot_examples_are_turns_of_the_conversation(results):
    assert results[0].settings["num_fewshot"] == FEWSHOT
    for column, num_fewshot in FEWSHOT.items():
        prompt = results[0].samples[column][0]["arguments"][0][0]
        assert prompt.count("<|im_start|>user\n") == 1 + num_fewshot
        assert prompt.endswith("<|im_start|>assistant\n")


def test_answers_at_random_score_0_where_all_questions_have_the_listed_choices(results):
    chances = {column: score.get("chance") for column, score in results[0].scores.items()}
    assert chances["bbh"] == pytest.approx(0, abs=1e-9)
    assert chances["musr"] == pytest.approx(0, abs=1e-9)
    assert chances["gpqa"] == pytest.approx(0, abs=1e-9)
    assert chances["mmlu_pro"] > 0  # some questions have fewer than ten options
    assert chances["ifeval"] is chances["math_hard"] is None


def test_a_difference_is_that_of_the_normalized_scores(results):
    first, second = results
    (_, differences) = compare([("first", first), ("second", second)], average=True)
    for column, difference in differences.items():
        change = second.scores[column]["value"] - first.scores[column]["value"]
        assert difference["value"] == pytest.approx(change, abs=1e-9)
        assert difference["low"] <= difference["value"] <= difference["high"]


def test_questions_of_one_text_are_one_cluster(results):
    clusters = {column: len(set(labels)) for column, labels in results[0].clusters.items()}
    assert clusters["bbh"] == 24
    assert clusters["math_hard"] == 7
    assert clusters["gpqa"] < len(results[0].points["gpqa"]) / 2  # three subsets of each other
    assert clusters["musr"] == len(results[0].points["musr"]) / 2


def test_the_files_of_an_evaluation_have_the_normalized_points(suite, folder, scripts):
    """Points, samples and the exported records; the table has a row for each model."""
    options = Eval(suite=suite.name, data_root=str(folder / "data"), limit=2)
    output = folder / "output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "InProcess", workers(scripts[0]))
        rows = [("base", folder / "model"), ("same", shutil.copytree(folder / "model", folder / "same"))]
        results = evaluate(rows, options, output, device="cpu", cache=folder / "cache", console=Console(quiet=True))
    score = results["rows"][1]["scores"]["bbh"]["value"]
    assert read_points(output)["same"]["bbh"].each.mean() == pytest.approx(score / 100)
    for column, difference in results["rows"][1]["differences"].items():
        assert (difference["value"], difference["p"]) == (0, 1), column
    assert "bbh, below random as 0: base" in (output / "table.md").read_text()


def test_the_choices_do_not_depend_on_what_was_loaded_before(suite, tasks):
    import random

    random.seed(99)
    alone = suite.model_copy(update={"tasks": [task for task in suite.tasks if task.column == "gpqa"]})
    again = load_tasks(alone)
    assert [list(t.eval_docs) for t in subtasks(again["gpqa"])] == [list(t.eval_docs) for t in subtasks(tasks["gpqa"])]
    assert random.random() == random.Random(99).random()  # the caller's generator is where it was


def test_the_responses_language_is_detected_alike_each_time(suite, results):
    from langdetect.detector_factory import DetectorFactory

    assert DetectorFactory.seed is None  # as before the evaluation
    seeds = []
    with contextlib.suppress(ZeroDivisionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "simple_evaluate", lambda **_: [seeds.append(DetectorFactory.seed), 1 / 0])
        harness.run_lm_eval(None, suite, [])
    assert seeds == [0]
