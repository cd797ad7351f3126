"""A step that float16's loss scale left out is accepted and counted, one that was taken by halves is not."""

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.training.trained_optimizer import OptimizerCheck, OptimizerMismatch


def scaled(run, broken_steps, patch, scale=65536.0):
    """Train with torch's GradScaler, which accelerate uses for fp16 on GPUs; an infinity in the gradient of some steps.

    Returns the scale at the end.
    """
    from soren_align.training import build
    from soren_align.training import run as training
    from soren_align.training.trainer import SorenSFTTrainer

    scaler, one_pass = torch.amp.GradScaler("cpu", init_scale=scale), SorenSFTTrainer.training_step

    def training_step(self, model, *args, **kwargs):
        loss = one_pass(self, model, *args, **kwargs)
        if self.state.global_step + 1 in broken_steps:
            next(p for p in model.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf
        return loss

    build_trainer = build.build_trainer

    def with_scaler(*args, **kwargs):
        trainer = build_trainer(*args, **kwargs)
        trainer.accelerator.scaler = scaler
        return trainer

    patch.setattr(SorenSFTTrainer, "training_step", training_step)
    patch.setattr(training.build, "build_trainer", with_scaler)
    assert run.train()
    return scaler.get_scale()


def test_steps_that_the_loss_scale_left_out_are_counted(tiny_run, monkeypatch):
    run = tiny_run("sft", "trainer.max_grad_norm=0", "trainer.save_strategy=no")
    assert scaled(run, {1, 2, 4}, monkeypatch) == 65536 / 8
    record = run.folder.read()
    assert record["optimizer"]["num_skipped_steps"] == 3
    assert record["optimizer"]["maps_per_step"] == record["optimizer"]["num_matrices"]
    logs = run.metrics()
    assert [log["num_skipped_steps"] for log in logs if "num_skipped_steps" in log] == [1, 2, 2, 3, 3, 3]
    assert ["update_rms" in log for log in logs if "loss" in log] == [False, False, True, False, True, True]
    assert record["first_step"]["matrices"]["fraction_changed"] > 0.9, "of the first step that was taken"


def test_a_scale_below_1_ends_the_run(tiny_run, monkeypatch):
    run = tiny_run("sft", "trainer.max_grad_norm=0", "trainer.save_strategy=no")
    with pytest.raises(UserError, match=r"step 2: the gradient has a NaN or an infinity even at the loss scale 0\.5"):
        scaled(run, {1, 2, 3, 4, 5, 6}, monkeypatch, scale=2.0)


def test_a_step_of_some_matrices_is_no_step_that_was_left_out(tiny_run, monkeypatch):
    run = tiny_run("sft", "trainer.max_grad_norm=0", "trainer.save_strategy=no")
    step = OptimizerCheck.on_optimizer_step

    def by_halves(self, *args, **kwargs):
        self.attached.optimizer.num_maps -= 1
        self.attached.wrappers[0]._is_overflow = True
        step(self, *args, **kwargs)

    monkeypatch.setattr(OptimizerCheck, "on_optimizer_step", by_halves)
    with pytest.raises(OptimizerMismatch, match="13 spectral maps in one optimizer step for 14 matrices"):
        run.trainer().train()
