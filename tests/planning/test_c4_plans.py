"""The recipes of llama-c4: the paper's sizes, rates and steps, and their plans without the hub."""

import functools
import json

import pytest
import torch
from soren_align import recipe
from soren_align.core import shipped
from soren_align.planning import plan as planning
from soren_align.planning.flops import PEAKS, UTILIZATION, Compute
from soren_align.study.config import load_study
from transformers import AutoConfig, AutoModelForCausalLM

pytestmark = pytest.mark.model
SIZES = {  # parameters, steps; rates of soren, muon, htmuon, adamw
    "60m": (58_073_600, 5_000, (0.03, 0.01, 0.03, 1e-3)),
    "135m": (134_105_856, 10_000, (0.03, 0.01, 0.03, 1e-3)),
    "350m": (367_969_280, 20_000, (0.01, 0.005, 0.005, 1e-3)),
    "1b": (1_339_082_752, 60_000, (0.01, 0.005, 0.005, 6e-4)),
}
OPTIMIZERS = ("soren", "muon", "htmuon", "adamw")
RELEASED = {"released-soren": {"name": "released", "steps": 5}, "released-exact": {"name": "exact"}}  # their maps
QUICK = ("llama-c4/60m-soren", "llama-c4/135m-muon", "llama-c4/350m-released-soren", "llama-c4/1b-released-soren")
"""Of each size one; the schedule of 60,000 steps alone takes two seconds."""
FLOPS_PER_STEP = 10**14


@pytest.fixture(scope="module")
def plan_of():
    """plan_of(recipe): its plan, offline, without measuring FLOPs."""

    @functools.cache
    def plan(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                planning, "compute", lambda *_: Compute(256, 256, 256, 256, False, 10**9, 10**9, FLOPS_PER_STEP)
            )
            return planning.plan_training(recipe.load(name))[0]

    return plan


@pytest.mark.parametrize("size", SIZES)
def test_the_rates_and_steps_are_the_papers(size):
    _, steps, rates = SIZES[size]
    for name, rate in zip(OPTIMIZERS, rates, strict=True):
        loaded = recipe.load(f"llama-c4/{size}-{name}")
        assert (loaded.optimizer.name, loaded.optimizer.lr) == (name, rate)
        assert loaded.optimizer.matrices == "all-2d"
        assert loaded.optimizer.weight_decay == loaded.optimizer.aux_weight_decay == 0.1
        assert loaded.trainer["max_steps"] == steps
    for name, spectral_map in RELEASED.items():
        released = recipe.load(f"llama-c4/{size}-{name}")
        assert released.optimizer.map.model_dump() == spectral_map
        assert released.optimizer.adjust_lr_fn == "original"
        assert released.trainer["max_steps"] == {"350m": 10_000, "1b": 15_000}.get(size, steps)


def test_the_papers_grids_have_the_rates_of_the_recipes_and_studies_that_search_all_of_them():
    grids = json.loads((shipped.ROOT / "recipes/llama-c4/paper-grid.json").read_text())
    assert grids["weight_decay"] == 0.1
    assert {size: tuple(rates[name]["selected"] for name in OPTIMIZERS) for size, rates in grids["lr"].items()} == {
        size: rates for size, (_, _, rates) in SIZES.items()
    }
    for size, rates in grids["lr"].items():
        study = load_study(f"studies/llama-c4-{size}")
        assert study.recipe == f"llama-c4/{size}-soren"
        for name, rate in rates.items():
            searched = study.space(name)["optimizer.lr"]
            assert rate["selected"] in rate["grid"]
            assert min(searched) <= min(rate["grid"]) <= max(rate["grid"]) <= max(searched)


@pytest.mark.parametrize("size", SIZES)
def test_recipes_of_a_size_differ_in_optimizer_and_steps_alone(size):
    def rest(name):
        values = recipe.load(f"llama-c4/{size}-{name}").model_dump(exclude={"optimizer", "extends"})
        values["run"].pop("output_dir")
        values["trainer"].pop("max_steps")
        return values

    for name in ("muon", "htmuon", "adamw", *RELEASED):
        assert rest(name) == rest("soren")


@pytest.mark.parametrize("size", SIZES)
def test_the_models_have_the_papers_numbers_of_parameters(size):
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(shipped.ROOT / f"configs/models/llama-{size}")
        model = AutoModelForCausalLM.from_config(config)
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    blocks = layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden)
    assert sum(p.numel() for p in model.parameters()) == 2 * 32_000 * hidden + blocks + hidden == SIZES[size][0]


@pytest.mark.parametrize("name", QUICK)
def test_a_plan_needs_no_hub(plan_of, name):
    plan, size = plan_of(name), name.split("/")[1].split("-")[0]
    assert plan["model"]["num_parameters"] == SIZES[size][0]
    steps = plan["steps"]["total"]
    assert plan["compute"]["training_tokens"] == 256 * 512 * steps
    data = plan["data"]
    assert data["num_examples"] == 364_868_892
    assert data["streamed"]["num_examples"] == 512 * steps
    per_document = 326_778_635_540 / (364_868_892 + 364_608)
    assert data["streamed"]["bytes"] == pytest.approx((512 * steps + 70_000) * per_document, abs=1)
    assert "published numbers" in plan["notices"][0]
    names = {row["reason"] for row in plan["routing"] if row["rule"] == "adamw"}
    assert names == {"1-dimensional"}
    assert json.dumps(plan)


def test_hours_are_of_the_passes_and_the_maps_each_at_its_precision(plan_of):
    plan = plan_of("llama-c4/60m-released-soren")
    maps = plan["processes"]["map_flops"]["all_ranks"]
    of_passes, of_maps = (UTILIZATION * PEAKS["H100"][precision] for precision in ("bfloat16", "float32"))
    assert plan["processes"]["map_precision"] == "float32"
    expected = 5_000 * (FLOPS_PER_STEP / of_passes + maps / of_maps) / 3600
    assert plan["compute"]["hours"]["H100"] == pytest.approx(expected)
    assert plan["compute"]["hours"].keys() == {"H100", "A100", "L40S"}  # the paper's 350M and 1B ran on L40S
    svd, adamw = (plan_of(f"llama-c4/60m-{name}")["compute"] for name in ("htmuon", "adamw"))
    assert svd["hours"] == adamw["hours"]
    assert (svd["maps_are_counted"], adamw["maps_are_counted"]) == (False, True)


@pytest.mark.rest
def test_the_text_fits_80_columns_and_has_the_assumptions(planned):
    plan, text = planned("llama-c4/60m-soren")
    assert max(map(len, text.splitlines())) <= 80
    said = " ".join(text.split())
    assert "reads 2,560,000 of them and 70,000 held-out ones: 2.35 GB of compressed files" in said
    assert "(assumed: 40% of the peak; a small model takes longer)" in said
    head, blocks = 32_000 * 512, 8 * (4 * 512**2 + 3 * 512 * 1376)
    tokens = 512 * 256
    least = 6 * (head + blocks) * tokens  # and attention, and the head's logits once more in the backward pass
    assert least < plan["compute"]["training_flops_per_step"] < 1.25 * least
