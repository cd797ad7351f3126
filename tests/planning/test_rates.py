"""`soren-align lr`: each tool's scale against the tool itself where it is installed, else against its formula."""

import json
import math

import pytest
import torch
from soren_align.core.errors import UserError
from soren_align.launch import commands
from soren_align.optim import OPTIMIZERS
from soren_align.planning.rates import ADAMW, CONVENTIONS, parse, translate
from tests.support.command import run

SHAPES = [(48, 48), (96, 32), (32, 96), (16, 128)]
BY_NAME = {convention.name: convention for convention in CONVENTIONS}
# The singular values after five of Muon's steps, from 0.03 of the norm on, lie in this interval.
MUON = (0.66, 1.21)
QWEN = [  # of Qwen2.5-7B
    {"layers": ["q_proj", "o_proj"], "shape": [3584, 3584], "number": 56},
    {"layers": ["k_proj", "v_proj"], "shape": [512, 3584], "number": 56},
    {"layers": ["gate_proj", "up_proj"], "shape": [18944, 3584], "number": 56},
    {"layers": ["down_proj"], "shape": [3584, 18944], "number": 28},
]
# The scales, read in the tools' sources, for tools that are not installed: (m, n) -> scale.
CLOSED = {
    "adamw": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "keller": lambda m, n: max(1, m / n) ** 0.5,
    "modded-nanogpt:track-3": lambda m, n: max(1, m / n) ** 0.5,
    "modded-nanogpt:2024-10": lambda m, n: max(m, n) ** 0.5,
    "moonlight": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "dion:spectral_norm": lambda m, n: (m / n) ** 0.5,
    "dion:rms_norm": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "dion:none": lambda m, n: 1,
    "ms-swift:muon": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "ms-swift:muonclip": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "axolotl:one-gpu": lambda m, n: 0.2 * max(m, n) ** 0.5,
    "axolotl:distributed": lambda m, n: (m / n) ** 0.5,
}
for _tool in ("megatron", "emerging", "nemo-rl", "megatron-swift"):
    CLOSED[f"{_tool}:spectral"] = CLOSED["modded-nanogpt:2024-10"]
    CLOSED[f"{_tool}:unit_rms_norm"] = CLOSED["dion:spectral_norm"]
    CLOSED[f"{_tool}:shape_scaling"] = CLOSED["keller"]
for _mode in ("spectral_norm", "rms_norm", "none"):
    CLOSED[f"automodel:{_mode}"] = CLOSED[f"dion:{_mode}"]


def rms(tensor):
    return tensor.square().mean().sqrt().item()


