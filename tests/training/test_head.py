"""The loss for TRL 1.15 on CPUs equals that of the installed TRL, values and gradients."""

import pytest
import torch
import trl
from packaging.version import Version
from soren_align.training import head
from soren_align.training.head import PlainLogProbs
from trl.trainer import utils

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


@pytest.mark.skipif(Version(trl.__version__) < Version("1.16"), reason="TRL 1.15 has no loss on CPUs to compare with")
@pytest.mark.parametrize(("softcap", "scale", "temperature"), [(None, 1.0, 1.0), (30.0, 0.5, 0.7)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_it_equals_trls_own(monkeypatch, softcap, scale, temperature, with_bias):
    monkeypatch.setattr(head, "TILE_NUMEL", 5 * 37)  # several tiles, the last one smaller
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) for n in (23, 37))
    bias = torch.randn(37, generator=generator) if with_bias else None
    labels, weights = torch.randint(0, 37, (23,), generator=generator), torch.randn(2, 23, generator=generator)
    found = []
    for function in (PlainLogProbs, utils._ChunkedLogProbFunction):
        inputs = [x if x is None else x.clone().requires_grad_() for x in (hidden, weight, bias)]
        values = function.apply(*inputs, labels, temperature, 16, softcap, scale, OUTPUTS)
        (values[0] @ weights[0] + values[1] @ weights[1]).backward()
        found.append([*values, *(x.grad for x in inputs if x is not None)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-5, atol=2e-5)


def test_outputs_that_are_not_asked_for_are_none_and_no_token_is_no_error():
    values = PlainLogProbs.apply(
        torch.zeros(0, 4), torch.zeros(7, 4), None, torch.zeros(0).long(), 1.0, 16, None, 1.0, ()
    )
    assert [None if x is None else x.shape for x in values] == [(0,), None, None, None, None]
