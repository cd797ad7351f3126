"""Benchmarks during training are those of lm-eval on the same questions, and change no weight and no other metric."""

import io
import json

import numpy as np
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from rich.console import Console
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.evaluate.report.results import read_results
from soren_align.evaluate.report.tables import warnings
from soren_align.evaluate.run.benchmark import choose_questions, doc_hash, read_benchmark
from soren_align.evaluate.run.stage import evaluate
from soren_align.evaluate.stats.paired import ModelAnswers
from soren_align.evaluate.stats.significance import selection_section
from soren_align.evaluate.suite.suites import benchmark_suite, load_suite
from soren_align.evaluate.suite.tasks import load_tasks
from soren_align.publish.card import card
from soren_align.recipe import Eval, checks
from soren_align.run.folder import RunFolder, read_metrics
from soren_align.sharding.ranks import Ranks
from tests.support.tiny_run import TinyRun, assert_trained_alike
from tests.support.trainer_parity import furthest, ranks_do, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.model

EVALUATED = ("trainer.eval_strategy=steps", "trainer.eval_steps=2", "trainer.max_steps=5", "data.eval.limit=4")
EVALUATED += ("trainer.save_steps=2",)
DROPOUT = ("model.lora={r: 4, dropout: 0.3}", "optimizer.aux_lr=null")
MEASURED = "run.benchmark={suite: quickstart, questions: 12, every: 2}"
AT_EVALUATIONS = "run.benchmark={suite: quickstart, questions: 12}"
FAST = ("optimizer.lr=2e-2", "optimizer.aux_lr=2e-2")


def scores(run):
    """{step: {column: score}}"""
    lines = ((log["step"], {k.removeprefix("eval_benchmark/"): v for k, v in log.items() if "benchmark" in k})
             for log in run.metrics())  # fmt: skip
    return {step: by_column for step, by_column in lines if by_column}


