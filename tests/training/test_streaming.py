"""Training on a stream: the tokens are those of a whole dataset, on any number of ranks, and after a resume."""

import itertools
import json

import pytest
from accelerate.data_loader import prepare_data_loader
from soren_align.core.errors import UserError
from soren_align.data import stream as streams_module
from soren_align.planning import plan as planning
from soren_align.planning.flops import Compute
from soren_align.planning.show import print_plan
from soren_align.training.packing import TokenStream
from tests.support.tiny_run import same
from tests.support.trainer_parity import logged
from torch.utils.data import DataLoader

pytestmark = pytest.mark.model
STREAMED = "data.streaming={shuffle_buffer: 10}"
PACKED = ("trainer.packing=true", "trainer.max_length=48")
CASES = {"chats": ("sft", "trainer.max_length=12"),  # drops some, truncates others
         "pairs": ("dpo", "trainer.max_length=40"), "packed": ("sft", *PACKED),
         "wrapped": ("sft", *PACKED, "trainer.packing_strategy=wrapped")}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_sequences_are_those_of_the_whole_dataset(tiny_run, tmp_path, case):
    task, *overrides = CASES[case]
    limited = ("data.train.limit=60", "data.eval=null", *overrides)
    stream = tiny_run(task, *limited, "data.streaming=true", name="streamed").prepare().stream
    block = next(stream.stream.blocks(stream.stream.start))  # a pass, in its shuffled order
    file = tmp_path / "block.jsonl"
    file.write_text("".join(json.dumps(example) + "\n" for example in block.examples))
    whole = list(tiny_run(task, f"data.train.path={file}", *limited[1:], name="whole").trainer().train_dataset)
    *streamed, _ = itertools.islice(stream.rows(), len(whole) + 1)  # and the first one of the next pass
    assert streamed == [{key: row[key] for key in streamed[0]} for row in whole]
    if case == "chats":
        assert 0 < len(whole) < 60
        assert stream.block_starts[1]["dropped"] == {"no token to train on within max_length 12": 60 - len(whole)}


@pytest.mark.rest
@pytest.mark.parametrize("task", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_resumed_run_sees_the_tokens_of_an_uninterrupted_one(resumed, task):
    # The second checkpoint of three lies within a block, the stream has passed over 30 examples several times.
    streamed = (STREAMED, "data.train.limit=30", "trainer.max_length=60", "data.eval={fraction: 0.1}")
    whole, run = resumed(5, task, *streamed)
    assert logged(whole.folder) == logged(run.folder)
    counts, again = (each.folder.read()["data"] for each in (whole, run))
    assert counts == again
    assert counts["train"]["passes"][0] >= 1
    assert 0 < counts["eval"]["num_examples"] < 30


def test_only_one_block_is_read_again_to_resume(tiny_run):
    streams = [tiny_run("sft", STREAMED).prepare().stream for _ in range(2)]
    rows = list(itertools.islice(streams[0].rows(), 100))
    state = json.loads(json.dumps(streams[0].state(57)))
    assert state["block"]["num_read"] == state["num_rows"] == 50
    streams[1].resume(state, 57)
    again = list(itertools.islice(streams[1].rows(), 100))
    assert [len(row["input_ids"]) for row in again[:57]] == [1] * 57
    assert again[57:] == rows[57:]
    assert streams[0].counts() == streams[1].counts()
    assert TokenStream.state(streams[1], 83)["num_rows"] == 80


@pytest.mark.slow
def test_a_run_that_an_invalid_example_ended_resumes_without_it(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setattr(streams_module, "NUM_PREVIEWED", 20)
    rows = [{"text": f"The {i}th text of many."} for i in range(80)]
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in [*rows[:44], {"text": ""}, *rows[44:]]))
    streamed = ("sft", STREAMED, f"data.train.path={file}", "data.eval=null", "trainer.assistant_only_loss=false")
    with pytest.raises(UserError, match=r"texts.jsonl:45: cannot be used .* bad_examples: drop .* to resume"):
        tiny_run(*streamed).train()
    dropping = (*streamed, "data.train.bad_examples=drop")
    resumed, whole = tiny_run(*dropping), tiny_run(*dropping, name="whole")
    resumed.train()
    whole.train()
    assert resumed.folder.read()["resumed_from_steps"] == [4]
    assert same(whole.weights(), resumed.weights())
    train = resumed.folder.read()["data"]["train"]
    assert train["dropped"] == {"text is empty": 1}
    assert train["preview"]["num_examples"] == 20
    assert "1 dropped" in resumed.said.getvalue()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_have_disjoint_examples_and_one_process_s_batches(tiny_run, num_ranks):
    stream = tiny_run("sft", STREAMED, "trainer.max_length=60").prepare().stream

    def collate(rows):
        return [tuple(row["input_ids"]) for row in rows]

    def batches(rank):
        loader = DataLoader(stream.dataset, batch_size=4, collate_fn=collate)
        how = {"num_processes": num_ranks, "process_index": rank, "dispatch_batches": False, "put_on_device": False}
        return list(itertools.islice(prepare_data_loader(loader, **how), 6))

    on_ranks = [batches(rank) for rank in range(num_ranks)]
    together = [row for step in zip(*on_ranks, strict=True) for batch in step for row in batch]
    alone = [tuple(row["input_ids"]) for row in itertools.islice(stream.rows(), 24 * num_ranks)]
    assert together == alone
    assert len({*alone[: 8 * num_ranks]}) > 6 * num_ranks  # and they are different ones


def test_a_plan_has_the_steps_and_describes_the_first_examples(tiny_run, monkeypatch):
    monkeypatch.setattr(planning, "compute", lambda *_: Compute(60, 60, 60, 60, True, None, None, None))
    run = tiny_run("sft", "data.streaming=true", "data.eval={fraction: 0.1}")
    plan, account = planning.plan_training(run.recipe)
    assert (plan["steps"]["total"], plan["steps"]["per_epoch"], plan["steps"]["num_epochs"]) == (6, None, None)
    assert plan["data"]["is_streamed"]
    assert plan["data"]["num_kept"] < 1000
    assert json.dumps(plan)
    print_plan(plan, account, run.console, full=True)
    printed = " ".join(run.said.getvalue().split())
    assert "steps 6 optimizer steps, global batch size 8" in printed
    assert "streamed: the number of examples is unknown; the counts are of the first 1,000 of each split" in printed
