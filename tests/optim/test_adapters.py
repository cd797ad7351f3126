"""PEFT's adapters are routed by what PEFT says of them."""

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from soren_align.optim import build_optimizer, param_groups, route
from tests.support.tiny_models import tiny_llama

pytestmark = pytest.mark.model

FACTOR = "LoRA factor (extension, not in the paper)"
RATE = 0.01


def model(config, tied=True):
    return get_peft_model(tiny_llama(tie_word_embeddings=tied), config)


def reasons(found):
    return {r.name.removeprefix("base_model.model."): (r.rule, r.reason) for r in route(found)}


def step(found, optimizer):
    found(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_factors_of_linear_layers_are_spectral_and_what_is_frozen_is_nowhere():
    lora = model(LoraConfig(r=4, target_modules="all-linear"))
    found = reasons(lora)
    assert set(found.values()) == {("spectral", FACTOR)}
    assert len(found) == 2 * 7 * 2  # layers, linear layers in each, A and B
    assert {r.parameter for r in route(lora)} == {p for p in lora.parameters() if p.requires_grad}


def test_what_is_trained_whole_beside_the_factors_goes_to_adamw():
    whole = ["embed_tokens", "lm_head", "k_proj"]
    found = reasons(model(LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=whole), tied=False))
    beside = {name: where for name, where in found.items() if "lora_" not in name}
    assert len(beside) == 2 + 2
    assert all(rule == "adamw" for rule, _ in beside.values())
    assert beside["model.layers.1.self_attn.k_proj.modules_to_save.default.weight"] == (
        "adamw",
        "trained whole beside the adapter",
    )
    assert len(found) - len(beside) == 2 * 2


def test_factors_of_embeddings_and_magnitudes_go_to_adamw():
    found = reasons(model(LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"], use_dora=True), tied=False))
    rules = {}
    for name, (rule, _) in found.items():
        rules.setdefault(name.split(".")[-2], set()).add(rule)
    assert rules["lora_embedding_A"] == rules["lora_embedding_B"] == {"adamw"}
    magnitudes = {rule for name, (rule, _) in found.items() if "magnitude" in name}
    assert magnitudes == {"adamw"}
    assert found["model.layers.0.self_attn.q_proj.lora_B.default.weight"] == ("spectral", FACTOR)


def test_adapters_that_are_not_lora_are_refused():
    with pytest.raises(ValueError, match=r"q_proj is an adapter of PEFT's Linear; use a LoRA adapter"):
        route(model(IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM")))


def test_a_second_adapter_that_is_frozen_is_nowhere():
    lora = model(LoraConfig(r=4, target_modules=["q_proj"]))
    lora.add_adapter("ref", lora.peft_config["default"])
    assert all(".default." in name for name in reasons(lora))


def test_factors_alone_are_one_group():
    lora = model(LoraConfig(r=4, target_modules="all-linear"))
    (group,) = param_groups(lora, lr=RATE)
    assert group["rule"] == "spectral"
    assert len(build_optimizer(lora, name="soren", lr=RATE).param_groups) == 1
    beside = model(LoraConfig(r=4, target_modules="all-linear", modules_to_save=["embed_tokens"]))
    assert [group["lr"] for group in build_optimizer(beside, name="soren", lr=RATE).param_groups] == [RATE, RATE]


@pytest.mark.parametrize("name", ["soren", "muon", "htmuon"])
def test_the_first_step_leaves_a_where_it_is_and_moves_b_by_the_stated_rms(name):
    """B = 0, so that A's gradient is 0: the map of nothing is nothing, and no NaN."""
    lora = model(LoraConfig(r=4, target_modules="all-linear"))
    before = {n: p.detach().clone() for n, p in lora.named_parameters() if p.requires_grad}
    settings = {"weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}
    optimizer = build_optimizer(lora, name=name, lr=RATE, **settings)
    step(lora, optimizer)
    for n, p in lora.named_parameters():
        if not p.requires_grad:
            continue
        change = (p.detach() - before[n]).double()
        if "lora_A" in n:
            assert torch.equal(p.detach(), before[n])
        else:
            rms = float(change.square().mean().sqrt())
            least = 0 if name == "htmuon" else 0.5  # of full column rank, where the maps' values are near their top
            assert least * 0.2 * RATE < rms <= 1.05 * 0.2 * RATE
    step(lora, optimizer)
    assert all(torch.isfinite(p).all() for p in lora.parameters())
    assert any(not torch.equal(p.detach(), before[n]) for n, p in lora.named_parameters() if "lora_A" in n)
