"""With a compensation bfloat16 parameters take the steps of float32 ones."""

import copy
import math

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren, decay_and_add_
from soren_align.optim.rounding import master_weights, store_master_weights_

STEPS = 200


def start(*shape, seed=0):
    """Weights of a checkpoint that was published in bfloat16."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    return drawn.to(torch.bfloat16)


def gradients(*shape, steps=STEPS):
    """Gradients that agree with each other in part, as a run's do, and are clipped."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(*shape, generator=generator)
    for _ in range(steps):
        grad = common + 2 * torch.randn(*shape, generator=generator)
        yield (grad / grad.norm()).to(torch.bfloat16)


def cosine(step):
    """The paper's schedule: a tenth of warm-up, then a cosine to 0."""
    warmup = STEPS // 10
    return step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup)))


def weights(optimizer, p):
    """The weights as the optimizer knows them, in float32 or float64."""
    return master_weights(p.detach(), optimizer.state[p].get("compensation"))


def two_hundred_steps(cls, lr, dtype, compensation="kahan"):
    p = torch.nn.Parameter(start(64, 96).to(dtype))
    scale = {} if cls is AdamW else {"adjust_lr_fn": "none"}
    optimizer = cls([p], lr=lr, weight_decay=0.1, compensation=compensation, **scale)
    for step, grad in enumerate(gradients(64, 96)):
        optimizer.param_groups[0]["lr"] = lr * cosine(step)
        p.grad = grad.to(dtype)
        optimizer.step()
    return optimizer, p


# The paper's learning rates for SFT; a hundredth of Soren's moves no bfloat16 at all.
@pytest.mark.rest
@pytest.mark.parametrize(("cls", "lr"), [(Soren, 1e-6), (Soren, 1e-8), (Muon, 2e-5), (HTMuon, 1e-6), (AdamW, 3e-5)])
def test_two_hundred_steps_are_those_of_float32_to_the_last_bit(cls, lr):
    wide = weights(*two_hundred_steps(cls, lr, torch.float32))
    optimizer, p = two_hundred_steps(cls, lr, torch.bfloat16)
    assert torch.equal(weights(optimizer, p), wide)
    assert (p.detach() - wide.to(torch.bfloat16)).abs().max() <= 2**-8 * wide.abs().max(), "but for ties"
    _, lost = two_hundred_steps(cls, lr, torch.bfloat16, "none")
    way = (wide - start(64, 96).float()).norm()
    assert (lost.detach().float() - wide).norm() > 0.15 * way, "without it, even AdamW's larger steps are lost"


@pytest.mark.parametrize("lr", [1e-6, 1e-8])
def test_they_are_those_of_float64_to_2_percent_of_the_way(lr):
    exact = weights(*two_hundred_steps(Soren, lr, torch.float64))
    narrow = weights(*two_hundred_steps(Soren, lr, torch.bfloat16))
    apart = (narrow - exact).norm() / (exact - start(64, 96).double()).norm()
    # 1e-8 is below what float32 holds of weights of 0.02: its steps are 6e-10, half of an ulp 9e-10.
    assert apart < 0.02 if lr == 1e-6 else apart > 0.02


def test_the_decay_goes_through_the_compensation_too():
    p = torch.nn.Parameter(start(8, 12))
    optimizer = Soren([p], lr=1e-5, weight_decay=0.1, compensation="kahan")
    for _ in range(50):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    wanted = start(8, 12).double() * ((1 - 1e-6) ** 50 - 1)
    assert torch.equal(p.detach(), start(8, 12)), "far below half an ulp"
    change = weights(optimizer, p).double() - start(8, 12).double()
    assert float((change - wanted).norm() / wanted.norm()) < 0.1  # of float32: its own rounding of 1 - 1e-6


def test_weights_and_compensation_are_a_float32_and_back():
    drawn = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    bits = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x3F808000, 0x3F818000], dtype=torch.int32)
    edges = torch.cat([bits.view(torch.float32), -bits.view(torch.float32), torch.tensor([1e30, -1e-38, 0.0, -0.0])])
    for w in (drawn, edges, drawn.view(100, 100).T):
        held, compensation = torch.empty_like(w, dtype=torch.bfloat16), torch.empty_like(w, dtype=torch.int16)
        store_master_weights_(held, compensation, w.contiguous())
        assert torch.equal(master_weights(held, compensation).view(torch.int32), w.contiguous().view(torch.int32))
        assert (held.float() - w).abs().le(w.abs() * 2**-8 + 1e-40).all()


