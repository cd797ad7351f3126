"""AdamW in chunks: the bits of the whole, and the bytes that the plan counts."""

import pytest
import torch
from soren_align.optim import CHUNK, AdamW, chunks
from soren_align.optim import adamw as adamw_step
from soren_align.planning.flops import Meter

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1}
LARGE = 2 * CHUNK + 12_345


def parameter(shape, dtype=torch.float32, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02)
    p = torch.nn.Parameter(drawn.to(dtype))
    p.grad = drawn.to(dtype).square_()
    return p


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("shape", [(LARGE,), (3, 2_000_003)], ids=str)
def test_a_shard_of_several_chunks_takes_torchs_step_to_the_last_bit(shape, observed):
    ours, theirs = parameter(shape), parameter(shape)
    optimizer, reference = AdamW([ours], **SETTINGS), torch.optim.AdamW([theirs], fused=True, **SETTINGS)
    seen = []
    optimizer.update_observers = frozenset({lambda update: seen.append(update.weight.numel())} if observed else ())
    for _ in range(2):
        optimizer.step()
        reference.step()
    assert torch.equal(ours, theirs)
    assert float(optimizer.state[ours]["step"]) == 2
    assert sum(seen) == 2 * ours.numel() * observed


def test_a_transposed_parameter_takes_torchs_step(monkeypatch):
    monkeypatch.setattr(adamw_step, "CHUNK", 100)
    ours, theirs = (torch.nn.Parameter(parameter((40, 30)).detach().T) for _ in range(2))
    ours.grad = theirs.grad = torch.ones(30, 40)
    AdamW([ours], **SETTINGS).step()
    torch.optim.AdamW([theirs], **SETTINGS).step()
    assert torch.allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    ("fused", "expected"),
    [(("cpu",), [[4, 6, 3, 0, 25, 7]]), ((), [[4, 6], [3, 0], [10], [10], [5], [7]])],
    ids=["without temporaries", "with temporaries"],
)
def test_small_parameters_go_together_and_large_ones_in_parts(monkeypatch, fused, expected):
    monkeypatch.setattr(adamw_step, "FUSED", fused)
    monkeypatch.setattr(adamw_step, "CHUNK", 10)
    sizes = []
    update_ = adamw_step._update_
    monkeypatch.setattr(
        adamw_step,
        "_update_",
        lambda bucket, *settings: sizes.append([s.parameter.numel() for s in bucket]) or update_(bucket, *settings),
    )
    AdamW([parameter((n,)) for n in (4, 6, 3, 0, 25, 7)], **SETTINGS).step()
    assert sizes == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("dtype", "compensation"), [("float32", "none"), ("bfloat16", "none"), ("bfloat16", "kahan")])
def test_the_bytes_made_in_passing_are_those_of_the_plan(monkeypatch, fused, dtype, compensation):
    monkeypatch.setattr(adamw_step, "FUSED", ("cpu",) if fused else ())
    p = parameter((LARGE,), getattr(torch, dtype))
    optimizer = AdamW([p], compensation=compensation, **SETTINGS)
    optimizer._complete_state(optimizer.param_groups[0])
    with Meter() as meter:
        optimizer.step()
    planned = adamw_step.workspace(LARGE, p.element_size(), compensation == "kahan")
    if not fused and compensation == "none":
        planned += 8 * CHUNK  # the loop's two temporaries; the plan has none, layouts that need the loop are rare
    assert planned <= meter.peak <= planned + 1024, "of step counts"


def test_the_fused_kernel_takes_the_loops_step_in_its_last_bits(monkeypatch):
    found = []
    for fused in ((), ("cpu",)):
        monkeypatch.setattr(adamw_step, "FUSED", fused)
        p = parameter((1000,))
        AdamW([p], **SETTINGS).step()
        found.append(p.detach() - parameter((1000,)).detach())
    assert torch.allclose(*found, rtol=1e-4)


@pytest.mark.parametrize("shape", [(), (0,), (7,), (0, 3), (100,), (9, 11), (1, 250), (2, 3, 40), (3, 1, 101)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_chunks_cover_every_entry_once_and_share_memory(shape, transposed):
    whole, other = torch.zeros(shape), torch.zeros(shape, dtype=torch.int16)
    if transposed and len(shape) == 2:
        whole = torch.zeros(shape[::-1]).T
    for number, (part, nothing, beside) in enumerate(chunks(whole, None, other, numel=20)):
        assert nothing is None
        assert part.shape == beside.shape
        assert part.numel() <= 20
        part += 1
        beside += number
    assert bool((whole == 1).all())


@pytest.mark.parametrize("odd", ["gradient", "view", "momentum"])
def test_a_layout_that_the_fused_kernel_refuses_is_taken_by_the_loop(monkeypatch, odd):
    def stepped(fused):
        monkeypatch.setattr(adamw_step, "FUSED", fused)
        torch.manual_seed(0)
        p, q = (torch.nn.Parameter(t) for t in (torch.randn(6, 4), torch.randn(5, 3)))
        if odd == "view":
            p = torch.nn.Parameter(torch.randn(6, 8)[:, :4])
        optimizer = AdamW([p, q], lr=0.1)
        p.grad, q.grad = (torch.randn(4, 6).t() if odd == "gradient" else torch.randn(6, 4)), torch.randn(5, 3)
        optimizer.step()
        if odd == "momentum":  # as in a checkpoint of a weight that lay otherwise
            state = optimizer.state[p]
            state["exp_avg"] = state["exp_avg"].t().contiguous().t()
        optimizer.step()
        return [p.detach(), q.detach()], used

    used: list[bool] = []
    real = adamw_step.adamw

    def checked(params, grads, exp_avgs, exp_avg_sqs, *rest, fused, **how):
        used.append(fused)
        if fused:
            for tensors in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True):
                assert len({t.stride() for t in tensors}) == 1
        return real(params, grads, exp_avgs, exp_avg_sqs, *rest, fused=fused, **how)

    monkeypatch.setattr(adamw_step, "adamw", checked)
    (ours, _), (loop, _) = stepped(("cpu",)), stepped(())
    assert {True, False} <= set(used)
    torch.testing.assert_close(ours, loop, rtol=0, atol=1e-6)  # the fused kernel rounds otherwise
