"""Plans of recipes, each computed once for all tests, and the passes of one model once for all plans."""

import functools
import io
from dataclasses import replace

import pytest

PASSES_DEPEND_ON = ("bf16", "fp16", "gradient_checkpointing", "packing", "packing_strategy", "padding_free")
PASSES_DEPEND_ON += ("per_device_train_batch_size",)  # of `trainer`


@pytest.fixture(autouse=True)
def lines_of_a_terminal(monkeypatch):
    """Texts are wrapped as on a terminal; in a file one record is one line."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="session")
def planned():
    """planned(recipe, *overrides, num_ranks=1) returns (plan, its text at 80 columns); neither may be modified."""
    from rich.console import Console
    from soren_align import recipe
    from soren_align.planning import plan as planning
    from soren_align.planning import show

    @functools.cache
    def build(name, *overrides, num_ranks=1):
        plan, account = planning.plan_training(recipe.load(name, list(overrides)), num_ranks=num_ranks)
        text = io.StringIO()
        show.print_plan(plan, account, Console(file=text, width=80), full=True)
        return plan, text.getvalue()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "compute", memoised(planning.compute))
        yield build


def memoised(compute):
    """`compute`, whose passes take most of a plan's time and do not depend on optimizer, schedule or evaluation."""
    results = {}

    def compute_once(recipe, build_model, num_blocks, account, batch_size, max_length):
        from soren_align.recipe import parallel

        if account and recipe.trainer.get("train_sampling_strategy"):  # by the batch size
            return compute(recipe, build_model, num_blocks, account, batch_size, max_length)
        trainer = {key: recipe.trainer.get(key) for key in PASSES_DEPEND_ON}
        lengths = account and (account.lengths, account.num_tokens, account.num_kept)
        kind = parallel(recipe.run.parallel).kind
        key = repr((recipe.task, recipe.model, trainer, kind, num_blocks, lengths, max_length))
        if key not in results:
            results[key] = compute(recipe, build_model, num_blocks, account, 1, max_length)
        costs = results[key]
        return replace(costs, flops_per_step=costs.flops_per_step and costs.flops_per_step * batch_size)

    return compute_once