def test_float32_parameters_have_no_compensation_and_take_the_same_steps():
    seen = []
    for compensation in ("kahan", "none"):
        p = torch.nn.Parameter(start(8, 12).float())
        optimizer = Soren([p], lr=0.1, compensation=compensation)
        p.grad = next(gradients(8, 12)).float()
        optimizer.step()
        assert optimizer.state[p].keys() == {"step", "exp_avg"}
        seen.append(p.detach())
    assert torch.equal(*seen)


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).to(torch.bfloat16)


def optimizer_of(net, compensation="kahan"):
    named = list(net.named_parameters())
    matrices = {"params": [(n, p) for n, p in named if p.ndim == 2]}
    rest = {"params": [(n, p) for n, p in named if p.ndim != 2], "rule": "adamw", "lr": 1e-5}
    return Soren([matrices, rest], lr=1e-5, compensation=compensation)


def train(net, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 6, generator=generator).to(torch.bfloat16)).square().mean().backward()
        optimizer.step()


def test_a_resumed_run_has_parameter_and_compensation_of_an_uninterrupted_one(tmp_path):
    whole = model()
    first = optimizer_of(whole)
    train(whole, first, 3, seed=1)
    torch.save({"model": whole.state_dict(), "optimizer": first.state_dict()}, tmp_path / "checkpoint.pt")
    train(whole, first, 3, seed=2)
    resumed = model()
    second = optimizer_of(resumed)
    checkpoint = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed.load_state_dict(checkpoint["model"])
    second.load_state_dict(checkpoint["optimizer"])
    train(resumed, second, 3, seed=2)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
        one, other = (o.state[p]["compensation"] for o, p in ((first, a), (second, b)))
        assert torch.equal(one, other)
        assert one.dtype == other.dtype == torch.int16
        assert one.any()


def test_a_checkpoint_without_its_compensation_or_with_the_other_setting_is_refused():
    net = model()
    optimizer = optimizer_of(net)
    train(net, optimizer, 1, seed=1)
    saved = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="group 0 compensation: kahan in the checkpoint, none in this optimizer"):
        optimizer_of(model(), "none").load_state_dict(saved)
    del saved["state"][1]["compensation"]
    with pytest.raises(ValueError, match=r"the checkpoint has no compensation of 2.weight"):
        optimizer_of(model()).load_state_dict(saved)
    with pytest.raises(ValueError, match="compensation: found 'khan'; write one of 'none', 'kahan'"):
        optimizer_of(model(), "khan")


def test_an_observer_sees_the_change_that_the_compensation_keeps():
    net, seen = model(), []
    optimizer = optimizer_of(net)
    optimizer.update_observers = frozenset({lambda update: seen.extend(update.applied())})
    train(net, optimizer, 1, seed=1)
    assert len(seen) == 4
    for before, after, _ in seen:
        change = after - before
        assert change.dtype == torch.float32
        assert 0 < change.abs().max() < 2e-5
    other = model()
    plain = optimizer_of(other)
    train(other, plain, 1, seed=1)
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(optimizer.state[a]["compensation"], plain.state[b]["compensation"])


def test_a_proposal_is_the_step_that_is_taken():
    for compensation in ("kahan", "none"):
        net, seen = model(), []
        optimizer = optimizer_of(net, compensation)

        def see(proposal, seen=seen):
            held, kept = (None if t is None else t.clone() for t in (proposal.weight, proposal.compensation))
            settings = {key: proposal.group[key] for key in ("lr", "weight_decay")}
            decay_and_add_(held, kept, proposal.direction, scale=proposal.scale, **settings)
            seen.append((held, kept))

        optimizer.update_observers = frozenset({see})
        train(net, optimizer, 1, seed=1)
        matrices_first = sorted(net.parameters(), key=lambda p: p.ndim != 2)
        assert len(seen) == 4
        for p, (held, kept) in zip(matrices_first, seen, strict=True):
            now = master_weights(p.detach(), optimizer.state[p].get("compensation"))
            # AdamW's direction is computed twice, and may differ in its last bit.
            assert torch.allclose(
                now.float(), master_weights(held, kept).float(), rtol=2e-7 if kept is not None else 4e-3
            )
