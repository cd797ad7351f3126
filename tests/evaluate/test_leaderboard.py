"""The two suites of real benchmarks, on invented questions in the real schemas: what lm-eval itself would say."""

import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.run.harness import Options, evaluate_model
from soren_align.evaluate.suite.suites import load_suite
from soren_align.evaluate.suite.tasks import load_tasks, subtasks
from tests.support.benchmark_data import write_datasets
from tests.support.lm_eval_reference import LEADERBOARD, ZERO_SHOT, plain

pytestmark = pytest.mark.model

SUITES = {"open-llm-leaderboard-v1": LEADERBOARD, "commonsense-zero-shot": ZERO_SHOT}


def suite_on(data_root, name, batch_size=16):
    return load_suite(name).model_copy(update={"data_root": str(data_root), "batch_size": batch_size})


@pytest.fixture(
    scope="module", params=[pytest.param("open-llm-leaderboard-v1", marks=pytest.mark.slow), "commonsense-zero-shot"]
)
def both(request, readers, data_root):
    """(suite, ours, lm-eval's own results), one prompt at a time: padding changes the last digits."""
    suite = suite_on(data_root, request.param, batch_size=1)
    theirs = plain(readers[0], SUITES[request.param], data_root, batch_size=1)
    return suite, evaluate_model(readers[0], suite, Options(device="cpu")), theirs


@pytest.fixture(scope="module")
def leaderboard(readers, data_root):
    """(suite, tasks, results of one process)."""
    suite = suite_on(data_root, "open-llm-leaderboard-v1")
    tasks = load_tasks(suite)
    results = evaluate_model(readers[0], suite, Options(device="cpu"), tasks=tasks)
    return suite, tasks, results


@pytest.mark.rest
def test_the_leaderboard_has_62_tasks_and_a_score_for_each(leaderboard):
    _, tasks, found = leaderboard
    counts = {column: len(subtasks(task)) for column, task in tasks.items()}
    assert counts == dict.fromkeys(LEADERBOARD, 1) | {"mmlu": 57}
    assert sum(counts.values()) == 62
    assert len(found.scores["mmlu"]["subjects"]) == 57
    assert list(found.scores) == [*LEADERBOARD, "average"]


def test_every_score_is_lm_evals_own(both):
    suite, ours, theirs = both
    for task in suite.tasks:
        score, key = ours.scores[task.column], f"{task.metric},{task.filter}"
        own = theirs["results"][task.task]
        assert score["value"] == pytest.approx(100 * own[key], rel=1e-12), task.column
        error = own[f"{task.metric}_stderr,{task.filter}"]
        if not task.cluster:  # lm-eval's ignores clusters
            assert score["stderr"] == pytest.approx(100 * error), task.column
        for also, other in score.get("also", {}).items():
            key = also if "," in also else f"{also},none"
            if also != "mean over subjects":
                assert other["value"] == pytest.approx(100 * own[key], rel=1e-12), (task.column, also)


def test_every_prompt_and_every_answer_is_lm_evals_own(both):
    suite, ours, theirs = both
    for task in suite.tasks:
        names = [name for name in theirs["samples"] if name == task.task or name.startswith(f"{task.task}_")]
        own = [sample for name in names for sample in theirs["samples"][name]]
        samples = ours.samples[task.column]
        assert len(samples) == len(own) > 0
        by_hash = {(s["doc_hash"], s["filter"]): s for s in own}
        assert len(by_hash) == len(own)
        for sample in samples:
            other = by_hash[sample["doc_hash"], sample["filter"]]
            assert sample["prompt_hash"] == other["prompt_hash"]
            assert sample["arguments"] == other["arguments"]
            assert sample["filtered_resps"] == other["filtered_resps"]


def test_the_shots_are_the_suites(both):
    suite, ours, _ = both
    assert ours.settings["num_fewshot"] == SUITES[suite.name]


