"""The runs on several ranks that are compared with one process, for test_parity.py and `make parity`."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import toy_jobs as jobs
from tests.support.toy import MINIMAX, Run, one_process

ZERO = ("ZeRO 1", "ZeRO 2", "ZeRO 3")  # DeepSpeed's
WAYS = ("DDP", "FSDP2", *ZERO)
TOLERANCE = 2e-6  # float32, ten steps: sums over ranks in another order, magnified by the map's slope at zero
WITHOUT_CLIP = 1e-4  # what a missing clip must exceed
LARGEST_BYTES = 131 * 48 * 4  # of the toy's matrices


@dataclass(frozen=True)
class Configuration:
    """`run` on ranks, sharded in one of `ways`; `zero` is for DeepSpeed's zero_optimization."""

    name: str
    run: Run
    ways: tuple[str, ...] = WAYS
    zero: dict[str, Any] = field(default_factory=dict)

    def __str__(self):
        return self.name


COMMON = Configuration("minimax 0.01", Run())  # its map is that of the configurations that name none
DEFAULT = Configuration("default map, full rank", Run({}, full_rank=True))
MEASURED = {"name": "muon", "adjust_lr_fn": "match_rms_measured", "lr": 1e-2}
TO_START = {"weight_decay_to": "start", "weight_decay": 10.0, "aux_weight_decay": 10.0}
ELEMENTS = {"second_moment": "elements", "map_input": "sign"}
IN_FLOAT64: dict[str, Any] = {"dtype": torch.float64, "full_rank": True}
CONFIGURATIONS = (
    COMMON,
    DEFAULT,
    Configuration("sns", Run({"map": "sns", "adjust_lr_fn": "match_rms_adamw", "lr": 1e-2})),
    Configuration("measured RMS", Run({"map": MINIMAX, "adjust_lr_fn": "match_rms_measured", "lr": 1e-2})),
    Configuration("released", Run({"map": "released", "adjust_lr_fn": "original", "lr": 1e-1})),
    Configuration("Muon, map in float64", Run({"name": "muon"}, float64_map=True)),
    Configuration("NorMuon, map in float64", Run({**MEASURED, "second_moment": "rows"}, float64_map=True)),
    Configuration("rows, Soren", Run({"map": MINIMAX, "second_moment": "rows"})),
    # In float64: an element near zero is divided by its own size, and so is its rounding. In float32 test_second_moment
    # compares steps whose gradients have no rounding. (DeepSpeed trains no float64.)
    Configuration("AdaMuon in float64", Run({**MEASURED, **ELEMENTS}, **IN_FLOAT64), ("DDP", "FSDP2")),
    Configuration(
        "elements, float64", Run({"map": MINIMAX, "second_moment": "elements"}, **IN_FLOAT64), ("DDP", "FSDP2")
    ),
    Configuration("HTMuon, full rank", Run({"name": "htmuon"}, full_rank=True)),
    Configuration("exact, full rank", Run({"map": "exact"}, full_rank=True)),
    Configuration("identity", Run({"map": "identity"})),
    Configuration("high_pass", Run({"map": "high_pass"})),
    Configuration("soft_sign", Run({"map": "soft_sign"})),
    Configuration("random, full rank", Run({"map": "identity"}, null_map="RANDOM", full_rank=True)),
    Configuration("all 2-D", Run({"map": "released", "adjust_lr_fn": "original", "matrices": "all-2d", "aux": ()})),
    Configuration("decay to the start", Run({"map": MINIMAX, **TO_START})),
    Configuration("frozen parameters", Run(frozen=("0.q", "1.up"))),
    Configuration("LoRA", Run(clip=0.05, lora=True)),
    Configuration("CPU offload", Run(), ZERO, {"offload_optimizer": {"device": "cpu"}}),
    Configuration("several sub-groups", Run(), ("ZeRO 3",), {"sub_group_size": 10000}),
)
CONTROL = Configuration("clip off: must differ", Run(clip=1e9))


@dataclass(frozen=True)
class Comparison:
    """`difference`: the largest of any weight, on any rank. norms, num_maps: of one process."""

    difference: float
    results: list[jobs.Result]
    norms: list[float]
    num_maps: int

    @property
    def pieces(self):
        """The numbers of each matrix's pieces; none of replicas."""
        layouts = [plan.layout for plan in self.results[0].plans]
        return [[f.numel for f in m.shards] for layout in layouts if not layout.replicated for m in layout.weights]

    @property
    def momentum_share(self):
        """The momentum of the rank that has most, over an even share of all."""
        num_weights = sum(m.numel for plan in self.results[0].plans for m in plan.layout.weights)
        return max(r.state_numel for r in self.results) * len(self.results) / num_weights


_references = {}
_comparisons = {}


def reference(run):
    """The weights of one process, its gradient norms, and how many matrices it mapped."""
    key = repr((run.settings, run.frozen, run.clip, run.dtype, run.lora, run.full_rank, run.float64_map))
    if key not in _references:
        weights, norms, optimizer = one_process(run)
        _references[key] = weights, norms, optimizer.num_maps
    return _references[key]


def farthest(weights, expected):
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


def compare(ranks, way, configuration):
    """`configuration` on `ranks`, compared with one process; CONTROL with one that clips."""
    key = ranks.num_ranks, way, repr(configuration)
    if key not in _comparisons:
        expected, norms, num_maps = reference(Run() if configuration is CONTROL else configuration.run)
        run = configuration.run
        if way in ZERO:
            config = {"zero_optimization": configuration.zero}
            results = ranks.run(jobs.deepspeed, ZERO.index(way) + 1, run, config)
        else:
            results = ranks.run({"DDP": jobs.ddp, "FSDP2": jobs.fsdp2}[way], run)
        difference = max(farthest(result.weights, expected) for result in results)
        _comparisons[key] = Comparison(difference, results, norms, num_maps)
    return _comparisons[key]