def others(run):
    """The other measurements of a run, without times."""
    lines = ({k: v for k, v in line.items() if "benchmark" not in k and not k.endswith(("runtime", "per_second"))}
             for line in run.metrics())  # fmt: skip
    return [line for line in lines if line.keys() > {"step", "epoch"}]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run with benchmarks at steps of their own; it is only read."""
    run = TinyRun(tmp_path_factory.mktemp("measured") / "run", "sft", *EVALUATED, *FAST, MEASURED)
    assert run.train()
    return run


@pytest.mark.rest
@pytest.mark.parametrize("column", ["zoo_mc", "zoo_gen", "preference"])
def test_the_last_score_is_that_of_lm_eval_on_the_saved_model_and_the_same_questions(measured, column):
    suite = load_suite("quickstart")
    (task,) = (task for task in suite.tasks if task.column == column)
    loaded = load_tasks(suite)[column]
    chosen = sorted(range(len(loaded.eval_docs)), key=lambda i: doc_hash(loaded.eval_docs[i]))[:12]
    model, tokenizer = (each.from_pretrained(measured.folder.model) for each in (AutoModelForCausalLM, AutoTokenizer))
    output = simple_evaluate(
        HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3), tasks=[loaded],
        samples={loaded.task_name: chosen}, apply_chat_template=True, bootstrap_iters=0,
    )  # fmt: skip
    expected = output["results"][loaded.task_name][f"{task.metric},{task.filter}"]
    assert len(output["samples"][loaded.task_name]) == 12
    hashes = {sample["doc_hash"] for sample in output["samples"][loaded.task_name]}
    assert hashes == {doc_hash(loaded.eval_docs[i]) for i in chosen}
    assert scores(measured)[5][column] == pytest.approx(expected, abs=1e-9)


def test_the_scores_are_measured_at_the_start_every_k_steps_and_at_the_end(measured):
    by_step = scores(measured)
    assert [*by_step] == [0, 2, 4, 5]
    for values in by_step.values():
        assert values["average"] == pytest.approx(sum(values[c] for c in ("zoo_mc", "zoo_gen", "preference")) / 3)
    assert len({tuple(values.values()) for values in by_step.values()}) > 1
    text = " ".join(measured.said.getvalue().split())
    assert "benchmark quickstart, every 2 steps: questions 12 of 120 of zoo_mc, 12 of" in text
    assert f"benchmark step 5: zoo_mc {by_step[5]['zoo_mc']:.1%}" in text
    record = measured.folder.read()["benchmark"]
    assert record["columns"]["zoo_mc"].items() >= {"task": "zoo_mc", "questions": 12, "of": 120}.items()
    assert "selected_by" not in record


@pytest.mark.rest
@pytest.mark.parametrize("task", ["sft", "dpo"])
def test_they_change_no_weight_no_generator_and_no_other_metric(tiny_run, task):
    silent = tiny_run(task, *EVALUATED, *DROPOUT, name="silent")
    whole = tiny_run(task, *EVALUATED, *DROPOUT, MEASURED, name="whole")
    assert_trained_alike(silent, whole)
    assert others(whole) == others(silent)
    assert [*scores(whole)] == [0, 2, 4, 5]


@pytest.mark.rest
@pytest.mark.parametrize("benchmark", [MEASURED, AT_EVALUATIONS])
def test_a_resumed_run_has_the_scores_of_an_uninterrupted_one(resumed, benchmark):
    whole, run = resumed(3, "sft", *EVALUATED, *DROPOUT, benchmark)
    assert run.metrics()[0].keys() == whole.metrics()[0].keys()
    assert scores(run) == scores(whole)
    assert [*scores(whole)] == [0, 2, 4, 5]


@pytest.mark.rest
def test_the_best_checkpoint_by_a_benchmark_is_saved_and_run_json_states_it(tiny_run):
    best = ("trainer.load_best_model_at_end=true", "trainer.metric_for_best_model=benchmark/average")
    best += ("trainer.max_steps=8", "run.early_stopping.patience=3")
    run = tiny_run("sft", *EVALUATED, *FAST, AT_EVALUATIONS, *best)
    assert run.train()
    by_step = {step: values["average"] for step, values in scores(run).items() if step}
    result = run.folder.read()["training"]["best_model"]
    assert result["metric"] == "eval_benchmark/average"
    assert result["value"] == max(by_step.values())
    assert result["step"] == max(by_step, key=by_step.__getitem__)
    assert run.folder.read()["benchmark"]["selected_by"] == "average"
    assert "of average chose the saved weights" in card(run.folder, "model")

    output = run.folder.path / "eval" / "quickstart"
    options = Eval(suite="quickstart", omit=["preference"])
    rows = [("base", run.folder.start), ("SFT", run.folder.model)]
    results = evaluate(rows, options, output, device="cpu", console=Console(file=io.StringIO()))
    section = read_results(output)["selection"]["zoo_mc"]
    lines = (output / "samples" / "SFT" / "zoo_mc.jsonl").read_text().splitlines()
    last = run.folder.read()["benchmark"]["columns"]["zoo_mc"]["last_doc_hash"]
    marks = [json.loads(line)["doc_hash"] <= last for line in lines]
    assert (section["rows"], section["selected"], sum(marks)) == (["SFT"], 12, 12)
    assert section["indices"] == [i for i, mark in enumerate(marks) if mark]
    others = [json.loads(line)["acc"] for line, mark in zip(lines, marks, strict=True) if not mark]
    assert section["scores"]["SFT"]["value"] == pytest.approx(100 * sum(others) / 108)
    first, second = (note for note in warnings(results) if note.startswith("selection"))
    assert first.startswith("selection, zoo_mc: 12 of 120 questions are not held out, because they chose the saved "
                            "checkpoint of SFT (run.benchmark): question numbers ")  # fmt: skip
    assert ", counted from 0; scores without these questions: base " in first
    assert second.startswith("selection, zoo_gen: 12 of ")


def test_a_column_that_did_not_choose_the_weights_is_held_out():
    record = {"columns": {"mc": {"task": "zoo_mc", "last_doc_hash": "5"}, "gen": {"task": "zoo_gen",
              "last_doc_hash": "5"}}}  # fmt: skip
    answers = ModelAnswers({}, {"a": [1.0, 0.0, 1.0], "b": [1.0, 0.0, 1.0]})
    answers.prompt_hashes = {column: [("4", ""), ("5", ""), ("6", "")] for column in "ab"}
    rows, tasks = [("SFT", answers)], {"a": "zoo_mc", "b": "zoo_gen"}
    assert [*selection_section({"SFT": record | {"selected_by": "average"}}, tasks, rows)] == ["a", "b"]
    section = selection_section({"SFT": record | {"selected_by": "gen"}}, tasks, rows)
    assert section["b"]["indices"] == [0, 1]
    assert section["b"]["scores"]["SFT"]["value"] == 100.0
    assert [*section] == ["b"]
    assert not selection_section({"SFT": record | {"selected_by": "gen"}}, {"a": "zoo_mc"}, rows)


def test_the_questions_are_those_with_the_smallest_hash_in_any_order():
    loaded = load_tasks(load_suite("quickstart"))["zoo_mc"]
    chosen = choose_questions("zoo_mc", loaded, 10)
    ((_, indices),) = chosen.indices
    hashes = [doc_hash(question) for question in loaded.eval_docs]
    assert sorted(hashes[i] for i in indices) == sorted(hashes)[:10]
    assert chosen.record == {"task": "zoo_mc", "questions": 10, "of": 120, "last_doc_hash": sorted(hashes)[9]}
    assert choose_questions("zoo_mc", loaded, 500).record["questions"] == 120


def test_a_model_whose_loss_is_not_a_number_has_no_score(tiny_run):
    run = tiny_run("sft", "run.benchmark={suite: quickstart, columns: [zoo_mc], questions: 3, every: 2}")
    setup = run.prepare()
    benchmark = read_benchmark(run.recipe, setup.start, setup.tokenizer, run.ranks)
    model = AutoModelForCausalLM.from_pretrained(setup.start)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(torch.nan)
    (score,) = benchmark.scores(model.eval(), model.config, torch.device("cpu")).values()
    assert np.isnan(score)


@pytest.mark.parametrize(("overrides", "message"), [
    (["run.benchmark.suite=quickstrat"], "no shipped suite has the name 'quickstrat'.*'quickstart'"),
    (["run.benchmark={suite: quickstart, question: 5}"], "unknown key; did you mean 'questions'"),
    (["run.benchmark={suite: quickstart, data_root: nowhere}"], "run.benchmark.data_root: there is no folder"),
    (["run.benchmark.suite=quickstart", "trainer.eval_strategy=no"], "run.benchmark: without `every`"),
    (["trainer.metric_for_best_model=benchmark/zoo_mc"], "which needs run.benchmark; add this section"),
    ([MEASURED, "trainer.metric_for_best_model=benchmark/zoo_mc"], "remove run.benchmark.every"),
])  # fmt: skip
def test_wrong_names_are_refused_with_the_recipe(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        recipe.load("quickstart/sft", [f"run.output_dir={tmp_path / 'run'}", *overrides])


@pytest.mark.parametrize(("overrides", "message"), [
    (["run.benchmark={suite: quickstart, columns: [zoo_cm]}"], "columns: .*'zoo_cm'; did you mean 'zoo_mc'"),
    (["run.benchmark.suite=quickstart", "trainer.metric_for_best_model=benchmark/zoo"], "no 'benchmark/zoo'.*zoo_mc"),
])  # fmt: skip
def test_columns_that_the_suite_does_not_have_are_refused(tmp_path, overrides, message):
    loaded = recipe.load("quickstart/sft", [f"run.output_dir={tmp_path / 'run'}", *overrides])
    with pytest.raises(UserError, match=message):
        benchmark_suite(loaded)


def test_questions_that_cannot_be_scored_are_refused_before_the_model_is_loaded(tiny_run, monkeypatch):
    run = tiny_run("sft", AT_EVALUATIONS, *EVALUATED)
    setup = run.prepare()
    for mode in ("zero3", "fsdp2"):
        with monkeypatch.context() as patch:
            patch.setattr(checks, "_check_parallel", lambda *arguments: None)  # refuses fsdp2 without GPUs
            sharded = recipe.load("quickstart/sft", [AT_EVALUATIONS, f"run.parallel={mode}"])
        message = rf"the answers of zoo_gen are generated, .* {mode} shards the weights; write the names of the suite's"
        with pytest.raises(UserError, match=message):
            read_benchmark(sharded, setup.start, setup.tokenizer, run.ranks)
    setup.tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template, but suite quickstart applies one; set model.chat_template"):
        read_benchmark(run.recipe, setup.start, setup.tokenizer, run.ranks)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("job", "modes"), [("benchmarked", ["ddp", "zero2", "zero3"]), ("benchmarked_fsdp2", ["fsdp2"])]
)
def test_two_ranks_have_the_scores_of_one_process_and_the_weights_without_them(
    rank_pools, tmp_path_factory, job, modes
):
    folder = tmp_path_factory.mktemp("benchmarked")
    ranks_do(rank_pools(2), job, folder)
    for mode in modes:
        measured, silent = RunFolder(folder / f"measured-{mode}"), RunFolder(folder / f"silent-{mode}")
        assert furthest(weights(measured.path), weights(silent.path)) == 0
        (end,) = (log for log in read_metrics(measured.metrics) if log["step"] == 2 and "eval_benchmark/zoo_mc" in log)
        alone = recipe.load_resolved(measured.recipe)
        tokenizer = AutoTokenizer.from_pretrained(measured.model)
        benchmark = read_benchmark(alone, str(measured.model), tokenizer, Ranks())
        model = AutoModelForCausalLM.from_pretrained(measured.model).eval()
        expected = benchmark.scores(model, model.config, model.device)
        assert expected == {key: end[key] for key in expected}
        assert 0 < expected["eval_benchmark/preference"] < 1
