"""Tiny mixtures of experts, and a plain loop in which every expert has matrices of its own."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from soren_align.core.optimizer_settings import AUX_WEIGHT_DECAY
from soren_align.optim import Soren, build_optimizer
from tests.support.architectures import config_of
from tests.support.toy import MINIMAX, NUM_STEPS, RATES, Run

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
OTHERS = ("granitemoe", "jetmoe")
"""Of one process alone."""


class WithLoss(nn.Module):
    """A language model that returns its loss, as the toy does."""

    def __init__(self, architecture):
        super().__init__()
        self.inner = AutoModelForCausalLM.from_config(config_of(architecture, tie_word_embeddings=False))

    @property
    def blocks(self):
        return self.inner.model.layers

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
        return build_optimizer(model, aux=("*lm_head.weight",), **{**RATES, "name": "soren", **self.settings})


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
    linear = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in path}
    linear = {name for name in linear if "router" not in name}
    matrices, others = [], []  # (a function of a tensor that views the matrix in it, the parameter)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            for expert in range(parameter.shape[0]):
                for i in range(len(apart(run.architecture, name, parameter[expert]))):
                    view = lambda t, name=name, e=expert, i=i: apart(run.architecture, name, t[e])[i]  # noqa: E731
                    matrices.append((view, parameter))
        elif name in linear:
            matrices.append((lambda t: t, parameter))
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
