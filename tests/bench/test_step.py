"""What `bench step` steps, how it scales, and what it returns."""

import json

import pytest
import torch
from soren_align.bench import shapes, steps, timing
from soren_align.core.errors import UserError

CPU = torch.device("cpu")


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(timing, "MAX_ROUNDS", 3)


def parameters(*found):
    return [torch.nn.Parameter(torch.randn(shape)) for shape in found]


def test_every_map_of_soren_is_stepped_beside_the_others():
    names = set(steps.optimizers(parameters((16, 16))))
    muons = {"Muon", "Muon float32", "torch.optim.Muon", "HTMuon", steps.DION}
    sorens = {f"Soren {label}" for label in ("minimax 0.0004", "SNS K=15", "released K=5", "exact")}  # of the defaults
    assert names == {*sorens, *muons, "fused AdamW"}
    assert len(names) + 3 <= steps.NUM_COPIES  # the parameters, the gradients, AdamW's second moment


def test_large_matrices_are_not_decomposed():
    large = steps.optimizers(parameters((steps.DECOMPOSED_ROWS + 1, steps.DECOMPOSED_ROWS + 1)))
    assert not {"HTMuon", "Soren exact"} & set(large)
    thin = steps.optimizers(parameters((8, steps.DECOMPOSED_ROWS + 1)))
    assert {"HTMuon", "Soren exact"} <= set(thin)


def test_the_results_are_json_with_these_keys(few_rounds):
    found = json.loads(json.dumps(steps.run(shapes.parse("16x16,8x24,8x24"), CPU, 1000), allow_nan=False))
    assert set(found) == {
        *("command", "shapes_name", "machine", "num_parameters", "num_layers", "num_rounds"),
        *("matmul_flops_per_second", "num_tokens", "training_seconds", "optimizers", "notes"),
    }
    assert found["num_parameters"] == 256 + 2 * 192
    rows = {row["name"]: row for row in found["optimizers"]}
    assert all(row["seconds"]["num_rounds"] == found["num_rounds"] == 3 for row in rows.values())
    for row in rows.values():
        median = row["seconds"]["median"]
        assert row["ratio_to_torch_muon"] == median / rows["torch.optim.Muon"]["seconds"]["median"]
        assert row["ratio_to_fused_adamw"] == median / rows["fused AdamW"]["seconds"]["median"]
        # Only a GPU tells its peak, and only there a share of training means something.
        assert (row["peak_bytes"], row["share_of_training_step"]) == (None, None)
    one_moment = 4 * found["num_parameters"]
    assert one_moment <= rows["Soren SNS K=15"]["state_bytes"] < one_moment + 100
    assert 2 * one_moment <= rows["fused AdamW"]["state_bytes"] < 2 * one_moment + 100


def test_every_optimizer_really_steps(few_rounds, monkeypatch):
    made = []

    class Counting(torch.optim.SGD):
        num_steps = 0

        def step(self, closure=None):
            self.num_steps += 1
            weights = self.param_groups[0]["params"]
            made.append((weights[0].sum().item(), weights[0].grad.sum().item()))
            return super().step(closure)

    def optimizers(weights):
        return {name: Counting(weights, 0.1) for name in (steps.TORCH_MUON, steps.MUON_FLOAT32, steps.FUSED_ADAMW)}

    monkeypatch.setattr(steps, "optimizers", optimizers)
    steps.run(shapes.parse("8x24"), CPU, 1)
    assert len({grad for _, grad in made}) > 6  # fresh gradients
    assert len({weight for weight, _ in made}) == len(made)  # the weights went on


def test_gradients_have_the_norm_of_clipped_ones():
    weights = steps._parameters(shapes.parse("64x64,32x96"), 1, CPU)
    norm = torch.nn.utils.get_total_norm([p.grad for p in weights])
    assert norm.item() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize(("name", "num_layers"), [("llama-60m", 8), ("qwen2.5-3b", 1), ("mistral-7b", 1)])
def test_a_large_model_is_measured_by_one_layer_and_says_so(name, num_layers, monkeypatch):
    monkeypatch.setattr(steps, "available_bytes", lambda device: 64 * 2**30)
    found, notes = steps._layers_that_fit(shapes.MODELS[name], CPU)
    assert found == num_layers
    assert len(notes) == (found != shapes.MODELS[name].num_layers)


def test_as_many_layers_as_memory_holds_are_measured_and_the_times_scaled(few_rounds, monkeypatch):
    model = shapes.Matrices("tiny", 6, {(8, 8): 1})
    monkeypatch.setattr(steps, "available_bytes", lambda device: 4 * steps.NUM_COPIES * model.layer_size * 2)
    assert steps._layers_that_fit(model, CPU)[0] == 2
    found = steps.run(model, CPU, 1)
    assert found["num_layers"] == {"measured": 2, "of": 6}
    assert "memory is short" in found["notes"][0]
    rows = {row["name"]: row for row in found["optimizers"]}
    assert 4 * 64 * 6 <= rows["Muon"]["state_bytes"] <= 4 * (64 + 1) * 6
    monkeypatch.setattr(steps, "available_bytes", lambda device: 100)
    with pytest.raises(UserError, match="one layer of tiny needs"):
        steps._layers_that_fit(model, CPU)


def test_a_muon_that_would_take_minutes_is_left_out_and_said(few_rounds, monkeypatch):
    monkeypatch.setattr(timing, "MAX_CALL_SECONDS", 1e-12)
    found = steps.run(shapes.parse("8x24"), CPU, 1)
    names = [row["name"] for row in found["optimizers"]]
    assert steps.MUON_FLOAT32 in names
    assert not {"Muon", steps.TORCH_MUON, steps.DION} & set(names)
    assert all(row["ratio_to_torch_muon"] is None for row in found["optimizers"])
    assert "(torch's and ours) is skipped: at " in " ".join(found["notes"])
