"""States in 8 bits: their error and memory; they depend on nothing but the numbers, the step and the place."""

import io
import math

import pytest
import torch
from soren_align.optim import AdamW, HTMuon, Muon, Soren, build_optimizer, momentum_of
from soren_align.optim.eight_bits import BLOCK, CODES, SQUARINGS, blocks_of, decoded_range, encode_, new_blocks, norm
from soren_align.optim.state import new_state, state_form
from torch import nn

NUMEL = 70 * 131  # 35 whole blocks and a part of one


def state_of(parameter, rule="adamw", parts=None, step=1.0):
    group = {"rule": rule, "states": "8bit", "compensation": "none"}
    return new_state(parameter, state_form(parameter, group, parts)) | {"step": torch.tensor(step)}


def store(state, key, values):
    for blocks in blocks_of(state):
        encode_(state, key, blocks, values[blocks.start : blocks.stop])
    return decoded_range(state, key, 0, values.numel())


def reference(values, key, exponent, dither):
    """The rounded numbers, one by one in float64."""
    levels = torch.iinfo(CODES[key]).max
    rounded = []
    for i, value in enumerate(values.double().tolist()):
        block = values[i // BLOCK * BLOCK : (i // BLOCK + 1) * BLOCK]
        scale = float(block.abs().max())
        code = max(c for c in range(levels + 1) if (c / levels) ** exponent * scale <= abs(value) * (1 + 1e-6))
        low, high = ((c / levels) ** exponent * scale for c in (code, code + 1))
        code = min(code + ((abs(value) - low) / (high - low) > dither[i % BLOCK]), levels)
        code = max(code, 1) if key == "exp_avg_sq" else code
        rounded.append(math.copysign((code / levels) ** exponent * scale, value))
    return torch.tensor(rounded, dtype=torch.float32)


@pytest.mark.parametrize(("rule", "key"), [("spectral", "exp_avg"), ("adamw", "exp_avg"), ("adamw", "exp_avg_sq")])
def test_numbers_are_rounded_as_defined(rule, key):
    torch.manual_seed(0)
    values = torch.randn(600) * 10 ** torch.empty(600).uniform_(-4, 0)
    values = values.square() if key == "exp_avg_sq" else values
    parameter = torch.zeros(8192)
    state = state_of(parameter, rule, [(0, 600, 8192)], step=7.0)
    golden, plastic = (math.sqrt(5) - 1) / 2, 0.7548776662466927
    dither = [(place * plastic + 7 * golden) % 1 for place in range(BLOCK)]
    exponent = 2 ** SQUARINGS["momentum" if rule == "spectral" else key]
    expected = reference(values, key, exponent, dither)
    found = store(state, key, values)
    one_code = values.abs().max() / 100  # where a dither equals an excess to rounding
    assert (found - expected).abs().gt(1e-5 * values.abs().max()).sum() <= 2
    assert (found - expected).abs().max() <= one_code * exponent


def test_rounding_is_right_on_average():
    torch.manual_seed(0)
    values, state = torch.randn(NUMEL), state_of(torch.zeros(NUMEL), "spectral")
    sums, errors = torch.zeros(NUMEL), []
    for step in range(400):
        state["step"] = torch.tensor(float(step))
        rounded = store(state, "exp_avg", values)
        sums += rounded
        errors.append((rounded - values).norm() / values.norm())
    assert 0.008 < sum(errors) / 400 < 0.011  # a code is 1/127 of a block's largest, which is 2.8 standard deviations
    assert (sums / 400 - values).norm() / values.norm() < 3e-4


def test_second_moments_follow_gradients_that_shrink():
    """Half of each block's gradients become a tenth. Rounded to nearest, their moments would stay 9 times too large."""
    torch.manual_seed(0)
    numel, beta = 4 * BLOCK, 0.999
    state, exact = state_of(torch.zeros(numel)), torch.zeros(numel)
    odd = torch.arange(numel) % 2 == 1
    for step in range(3000):
        state["step"] = torch.tensor(float(step))
        grad = torch.randn(numel)
        grad[odd] *= 1 if step < 1000 else 0.1
        exact.lerp_(grad.square(), 1 - beta)
        store(state, "exp_avg_sq", decoded_range(state, "exp_avg_sq", 0, numel).lerp(grad.square(), 1 - beta))
    ratios = (decoded_range(state, "exp_avg_sq", 0, numel) / exact).sqrt()
    assert ratios[odd].mean() == pytest.approx(1, abs=0.03)
    assert ratios[~odd].mean() == pytest.approx(1, abs=0.03)


def test_no_second_moment_of_a_block_with_gradients_is_zero():
    state = state_of(torch.zeros(NUMEL))
    values = torch.zeros(NUMEL)
    values[::BLOCK] = 1
    assert store(state, "exp_avg_sq", values).min() > 0  # AdamW divides by its root
    assert store(state, "exp_avg_sq", torch.zeros(NUMEL)).max() == 0


def test_a_shard_has_the_blocks_of_the_whole_up_to_one_that_it_cuts_and_its_own_behind():
    torch.manual_seed(0)
    values = torch.randn(NUMEL)
    whole = store(state_of(torch.zeros(NUMEL), "spectral"), "exp_avg", values)
    for cut in (0, 256, 4096, 4100, 8960, NUMEL - 1):
        shards = []
        for start, stop in ((0, cut), (cut, NUMEL)):
            parts = [(3, stop - start, NUMEL)]  # behind 3 numbers of another parameter
            shard = torch.cat([torch.zeros(3), values[start:stop]])
            shards.append(store(state_of(shard, "spectral", parts), "exp_avg", shard)[3:])
        differs = torch.cat(shards) != whole
        assert not differs[: cut // BLOCK * BLOCK].any()
        assert differs.any() == (cut % BLOCK > 0)
        # Both are within a code of the exact number; a code is at most 1/127 of the largest.
        assert (torch.cat(shards) - whole).abs().max() <= 2 * values.abs().max() / 127


def models(make, states, dtype=torch.float32, sizes=(48, 131), **settings):
    """A model after 12 steps, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Linear(sizes[1], sizes[0])).to(dtype)
    optimizer = make(model, states=states, **settings)
    for step in range(12):
        steps(model, optimizer, step)
    return model, optimizer


def steps(model, optimizer, step):
    x = torch.randn(32, model[0].in_features, generator=torch.Generator().manual_seed(step)).to(model[0].weight.dtype)
    optimizer.zero_grad()
    ((model(x) - x.roll(1, 1)) ** 2).mean().backward()
    optimizer.step()


def by_name(name):
    return lambda model, **settings: build_optimizer(model, name=name, lr=0.01, aux_lr=0.001, **settings)


@pytest.mark.parametrize(("name", "tolerance"), [("soren", 0.1), ("muon", 0.05), ("htmuon", 0.12), ("adamw", 0.05)])
def test_steps_are_those_of_float32_states_to_a_few_percent(name, tolerance):
    (exact, _), (rounded, optimizer) = (models(by_name(name), states) for states in ("float32", "8bit"))
    start, _ = models(lambda model, states: torch.optim.SGD(model.parameters(), lr=0.0), None)
    for a, b, c in zip(exact.parameters(), rounded.parameters(), start.parameters(), strict=True):
        if a.ndim == 2:
            assert 0 < (a - b).norm() < tolerance * (a - c).norm()
    kinds = {value.dtype for state in optimizer.state.values() for key, value in state.items() if key in CODES}
    assert kinds == ({torch.int8, torch.uint8})


@pytest.mark.parametrize("name", ["soren", "muon", "adamw"])
def test_parameters_of_fewer_than_4096_numbers_are_as_with_float32_states(name):
    (exact, _), (rounded, _) = (models(by_name(name), states, sizes=(40, 64)) for states in ("float32", "8bit"))
    for a, b in zip(exact.parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("name", "num_moments"), [("soren", 1), ("adamw", 2)])
def test_the_states_of_matrices_take_a_quarter(name, num_moments):
    model = nn.Linear(256, 256, bias=False)
    optimizer = by_name(name)(model, states="8bit")
    steps(nn.Sequential(model), optimizer, 0)
    tensors = [t for t in optimizer.state[model.weight].values() if t.ndim]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    assert num_bytes == num_moments * 256 * 256 * (1 + 4 / 256) + 4 * 8  # and one run of blocks


@pytest.mark.parametrize("make", [by_name(name) for name in ("soren", "muon", "htmuon", "adamw")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_resumes_bit_for_bit(make, dtype):
    settings = {"compensation": "kahan"} if dtype == torch.bfloat16 else {}
    whole, optimizer = models(make, "8bit", dtype, **settings)
    file = io.BytesIO()
    torch.save([whole.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, saved = torch.load(file, weights_only=True)
    resumed, second = models(make, "8bit", dtype, **settings)
    steps(resumed, second, 99)
    resumed.load_state_dict(weights)
    second.load_state_dict(saved)
    for step in range(12, 16):
        steps(whole, optimizer, step)
        steps(resumed, second, step)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_of_other_states_or_blocks_is_refused():
    _, optimizer = models(by_name("soren"), "8bit")
    _, other = models(by_name("soren"), "float32")
    with pytest.raises(ValueError, match="group 0 states: 8bit in the checkpoint, float32 in this optimizer"):
        other.load_state_dict(optimizer.state_dict())
    old = other.state_dict()
    for group in old["param_groups"]:
        del group["states"]  # of a version without them
    other.load_state_dict(old)
    for fault in ({"blocks": torch.zeros(1, 5)}, {"exp_avg_scale": torch.zeros(3)}, {"blocks": None}):
        saved = optimizer.state_dict()
        saved["state"][0] = {k: v for k, v in (saved["state"][0] | fault).items() if v is not None}
        message = r"8-bit states of 0\.weight in the checkpoint are quantized in other blocks"
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)


def test_the_bound_of_a_maps_inputs_holds():
    model = nn.Linear(64, 96, bias=False)
    optimizer, seen = Soren(model.named_parameters(), lr=0.01, states="8bit"), []
    map_matrix = optimizer.map_matrix

    def watched(x, group):
        seen.append((float(x.norm()), optimizer.max_norm))
        return map_matrix(x, group)

    optimizer.map_matrix = watched
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        model.weight.grad = torch.randn(96, 64, generator=generator) * (10 if step == 10 else 1)
        optimizer.step()
    assert all(x <= bound for x, bound in seen)
    state = optimizer.state[model.weight]
    assert norm(state, "exp_avg").item() == pytest.approx(momentum_of(state).norm().item())


def test_float64_and_other_strides_keep_their_states():
    for parameter in (nn.Parameter(torch.randn(96, 64).double()), nn.Parameter(torch.randn(64, 96).t())):
        for cls in (Soren, Muon, HTMuon, AdamW):
            optimizer = cls([parameter], lr=0.01, states="8bit")
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
            assert optimizer.state[parameter]["exp_avg"].dtype == parameter.dtype


def test_a_large_tensor_is_decoded_one_chunk_at_a_time(monkeypatch):
    monkeypatch.setattr("soren_align.optim.eight_bits.CHUNK", 1000)
    parameter = torch.zeros(NUMEL)
    runs = list(blocks_of(state_of(parameter)))
    assert max(run.stop - run.start for run in runs) == 768
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert (runs[0].start, runs[-1].stop) == (0, NUMEL)
    rows, number = new_blocks([(0, NUMEL, NUMEL)])
    assert (rows.tolist(), number) == ([[0, NUMEL, BLOCK, 0]], -(-NUMEL // BLOCK))
