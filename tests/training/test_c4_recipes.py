"""The C4 recipes from end to end on a small C4 in the same layout: streamed, killed, resumed, on one and two ranks."""

import math

import pytest
from tests.support.c4_replica import NUM_HELD_OUT, RECIPE, c4
from tests.support.tiny_run import TinyRun, same, stop_after
from tests.support.trainer_jobs import tokens_of
from tests.support.trainer_parity import furthest, ranks_do, weights

pytestmark = pytest.mark.model
NUM_STEPS, NUM_DOCUMENTS, MAX_LENGTH = 6, 8, 24


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(an uninterrupted run of one process, the tokens of its micro-batches); only read."""
    folder = tmp_path_factory.mktemp("c4")
    run = TinyRun(folder / "whole", RECIPE, *c4(folder / "data"))
    return run, tokens_of(run.train)


def test_each_step_trains_the_next_documents_each_cut_to_one_sequence(whole):
    run, batches = whole
    documents = [ids for batch in batches for ids in batch]
    assert len(documents) == NUM_STEPS * NUM_DOCUMENTS
    lengths = [len(ids) - ids.count(0) for ids in documents]
    assert max(lengths) == MAX_LENGTH > min(lengths)
    ends = [ids[length - 1] for ids, length in zip(documents, lengths, strict=True) if length < MAX_LENGTH]
    assert set(ends) == {1}  # T5's </s>
    assert [ids.count(1) for ids in documents if 1 in ids] == [1] * sum(1 in ids for ids in documents)
    record = run.folder.read()
    assert 0 < record["data"]["train"]["dropped"]["text is empty"] < 10
    assert record["optimizer"]["num_matrices"] == 2 * 7 + 2  # embedding and head too


def test_the_perplexity_is_of_the_first_tokens_of_the_validation_file(whole):
    run, _ = whole
    validation = run.folder.read()["training"]["validation"]
    assert 200 <= validation["num_tokens"] < 200 + MAX_LENGTH
    assert validation["perplexity"] == pytest.approx(math.exp(validation["loss"]))
    assert "validation perplexity" in run.said.getvalue()
    assert [log["step"] for log in run.metrics() if "eval_loss" in log] == [3, 6]
    assert run.folder.read()["data"]["eval"]["path"].endswith("c4-validation.*.json.gz")
    assert NUM_HELD_OUT > 20  # data.eval.limit


@pytest.mark.rest
def test_a_killed_run_resumes_at_the_exact_document(whole, tmp_path):
    run, batches = whole
    overrides = c4(run.folder.path.parent / "data")
    stop_after(lambda: TinyRun(tmp_path / "run", RECIPE, *overrides), 5)
    resumed = TinyRun(tmp_path / "run", RECIPE, *overrides)
    again = tokens_of(resumed.train)
    assert resumed.folder.read()["resumed_from_steps"] == [4]
    assert again == batches[4 * NUM_DOCUMENTS // 2 :]
    assert same(run.weights(), resumed.weights())
    counts, counts_again = (each.folder.read()["data"]["train"] for each in (run, resumed))
    assert counts == counts_again


@pytest.fixture(scope="module")
def two_ranks(rank_pools, whole):
    folder = whole[0].folder.path.parent
    return folder, ranks_do(rank_pools(2), "c4", folder)


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["whole-ddp", "killed-ddp"])
def test_two_ranks_train_the_documents_of_one_process(two_ranks, whole, name):
    folder, seen = two_ranks
    run, batches = whole
    per_rank = [rank[name] for rank in seen]
    together = [batch for pair in zip(*per_rank, strict=True) for batch in pair]
    first = 4 * NUM_DOCUMENTS // 2 if name == "killed-ddp" else 0
    assert [ids for batch in together for ids in batch] == [ids for batch in batches[first:] for ids in batch]
    assert furthest(run.weights(), weights(folder / name)) < 2e-6