@pytest.mark.rest
def test_mmlu_is_stored_in_both_means_and_gsm8k_in_both_readings(leaderboard):
    found = leaderboard[2].scores
    subjects = found["mmlu"]["subjects"].values()
    sizes = sum(s["n"] for s in subjects)
    assert found["mmlu"]["n"] == sizes
    assert found["mmlu"]["value"] == pytest.approx(sum(s["value"] * s["n"] for s in subjects) / sizes)
    plain_mean = found["mmlu"]["also"]["mean over subjects"]["value"]
    assert plain_mean == pytest.approx(sum(s["value"] for s in subjects) / 57)
    assert plain_mean != pytest.approx(found["mmlu"]["value"], abs=0.01)
    assert "exact_match,flexible-extract" in found["gsm8k"]["also"]


def test_the_average_is_the_plain_mean_of_the_columns_with_its_own_error(both):
    suite, ours, _ = both
    columns = [ours.scores[task.column] for task in suite.tasks]
    average = ours.scores["average"]
    assert average["value"] == pytest.approx(sum(c["value"] for c in columns) / 6)
    assert average["stderr"] == pytest.approx(sum(c["stderr"] ** 2 for c in columns) ** 0.5 / 6)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.process
def test_any_number_of_processes_gives_the_prompts_and_scores_of_one(number, leaderboard, readers):
    """lm-eval's own data parallelism changes seven of eight few-shot prompts."""
    suite, tasks, one = leaderboard
    several = evaluate_model(readers[0], suite, Options(device="cpu", num_processes=number), tasks=tasks)
    assert several.prompt_hashes == one.prompt_hashes
    assert several.scores == one.scores
    assert several.samples == one.samples


@pytest.mark.rest
def test_batches_change_log_likelihoods_in_the_last_digits_only(leaderboard, readers):
    suite, tasks, one = leaderboard
    other = suite.model_copy(update={"batch_size": 5})
    other = evaluate_model(readers[0], other, Options(device="cpu"), tasks=tasks)
    for column, samples in one.samples.items():
        for a, b in zip(samples, other.samples[column], strict=True):
            if column != "gsm8k":
                first, second = ([x[0] for x in sample["filtered_resps"]] for sample in (a, b))
                assert first == pytest.approx(second, abs=1e-3)


def test_another_folder_of_the_same_layout_is_read_and_not_remembered(data_root, readers, tmp_path):
    suite = suite_on(data_root, "commonsense-zero-shot")
    other = suite_on(write_datasets(tmp_path / "data", seed=1), "commonsense-zero-shot")
    first, second = (evaluate_model(readers[0], s, Options(device="cpu")).prompt_hashes for s in (suite, other))
    assert not set(first["piqa"]) & set(second["piqa"])


def test_data_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no dataset folder .*allenai/ai2_arc"):
        load_tasks(suite_on(tmp_path, "open-llm-leaderboard-v1"))


@pytest.mark.rest
def test_a_rehearsal_of_one_question_each_goes_through(leaderboard, readers):
    suite, tasks, _ = leaderboard
    found = evaluate_model(readers[0], suite, Options(device="cpu", limit=1), tasks=tasks)
    assert found.scores["mmlu"]["n"] == 57
    assert found.scores["mmlu"]["stderr"] > 0  # over subjects, each of which has one question


@pytest.mark.rest
def test_chance_is_stated_for_accuracies_over_choices_alone(leaderboard, readers):
    suite, tasks, _ = leaderboard
    found = evaluate_model(readers[0], suite, Options(device="cpu", limit=1), tasks=tasks)
    chances = {column: score["chance"] for column, score in found.scores.items() if "chance" in score}
    choices = len(found.samples["arc_challenge"][0]["arguments"])
    assert chances == {"arc_challenge": 100 / choices, "hellaswag": 25, "mmlu": 25, "winogrande": 50}  # not mc2, gsm8k
