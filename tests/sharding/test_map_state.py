"""A map's state, of the shape that it declares: sharded, saved, and that of one process on any number of ranks."""

import copy

import pytest
import torch
from tests.support import normuon
from torch import nn


@pytest.mark.parametrize("momentum_dtype", ["float32", "bfloat16"])
def test_row_moments_follow_the_rule_and_are_resumed(momentum_dtype):
    parameters, optimizer = normuon.trained(momentum_dtype=momentum_dtype)
    moments = {name: optimizer.state[p]["row_moment"] for name, p in parameters.items()}
    assert {name: moment.shape for name, moment in moments.items()} == {n: (m,) for n, (m, _) in normuon.SHAPES.items()}
    if momentum_dtype == "float32":
        momentum, expected = torch.zeros(6, 9), torch.zeros(6, 1)
        for step in range(3):
            grad = normuon.gradients(step)["a"]
            momentum = 0.95 * momentum + 0.05 * grad
            n = 0.95 * momentum + 0.05 * grad
            expected = 0.9 * expected + 0.1 * (n / n.norm()).square().mean(-1, keepdim=True)
        torch.testing.assert_close(moments["a"], expected.flatten())
    saved = copy.deepcopy(optimizer.state_dict())
    weights = {name: p.detach().clone() for name, p in parameters.items()}
    normuon.step_(optimizer, parameters, [7])
    resumed, second = normuon.trained(1, momentum_dtype=momentum_dtype)
    second.load_state_dict(saved)
    for name, p in resumed.items():
        p.data = weights[name]
    normuon.step_(second, resumed, [7])
    assert all(torch.equal(p, resumed[name]) for name, p in parameters.items())
    del saved["state"][0]["row_moment"]
    with pytest.raises(ValueError, match="the checkpoint lacks this rank's part of the state row_moment of a"):
        second.load_state_dict(saved)


def test_each_number_of_the_state_lies_on_one_rank_of_flat_shards(ranks):
    parameters, optimizer = normuon.trained()
    shards = ranks.run(normuon.flat_shards, "float32")
    expected = torch.cat([optimizer.state[p]["row_moment"] for p in parameters.values()])
    torch.testing.assert_close(torch.cat([moments for _, moments in shards]), expected)
    whole = torch.cat([p.detach().flatten() for p in parameters.values()])
    torch.testing.assert_close(torch.cat([weights for weights, _ in shards])[: whole.numel()], whole)
    narrow = torch.cat([moments for _, moments in ranks.run(normuon.flat_shards, "bfloat16")])
    assert narrow.shape == expected.shape


def test_a_map_with_a_state_gets_a_transposed_weight_as_linear_layers_store_it():
    weights = []
    for layout in ("linear", "transposed"):
        weight = nn.Parameter(torch.zeros(6, 9) if layout == "linear" else torch.zeros(9, 6))
        groups = [{"params": [("w", weight)], "weight_layouts": {"w": layout}}]
        optimizer = normuon.NorMuon(groups, lr=0.1, beta2=0.9)
        for step in range(3):
            grad = normuon.gradients(step)["a"]
            weight.grad = grad if layout == "linear" else grad.T
            optimizer.step()
        weights.append(weight.detach() if layout == "linear" else weight.detach().T)
    torch.testing.assert_close(*weights)
