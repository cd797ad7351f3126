"""Which `run.parallel` is the fastest that fits: bytes and seconds by hand, and `auto`."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from soren_align import recipe
from soren_align.core.errors import UserError
from soren_align.launch import commands
from soren_align.planning.strategies import fastest, supported
from soren_align.recipe.parallel import NAMES

MISTRAL = 7_241_732_096  # parameters, of which 224 matrices of the blocks
PASSES = 6.10  # s of a step on 8 H100s at 40% of 989 TFLOP/s: counted, with the maps' 0.3 s


@pytest.fixture
def choices(planned, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def make(num_ranks, *overrides):
        plan, text = planned("mistral-7b/soren", *overrides, num_ranks=num_ranks)
        return {each["name"]: SimpleNamespace(**each) for each in plan["strategies"]}, plan["fastest"], text

    return make


def test_bytes_and_seconds_are_those_by_hand(choices):
    found, best, text = choices(8)
    # ZeRO 2 averages float32 gradients in a ring after each of 4 micro-batches, and gathers the weights once.
    sent = 4 * 2 * 4 * MISTRAL * 7 / 8 + 2 * MISTRAL * 7 / 8
    assert found["zero2"].bytes_sent == pytest.approx(sent, rel=1e-3)
    # ZeRO 3 sends half for the gradients, gathers the weights twice in each micro-batch, and exchanges matrices.
    sent = 4 * 4 * MISTRAL * 7 / 8 + 4 * 2 * 2 * MISTRAL * 7 / 8 + 6.11e9
    assert found["zero3"].bytes_sent == pytest.approx(sent, rel=1e-3)
    # It hides behind 6.1 s of passes, of which each second of it takes a fifth.
    assert found["zero3"].exposed_seconds == 0
    assert found["zero3"].step_seconds == pytest.approx(PASSES + 0.2 * sent / 250e9, rel=0.01)
    assert (found["ddp"].fits, found["zero2"].fits, best) == (False, True, "zero3")
    assert found["zero1"].step_seconds < found["zero3"].step_seconds  # but its sums are bfloat16
    assert "zero3 * 20.1 208.9 0.00 6.26 0.83 fastest that fits" in " ".join(text.split())


def test_between_nodes_sending_no_longer_hides(choices):
    found, best, _ = choices(16)
    # 122 GB at 50 GB/s, while two thirds of 3 s of passes are backward.
    assert found["zero2"].bytes_sent / 50e9 == pytest.approx(2.44, rel=0.01)
    assert found["zero2"].exposed_seconds > 0.4
    assert found["zero2"].hours > 1.1 * found["zero3"].hours
    assert best in ("zero3", "fsdp2")


def test_nothing_fits_or_only_what_offloads(choices):
    found, _, _ = choices(2)
    small = [SimpleNamespace(**vars(each)) for each in found.values()]
    for each in small:
        each.fits = each.memory_bytes * 1.05 + 2e9 <= 24e9
    assert fastest(small) == "zero3-offload"
    for each in small:
        each.fits = False
    assert fastest(small) is None


@pytest.mark.parametrize(("keys", "names"), [
    (("model.lora={r: 4}",), ["ddp", "zero1", "zero2", "zero2-offload"]),
    (("model.lora={r: 4}", "model.quantize=4bit"), ["ddp"]),
    (("optimizer.compensation=kahan", "model.dtype=bfloat16"), ["ddp"]),
    ((), [*NAMES]),
])  # fmt: skip
def test_only_what_the_recipes_checks_allow_is_planned(keys, names):
    assert [*supported(recipe.load("mistral-7b/soren", ["run.parallel=ddp", *keys]), 8)] == names


@pytest.fixture
def loaded(tmp_path):
    return recipe.load("quickstart/sft", ["run.parallel=auto", f"run.output_dir={tmp_path / 'run'}"])


@pytest.mark.parametrize(("stdout", "stderr", "outcome"), [
    (json.dumps({"fastest": "zero2"}), "", "zero2"),
    (json.dumps({"fastest": None}), "", "no value fits into the GPUs' memory"),
    ("", "notice a\nerror: data: no file x", "^data: no file x"),
])  # fmt: skip
def test_auto_is_what_a_plan_marks(loaded, monkeypatch, stdout, stderr, outcome):
    done = SimpleNamespace(stdout=stdout, stderr=stderr)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: done)
    if outcome == "zero2":
        assert commands._with_fastest(loaded, 2).run.parallel == "zero2"
    else:
        with pytest.raises(UserError, match=outcome):
            commands._with_fastest(loaded, 2)


def test_an_unfinished_run_keeps_its_choice_and_a_launcher_cannot_ask(loaded, tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    chosen = loaded.model_copy(update={"run": loaded.run.model_copy(update={"parallel": "zero3"})})
    (tmp_path / "run/recipe.yaml").write_text(recipe.to_yaml(chosen))
    assert commands._with_fastest(loaded, 2).run.parallel == "zero3"
    monkeypatch.setattr(commands, "rank_from_environment", lambda: SimpleNamespace(rank=0, num_ranks=2))
    with pytest.raises(UserError, match="auto is decided before the processes start"):
        commands.train(loaded)


@pytest.mark.process
@pytest.mark.rest
def test_on_a_cpu_auto_trains_a_full_copy_in_each_process(tmp_path):
    from tests.support import command

    command.run("sft", "quickstart/sft", f"run.output_dir={tmp_path / 'run'}", "run.parallel=auto", "--no-eval",
                "trainer.max_steps=1", cwd=tmp_path, code=0)  # fmt: skip
    assert recipe.load_resolved(tmp_path / "run/recipe.yaml").run.parallel == "ddp"
