"""The study of training times: the figures that its page counts, and a reduced measurement."""

from pathlib import Path

import pytest
import torch
from soren_align.optim.routing import route
from soren_align.spectral import MAPS
from transformers import LlamaConfig

from studies import wall_clock

pytestmark = pytest.mark.model
PAGE = (Path(__file__).parents[2] / "docs/studies/wall-clock.md").read_text(encoding="utf-8")
SMALL = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


@pytest.mark.parametrize("name", wall_clock.MINUTES)
@pytest.mark.parametrize("steps", [4, 16])
def test_the_implied_k_is_that_of_the_counted_flops(name, steps):
    shapes = wall_clock.shapes(name)
    muon = sum(MAPS["muon"].num_flops(*shape) for shape in shapes)
    sns = sum(MAPS["sns"].num_flops(*shape, steps=steps) for shape in shapes)
    formula, exact = wall_clock.implied_steps(shapes, sns / muon)
    assert exact == pytest.approx(steps)
    assert formula < exact  # the paper's formula leaves out a product of Muon


def test_the_shapes_are_those_of_the_model():
    with torch.device("meta"):
        model = wall_clock.LlamaForCausalLM(wall_clock.LLAMA_60M)
    matrices = [tuple(parameter.shape) for parameter in model.parameters() if parameter.ndim == 2]
    assert sorted(wall_clock.shapes("llama-60m")) == sorted(matrices)


@pytest.mark.rest
def test_training_flops_are_those_of_a_formula():
    tokens, length = 3 * 8, 8
    hidden, layers = SMALL.hidden_size, SMALL.num_hidden_layers
    weights = layers * (4 * hidden**2 + 3 * hidden * SMALL.intermediate_size) + hidden * SMALL.vocab_size
    attention = layers * 2 * length * hidden  # two products of each token with all tokens
    assert wall_clock.training_flops(SMALL, 3, length) == 6 * tokens * (weights + attention)


def test_the_counted_figures_stand_on_the_page(capsys):
    wall_clock.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert len(lines) > 10
    assert [line for line in lines if line.startswith("|") and line not in PAGE] == []


def test_a_reduced_measurement_has_the_rows_and_the_counted_states_of_the_page(capsys):
    measured = wall_clock.measure(SMALL, num_sequences=1, length=8, seconds=0.0)
    model = wall_clock.LlamaForCausalLM(SMALL)
    matrices = sum(r.parameter.numel() for r in route(model) if r.rule == "spectral")
    total = sum(parameter.numel() for parameter in model.parameters())
    for name, (seconds, num_bytes) in measured.items():
        assert seconds > 0
        moments = {"float32": 0, "bfloat16": 0, "AdamW": 8 * total}
        assert num_bytes == moments.get(name, 4 * matrices + 8 * (total - matrices)), name
    wall_clock.print_times(measured, num_micro_batches=128)
    rows = [line.split("|")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    on_page = [line.split("|")[1] for line in PAGE[PAGE.index(f"|{rows[0]}|") :].splitlines() if line.startswith("| ")]
    assert rows == on_page[: len(rows)]
