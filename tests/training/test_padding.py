"""The padding of batches: `plan` foresees it, a log has it, and groups of like length have little."""

import json
import math
import random

import pytest
from soren_align.planning.flops import _CUSTOM_FLOPS
from soren_align.planning.plan import plan_training
from soren_align.training.head import needs_plain_loss
from tests.support.tiny_run import TinyRun
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

pytestmark = pytest.mark.model
EPOCH = ("trainer.max_steps=-1", "trainer.num_train_epochs=1", "data.train.limit=null")
GROUPED = "trainer.train_sampling_strategy=group_by_length"


@pytest.fixture(scope="module")
def log_normal(tmp_path_factory):
    """Files of 300 conversations, and of as many pairs, whose lengths are log-normal, as those of chats are."""
    draw, chats, pairs = random.Random(0), [], []
    for _ in range(300):
        question, answer = (" ".join(["brown"] * (1 + round(math.exp(draw.gauss(2.5, 0.8))))) for _ in "ab")
        other = answer + " blue"
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
        pairs.append({"chosen": chats[-1], "rejected": [chats[-1][0], {"role": "assistant", "content": other}]})
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("sft", [{"messages": chat} for chat in chats]), ("dpo", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lambda task: f"data.train.path={folder / task}.jsonl"


def examples(batch):
    """The sequences of a batch, without padding."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [tuple(ids[mask == 1].tolist()) for ids, mask in pairs]


@pytest.mark.parametrize(("task", "data", "keys"), [
    ("sft", "shipped", ()), ("sft", "log-normal", ()), ("sft", "log-normal", (GROUPED,)),
    ("dpo", "log-normal", ()), ("dpo", "log-normal", (GROUPED,)),
])  # fmt: skip
def test_planned_operations_are_those_of_an_epoch_that_ran(tmp_path, log_normal, task, data, keys):
    keys = [*EPOCH, *keys, *([log_normal(task), "data.eval=null", "trainer.eval_strategy=no"] * (data != "shipped"))]
    run = TinyRun(tmp_path / "run", task, *keys)
    plan, _ = plan_training(run.recipe)
    trainer, seen, num_real, num_places = run.trainer(), [], 0, 0
    trainer.model.train()
    counter = FlopCounterMode(display=False, custom_mapping=_CUSTOM_FLOPS)
    with sdpa_kernel(SDPBackend.MATH), counter:
        for batch in trainer.get_train_dataloader():
            num_real += int(batch["attention_mask"].sum())
            num_places += batch["input_ids"].numel()
            seen += examples(batch)
            trainer.compute_loss(trainer.model, batch).backward()
    compute = plan["compute"]
    # TRL 1.15, and later versions on GPUs, apply the output head to positions with labels alone; here it has 9% of all.
    rel = 0.1 if needs_plain_loss() else 0.05
    assert counter.get_total_flops() == pytest.approx(compute["training_flops"], rel=rel)
    assert 1 - num_real / num_places == pytest.approx(compute["padding"], abs=0.02)
    if GROUPED in keys:
        assert 1 - num_real / num_places <= 0.1
        plain = TinyRun(tmp_path / "plain", task, *(key for key in keys if key != GROUPED)).trainer()
        assert sorted(seen) == sorted(each for batch in plain.get_train_dataloader() for each in examples(batch))


def test_a_log_has_the_share_of_padding(tmp_path, log_normal):
    run = TinyRun(tmp_path / "run", "sft", log_normal("sft"), "data.eval=null", "trainer.eval_strategy=no")
    run.train()
    shares = [line["padding"] for line in run.metrics() if "loss" in line]
    assert all(0.1 < share < 0.9 for share in shares)