def update(optimizer_class, shape, **settings):
    """The first update of a matrix at lr 1, of a gradient whose singular values are equal."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(shape))
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    weight.grad = u @ v / 100
    optimizer_class([weight], lr=1.0, weight_decay=0.0, **settings).step()
    return weight.detach()


def predicted(name, shape):
    return BY_NAME[name].update_rms([(*shape, 1)])[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", ["original", "match_rms_adamw"])
def test_torchs_muon_makes_updates_of_this_size(mode, shape):
    size = rms(update(torch.optim.Muon, shape, adjust_lr_fn=mode)) / predicted(f"torch:{mode}", shape)
    assert MUON[0] <= size <= MUON[1]
    # Both modes have the same O, so that their ratio shows the scales alone.
    ratio = rms(update(torch.optim.Muon, shape, adjust_lr_fn="match_rms_adamw")) / rms(
        update(torch.optim.Muon, shape, adjust_lr_fn="original")
    )
    expected = predicted("torch:match_rms_adamw", shape) / predicted("torch:original", shape)
    assert ratio == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_our_optimizers_make_updates_of_this_size(shape):
    for name in ("muon", "soren"):
        for scale in ("match_rms_measured", "match_rms_adamw", "original", "none"):
            size = rms(update(OPTIMIZERS[name], shape, adjust_lr_fn=scale))
            mode = scale if scale.startswith("match") else f"{name}.{scale}"
            size /= predicted(f"soren-align:{mode}", shape)
            # Soren's sigmoid of these small singular values is 1/2 up to 1%.
            low, high = (0.99, 1.01) if name == "soren" else MUON
            low, high = (1 - 1e-5, 1 + 1e-5) if scale == "match_rms_measured" else (low, high)
            assert low <= size <= high, (name, scale)


def test_deepspeeds_muon_makes_updates_of_this_size_and_clips_them_together():
    muon = pytest.importorskip("deepspeed.runtime.zero.muon.original_muon")
    torch.manual_seed(0)
    with torch.compiler.set_stance("force_eager"):
        updates = [muon.muon_update(torch.randn(shape), torch.zeros(shape)) for shape in SHAPES]
    shapes = [(*shape, 1) for shape in SHAPES]
    sizes = BY_NAME["deepspeed"].update_rms(shapes)
    for output, size in zip(updates, sizes, strict=True):
        assert MUON[0] <= rms(output) / size <= MUON[1]
    # ZeRO clips the norm of what lies in place of the gradients.
    norm = math.sqrt(sum(output.square().sum().item() for output in updates))
    clipped = BY_NAME["deepspeed:clipped"].update_rms(shapes)
    for size, whole in zip(clipped, sizes, strict=True):
        assert MUON[0] <= (whole / norm) / size <= 1 / MUON[0]


@pytest.mark.parametrize("name", CLOSED)
def test_a_tool_that_is_not_installed_has_its_formula(name):
    for m, n in SHAPES:
        expected = CLOSED[name](m, n) / max(m, n) ** 0.5
        assert predicted(name, (m, n)) == pytest.approx(expected)


def test_every_convention_is_tested_and_has_a_source():
    tested = {*CLOSED, "deepspeed", "deepspeed:clipped", "torch:original", "torch:match_rms_adamw"}
    assert {name for name in BY_NAME if not name.startswith("soren-align")} == tested
    assert all(c.source and c.version for c in CONVENTIONS)
    assert len(BY_NAME) == len(CONVENTIONS)


@pytest.mark.parametrize(("text", "expected"), [
    ("nemo-rl:spectral,0.2,2e-5", [2.0e-5] * 4),  # the guide's run
    ("nemo-rl:spectral,1.0,1e-4", [5.0e-4] * 4),  # the guide's example file
    ("automodel,5e-4", [4.2e-5, 1.6e-5, 4.2e-5, 7.9e-6]),  # its recipe for this model
    ("keller,2e-2", [1.7e-3, 1.7e-3, 1.7e-3, 7.3e-4]),  # its default
    ("moonlight,2e-5", [2.0e-5] * 4),
    ("soren-align:muon.none,2e-5", [1.7e-6, 1.7e-6, 7.3e-7, 7.3e-7]),  # the Soren paper's Muon
    ("deepspeed:clipped,2e-2", [1.4e-6, 1.4e-6, 1.4e-6, 6.2e-7]),
])  # fmt: skip
def test_adamws_rates_for_qwen(text, expected):
    rates = translate(QWEN, parse(text, "--from", has_lr=True))["adamw"]["lr_of_group"]
    assert rates == pytest.approx(expected, rel=0.03)


def test_another_tools_rate_gives_the_same_update_of_the_largest_group():
    start = parse("automodel,5e-4", "--from", has_lr=True)
    for target in CONVENTIONS:
        result = translate(QWEN, start, target)
        row = result["to"]
        again = translate(QWEN, parse(f"{target.name},{row['lr']!r}", "--from", has_lr=True))
        assert again["matrices"][2]["update_rms"] == pytest.approx(result["matrices"][2]["update_rms"])
        same = [a["update_rms"] for a in again["matrices"]] == pytest.approx(
            [a["update_rms"] for a in result["matrices"]]
        )
        assert same == (not row["differences"])
    assert translate(QWEN, start, ADAMW)["differences"][1] == "down_proj moves 5.3 times less"


def test_our_key_is_exact_where_a_scale_of_ours_has_the_same_proportions():
    def ours(text):
        return translate(QWEN, parse(text, "--from", has_lr=True))["soren_align"]

    assert ours("keller,2e-2")["name"] == "soren-align:muon.original"
    assert ours("keller,2e-2")["lr"] == pytest.approx(2e-2)
    assert ours("dion:none,3e-3")["name"] == "soren-align:muon.none"
    assert ours("megatron:spectral,0.5,1e-5")["lr"] == pytest.approx(2.5e-5)
    # The decay stays lr * weight_decay.
    assert ours("megatron:spectral,0.5,1e-5")["weight_decay_times"] == pytest.approx(1 / 2.5)
    assert ours("automodel,5e-4")["differences"]


@pytest.mark.parametrize(("text", "message"), [
    ("megatrn,1e-3", "'megatrn' is no known tool; did you mean 'megatron'?"),
    ("muon,1e-3", "'muon' is no known tool; write one of adamw, torch, keller"),
    ("torch:orignal,1e-3", "torch has no mode 'orignal'; did you mean 'torch:original'?"),
    ("dion", "has no learning rate; write dion:spectral_norm,LR"),
    ("keller,fast", "'fast' is no number above 0; write keller,LR"),
    ("keller,-1", "'-1' is no number above 0"),
    ("keller,0.2,1e-3", "has too many numbers; write keller,LR"),
    ("nemo-rl,", r"'' is no number above 0; write nemo-rl:spectral\[,MUON_EXTRA_SCALE_FACTOR\],LR"),
])  # fmt: skip
def test_a_mistake_is_refused_in_one_sentence(text, message):
    with pytest.raises(UserError, match=message) as refusal:
        parse(text, "--from", has_lr=True)
    assert str(refusal.value).startswith(f"--from {text}: ")
    assert len(refusal.value.problems) == 1


@pytest.mark.model
def test_the_command_translates_the_rate_of_a_model():
    model = ("lr", "--model", "HuggingFaceH4/mistral-7b-sft-alpha", "--from", "automodel,5e-4")
    shown = run(*model, "--to", "torch", env={"COLUMNS": "80", "HF_HUB_OFFLINE": "1"}).stdout
    assert "q_proj, o_proj       4096 x 4096      64      7.8e-6  3.9e-5    5.0e-4" in shown
    assert max(map(len, shown.splitlines())) <= 80
    printed = json.loads(run(*model, "--json", env={"HF_HUB_OFFLINE": "1"}).stdout)
    assert [row["number"] for row in printed["matrices"]] == [64, 64, 64, 32]


def test_the_command_lists_the_tools_and_refuses_what_it_cannot_use(monkeypatch):
    listed = run("lr", env={"COLUMNS": "80"}).stdout
    assert all(name in listed for name in BY_NAME)
    assert max(map(len, listed.splitlines())) <= 80
    assert "--to: has no effect without --from; add --from" in run("lr", "--to", "torch", code=2).stderr
    assert "--model: is missing" in run("lr", "--from", "torch,1", code=2).stderr
    monkeypatch.setattr(commands, "_inspection", lambda *_: {"matrices": []})
    command = ("lr", "--model", "quickstart/base", "--from", "torch,1")
    assert "has no matrices for Muon" in run(*command, code=2).stderr
