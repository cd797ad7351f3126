"""Tiny models with experts or fused weights, and a plain loop in which each of their matrices is a parameter."""

import functools
import io
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from soren_align.core.optimizer_settings import AUX_WEIGHT_DECAY
from soren_align.optim import Soren, build_optimizer
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from tests.support import toy_jobs as jobs
from tests.support.architectures import config_of
from tests.support.parity_configurations import TOLERANCE, farthest
from tests.support.toy import MINIMAX, NUM_STEPS, RATES, Run, one_process

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
# Each rank would have other random numbers for GPT-2's dropout.
CHANGES = {"gpt2": dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)}
HEADS = ("lm_head.weight", "embed_out.weight")
OTHERS = ("granitemoe", "jetmoe")
"""Of one process alone."""


class WithLoss(nn.Module):
    """A language model that returns its loss, as the toy does."""

    def __init__(self, architecture):
        super().__init__()
        changes = {"tie_word_embeddings": False, **CHANGES.get(architecture, {})}
        self.inner = AutoModelForCausalLM.from_config(config_of(architecture, **changes))

    @property
    def blocks(self):
        return next(module for module in self.inner.modules() if isinstance(module, nn.ModuleList))

    @property
    def config(self):
        return self.inner.config

    def forward(self, tokens):
        logits = self.inner(input_ids=tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


@dataclass(frozen=True)
class ExpertsRun(Run):
    architecture: str = "mixtral"

    def model(self):
        torch.manual_seed(0)
        model = WithLoss(self.architecture)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 3 or "router" in name or ".gate." in name:  # some are zero, or hardly used
                    parameter.normal_(std=0.3)
        return model

    def optimizer(self, model):
        aux = [name for name, _ in model.named_parameters() if name.endswith(HEADS)]
        return build_optimizer(model, aux=aux, **{**RATES, "name": "soren", **self.settings})

    def views(self, name):
        """The functions of the weight of a linear layer that view each of its matrices."""
        return [lambda tensor: tensor]


@dataclass(frozen=True)
class FusedRun(ExpertsRun):
    """A model with split fused weights. parts: by layer, the rows (of a transposed weight: columns) of its blocks."""

    architecture: str = "phi3"
    split: dict[str, list[str | int]] = field(default_factory=dict)
    parts: dict[str, list[int]] = field(default_factory=dict)

    def model(self):
        model = super().model()
        for name, parameter in model.named_parameters():  # k's bias has a gradient of rounding, which AdamW enlarges
            parameter.requires_grad_(not (name.endswith("bias") and name.split(".")[-2] in self.parts))
        return model

    def optimizer(self, model):
        return replace(self, settings={**self.settings, "split": self.split}).built(model)

    def built(self, model):
        """The optimizer of the settings."""
        return super().optimizer(model)

    def views(self, name):
        layer, is_transposed = name.split(".")[-2], self.architecture == "gpt2"
        if layer not in self.parts:
            return [(lambda tensor: tensor.T) if is_transposed else (lambda tensor: tensor)]
        axis, ends = int(is_transposed), [*accumulate(self.parts[layer])]
        intervals = zip([0, *ends], ends, strict=False)
        return [lambda tensor, a=a, b=b: _rows(tensor.narrow(axis, a, b - a), is_transposed) for a, b in intervals]


def _rows(tensor, is_transposed):
    return tensor.T if is_transposed else tensor


FUSED = {
    "projections": FusedRun(
        split={"*qkv_proj": ["q", "k", "v"], "*gate_up_proj": ["gate", "up"]},
        parts={"qkv_proj": [32, 16, 16], "gate_up_proj": [48, 48]},
    ),
    "rows": FusedRun(split={"*qkv_proj.weight": [19, 40, 5]}, parts={"qkv_proj": [19, 40, 5]}),
    "columns": FusedRun(architecture="gpt2", split={"*c_attn": ["q", "k", "v"]}, parts={"c_attn": [32, 32, 32]}),
    "heads": FusedRun(
        architecture="gpt_neox", split={"*query_key_value": ["heads"]}, parts={"query_key_value": [8] * 12}
    ),
}


def apart(architecture, name, weight):
    """The matrices of one expert's slab, as nn.Linear would store them."""
    if name.endswith(("down_proj", "output_linear.weight", "self_attention.experts.input_linear.weight")):
        return [weight.T if architecture == "gpt_oss" else weight]
    if architecture == "gpt_oss":  # [inputs, outputs], the columns of gate and up alternating
        return [weight[:, 0::2].T, weight[:, 1::2].T]
    return [*weight.chunk(2)]


def reference(run):
    """The weights after the plain loop, and the number of matrices; the optimizer sees matrices alone."""
    model = run.model()
    modules = [(path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    linear = {f"{path}.weight" for path, _ in modules}
    linear = {name for name in linear if "router" not in name and not name.endswith(HEADS)}
    matrices, others = [], []  # (a function of a tensor that views the matrix in it, the parameter)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            for expert in range(parameter.shape[0]):
                for i in range(len(apart(run.architecture, name, parameter[expert]))):
                    view = lambda t, name=name, e=expert, i=i: apart(run.architecture, name, t[e])[i]  # noqa: E731
                    matrices.append((view, parameter))
        elif name in linear:
            matrices += ((view, parameter) for view in run.views(name))
        else:
            others.append(parameter)
    copies = [nn.Parameter(view(p.detach()).clone(memory_format=torch.contiguous_format)) for view, p in matrices]
    groups = [{"params": copies},
              {"params": others, "rule": "adamw", "lr": RATES["aux_lr"], "weight_decay": AUX_WEIGHT_DECAY}]  # fmt: skip
    rates = {key: RATES[key] for key in ("lr", "weight_decay", "adjust_lr_fn")}
    optimizer = Soren(groups, **{**rates, "map": MINIMAX, **run.settings})
    for step in range(NUM_STEPS):
        for tokens in run.batches(step):
            (model(tokens) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        for copy, (view, parameter) in zip(copies, matrices, strict=True):
            copy.grad = view(parameter.grad).clone(memory_format=torch.contiguous_format)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for copy, (view, parameter) in zip(copies, matrices, strict=True):
                view(parameter).copy_(copy)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, len(copies)


RUNS = {name: ExpertsRun(architecture=name) for name in (*MIXTURES, *OTHERS)} | FUSED
WAYS = {"DDP": (jobs.ddp,), "FSDP2": (jobs.fsdp2,), **{f"ZeRO {n}": (jobs.deepspeed, n) for n in (1, 2, 3)}}
expected = functools.cache(lambda name: reference(RUNS[name]))


def assert_same_steps(name):
    """That one process takes the steps of the reference of RUNS[name]."""
    weights, norms, optimizer = one_process(RUNS[name])
    wanted, num_matrices = expected(name)
    assert farthest(weights, wanted) <= 1e-6
    assert optimizer.num_maps == num_matrices * NUM_STEPS
    assert min(norms) > 0.5, "the clip must bind in every step"


def assert_same_steps_on_ranks(pool, way, run, wanted, num_matrices):
    """That these ranks, sharded in one of WAYS, take the steps of a run's reference."""
    job, *stage = WAYS[way]
    results = pool.run(job, *stage, run)
    for result in results:
        assert farthest(result.weights, wanted) <= TOLERANCE
    assert sum(result.num_maps for result in results) == num_matrices * NUM_STEPS


def assert_own_scales(run, adjust_lr_fn, workspace_mb):
    """That each matrix of a parameter has its own scale, in a batch and alone."""
    settings = {"map": MINIMAX, "adjust_lr_fn": adjust_lr_fn, "lr": 1e-2}
    wanted, _ = reference(replace(run, settings=settings))
    weights, _, _ = one_process(replace(run, settings={**settings, "workspace_mb": workspace_mb}))
    assert farthest(weights, wanted) <= 1e-6


def continued(run):
    """The checkpoint of a run's first step and the optimizer that has continued from it, as the first one did."""

    def step(model, optimizer, number):
        model(run.batches(number)[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    model = run.model()
    optimizer = run.optimizer(model)
    step(model, optimizer, 0)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    resumed = run.model()
    resumed.load_state_dict(saved["model"])
    again = run.optimizer(resumed)
    again.load_state_dict(saved["optimizer"])
    step(model, optimizer, 1)
    step(resumed, again, 1)
    assert farthest(dict(resumed.named_parameters()), dict(model.named_parameters())) == 0
    return saved["optimizer"], again
