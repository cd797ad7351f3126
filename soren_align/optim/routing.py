"""The routing of parameters: the rule of each trainable parameter, and the reason for it.

Weights of linear layers inside the blocks go to the spectral rule, and those of experts and of
torch's attention, which are stored together: see `layout`. In a model without blocks all linear
layers do. Embeddings, the head (tied or not), norms, biases, routers, gates of one row and all
other parameters go to AdamW. Every trainable parameter has exactly one route, by identity, not by
name. The LoRA factors of linear layers go to the spectral rule, each mapped by itself. They are
recognized by PEFT's layers in the model, not by shapes or names; peft is used only if it has been
imported, so that the optimizers do not need it. With `matrices` "all-2d", as in the authors'
released code, all other parameters of two dimensions go there too.
"""

import math
import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ..core.optimizer_settings import AUX_WEIGHT_DECAY, MATRICES, Matrices
from .blocks import Split, blocks_of, matches, split_layout
from .layout import GATE_UP, LINEAR, QKV, WeightLayout, weights_in, whole_shape

FACTOR = "LoRA factor (extension, not in the paper)"
_ROUTER = re.compile(r"Router|TopKGating")
"""Names of transformers' classes that choose experts; JetMoE's is the latter."""
_OF_ATTENTION = {
    "in_proj_weight": WeightLayout(parts=QKV),
    **dict.fromkeys(("q_proj_weight", "k_proj_weight", "v_proj_weight"), LINEAR),
}
"""torch.nn.MultiheadAttention's projections, which are no linear layers; that of the output is
one."""
_OF_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_COUNTS = ("tensors", "matrices", "numel")


@dataclass(frozen=True, eq=False)
class Route:
    """The rule of one trainable parameter.
    `shape` is that of the whole, also if ZeRO 3 has emptied the tensor.

    layout: of its matrices, if it goes to the spectral rule.
    """

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]
    rule: str
    reason: str
    layout: WeightLayout = LINEAR

    @property
    def matrix_shapes(self) -> Counter[tuple[int, int]]:
        """The numbers of its matrices by (outputs, inputs)."""
        shapes: Counter[tuple[int, int]] = Counter()
        for weight in weights_in(self.name, self.shape, self.layout):
            shapes[weight.layout.matrix_shape(weight.shape)] += weight.layout.num_matrices
        return shapes

    @property
    def num_matrices(self) -> int:
        """The number of its matrices: more than one for experts and blocks."""
        return self.matrix_shapes.total()

    @property
    def is_stored_otherwise(self) -> bool:
        """Whether it is more than one linear matrix, so that a parameter group must name its
        layout.
        """
        return self.rule == "spectral" and (len(self.shape) == 3 or self.layout != LINEAR)


@dataclass(frozen=True)
class _Occurrence:
    """One of the attributes that hold a parameter; a tied parameter has several."""

    name: str
    owner: nn.Module
    around: nn.Module
    """The module that holds `owner`."""
    in_block: bool
    is_router: bool
    """Whether it chooses experts."""

    def layout(self, num_dimensions: int) -> WeightLayout | None:
        """How a parameter of so many dimensions stores matrices of linear layers; None if it has
        none.
        """
        name, owner = self.name.split(".")[-1], self.owner
        if num_dimensions == 3:  # [experts, rows, columns]
            return self._layout_of_experts(name)
        if num_dimensions != 2:
            return None
        # By the class as well as by the name: another module's `in_proj_weight` may store something
        # else.
        if isinstance(owner, nn.MultiheadAttention):
            return _OF_ATTENTION.get(name)
        if name != "weight":
            return None
        if isinstance(owner, nn.Linear):
            return LINEAR
        # GPT-2's layers, which store the transpose of nn.Linear's weight.
        return WeightLayout(transposed=True) if _is_of_transformers(owner, "Conv1D") else None

    def _layout_of_experts(self, name: str) -> WeightLayout | None:
        owner = self.owner
        if _is_of_transformers(owner, "JetMoeParallelExperts"):  # of its MLP, or of its attention
            # JetMoE's class is used for the MLP, whose input is gate and up-projection together,
            # and for the attention's outputs, which are one matrix.
            is_of_mlp = _is_of_transformers(self.around, "JetMoeMoE")
            is_input = is_of_mlp and self.around.input_linear is owner
            return WeightLayout(parts=GATE_UP) if is_input else LINEAR
        # transformers' decorator use_experts_implementation, which Llama 4 lacks, leaves the layout
        # in attributes.
        is_llama4 = _is_of_transformers(owner, "Llama4TextExperts")
        if not (is_llama4 or hasattr(owner, "is_transposed")) or name not in _OF_EXPERTS:
            return None
        is_transposed = is_llama4 or bool(owner.is_transposed)
        if name != "gate_up_proj":
            return WeightLayout(is_transposed)
        # gpt-oss alternates the columns of gate and up. Alternating rows are stored by no
        # architecture that we know, so that such experts go to AdamW rather than to a guess.
        if is_llama4 or owner.is_concatenated:
            return WeightLayout(is_transposed, GATE_UP)
        return WeightLayout(True, GATE_UP, interleaved=True) if is_transposed else None


def route(
    model: nn.Module,
    aux: Sequence[str] = (),
    matrices: Matrices = MATRICES,
    split: Split | None = None,
) -> list[Route]:
    """The route of every trainable parameter of `model`, in the order of `named_parameters`.

    aux: globs of parameter names that go to AdamW even if they are matrices, e.g.
        "*.o_proj.weight".
    matrices: "inside-blocks": the weights of linear layers inside the blocks, and of experts.
        "all-2d": also every other parameter of two dimensions, embeddings and head among them, but
        none of an adapter.
    split: the blocks of fused weights that are matrices of their own, see `blocks`.
    Raises ValueError for a glob that matches nothing, for a weight that cannot be split so, for
    PEFT adapters other than LoRA, and for FSDP1's wrappers.
    """
    # Check: what is refused here would be routed wrongly without a word.
    parameters = _occurrences(model)
    factors, of_adapters = adapter_parameters(model)
    _refuse_strangers(model, parameters, aux, {*factors, *of_adapters})

    # Route: a reason against the spectral rule wins, and is the reason of the route.
    obstacles = of_adapters | _of_heads(model)
    needs_block = _is_language_model(model) or _has_blocks(parameters)
    routes = []
    # By identity: a tied parameter is met once, with all of its names.
    for parameter, occurrences in parameters.items():
        shape, is_factor = whole_shape(parameter), parameter in factors
        obstacle = obstacles.get(parameter) or _obstacle(occurrences, shape, aux, needs_block)
        # A vector has one singular value, so that a map could only scale it.
        if not obstacle and min(shape[-2:]) == 1 and not is_factor:
            obstacle = "a vector: one row or column"
        kind = FACTOR if is_factor else "experts" if len(shape) == 3 else "linear layer"
        reason = obstacle or kind
        if len(occurrences) > 1:
            reason += f", tied to {', '.join(o.name for o in occurrences[1:])}"
        is_spectral = not obstacle
        if matrices == "all-2d" and len(shape) == 2:  # the obstacle remains as its reason
            is_spectral = not (parameter in of_adapters or _glob_of(occurrences, aux))
        # Under "all-2d" also parameters of no linear layer are mapped, as the matrix that they are.
        layout = occurrences[0].layout(len(shape)) or LINEAR
        rule = "spectral" if is_spectral else "adamw"
        whole = Route(occurrences[0].name, parameter, shape, rule, reason, layout)
        blocks = blocks_of(whole.name, split or {}) if is_spectral and not is_factor else ()
        config = getattr(model, "config", None)
        routes.append(_in_blocks(whole, blocks, config) if blocks else whole)

    _refuse_unmatched(split or {}, [r for r in routes if r.rule == "spectral" and r.layout.sizes])
    return routes


def _refuse_strangers(
    model: nn.Module,
    parameters: Mapping[nn.Parameter, Sequence[_Occurrence]],
    aux: Sequence[str],
    of_peft: Collection[nn.Parameter],
) -> None:
    """Raise ValueError for FSDP1's wrappers, for a factor of LoRA that PEFT did not make, and for a
    glob of `aux` that matches nothing.
    """
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "the model is wrapped by FSDP1 (FullyShardedDataParallel), which flattens matrices; "
            "use FSDP2 (torch's fully_shard, or fsdp_version: 2 in accelerate's config), DDP or "
            "DeepSpeed"
        )
    for parameter, (first, *_) in parameters.items():
        # Another library's factors would be routed as linear layers without a word.
        if ".lora_" in first.name and parameter not in of_peft:
            raise ValueError(
                f"{first.name} has the name of a LoRA factor, but PEFT did not make it; make "
                "LoRA adapters with PEFT, or rename the parameter"
            )
    names = [o.name for occurrences in parameters.values() for o in occurrences]
    for glob in aux:
        if not any(fnmatchcase(name, glob) for name in names):
            raise ValueError(
                f"aux: {glob!r} matches no trainable parameter; correct or remove this name"
            )


def _refuse_unmatched(split: Split, routes: Sequence[Route]) -> None:
    for glob in split:
        if not any(matches(route.name, glob) for route in routes):
            raise ValueError(
                f"split: {glob!r} matches no weight that is a matrix of the optimizer; correct or "
                "remove this name"
            )


def _of_heads(model: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters of the input's and the output's embedding, each with its name."""
    getters = {
        "input embedding": "get_input_embeddings",
        "output embedding": "get_output_embeddings",
    }
    heads: dict[nn.Parameter, str] = {}
    for name, getter in getters.items():
        module = getattr(model, getter)() if hasattr(model, getter) else None
        for parameter in module.parameters() if module is not None else ():
            # A tied head is the input's embedding too: its first name stays.
            heads.setdefault(parameter, name)
    return heads


def _in_blocks(whole: Route, blocks: Sequence[str | int], config: Any) -> Route:
    """The route of a fused weight that is divided into blocks."""
    layout = split_layout(whole.name, whole.shape, whole.layout, blocks, config)
    parts = layout.parts
    words = f"{len(parts)} blocks" if parts[0].isdigit() else ", ".join(parts)
    route = replace(whole, layout=layout, reason=f"{whole.reason}, split into {words}")
    if min(min(shape) for shape in route.matrix_shapes) == 1:
        raise ValueError(
            f"split: {whole.name}: a block of one row is no matrix; write larger blocks"
        )
    return route


def adapter_parameters(model: nn.Module) -> tuple[set[nn.Parameter], dict[nn.Parameter, str]]:
    """Return the LoRA factors A and B of the model's linear layers, and the other parameters of
    adapters with their kinds.

    Raises ValueError for a trainable adapter that is not LoRA.
    """
    factors: set[nn.Parameter] = set()
    others: dict[nn.Parameter, str] = {}
    # A model can have PEFT's layers only if peft was imported: the optimizers do not need it.
    if "peft" not in sys.modules:
        return factors, others
    from peft.tuners.lora import LoraLayer
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
    from transformers.pytorch_utils import Conv1D

    for path, module in model.named_modules():
        # modules_to_save: a copy of a whole layer, such as the head, trained beside the factors.
        if isinstance(module, AuxiliaryTrainingWrapper):
            for parameter in module.parameters():
                others.setdefault(parameter, "trained whole beside the adapter")
        elif isinstance(module, BaseTunerLayer):
            is_linear = isinstance(module.get_base_layer(), nn.Linear | Conv1D)
            for kind, owner, parameter in _trainable(module):
                is_factor = (
                    kind in ("lora_A", "lora_B")
                    and isinstance(owner, nn.Linear)
                    and parameter is owner.weight
                )
                if isinstance(module, LoraLayer) and is_linear and is_factor:
                    factors.add(parameter)
                elif isinstance(module, LoraLayer | TrainableTokensLayer):
                    others[parameter] = f"{kind} of an adapter"
                else:
                    raise ValueError(
                        f"{path} is an adapter of PEFT's {type(module).__name__}; use a LoRA "
                        "adapter"
                    )
    return factors, others


def _trainable(layer: Any) -> Iterator[tuple[str, Any, nn.Parameter]]:
    """Yield (PEFT's name of the kind, the module or None, the parameter) for every trainable
    parameter of an adapter layer.
    """
    for kind in layer.adapter_layer_names:
        container = getattr(layer, kind, None)
        if not isinstance(container, nn.ModuleDict | nn.ParameterDict):
            continue
        for part in container.values():
            if isinstance(part, nn.Module):
                yield from ((kind, part, p) for p in part.parameters() if p.requires_grad)
            elif part.requires_grad:
                yield kind, None, part


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    aux_lr: float | None = None,
    weight_decay: float | None = None,
    aux_weight_decay: float = AUX_WEIGHT_DECAY,
    aux: Sequence[str] = (),
    matrices: Matrices = MATRICES,
    split: Split | None = None,
    needs_matrix: bool = True,
) -> list[dict[str, Any]]:
    """The parameter groups of `model` for Soren, Muon or HTMuon: the matrices, then the other
    parameters (AdamW).

    lr, weight_decay: of the matrices; None leaves them to the optimizer. aux_lr, aux_weight_decay:
    of the other parameters; aux_lr=None is lr. aux, matrices, split: see `route`.
    Warns if the model's blocks were not found, so that its output layer may be among the matrices.
    Raises ValueError if nothing is trained, if `needs_matrix` and no parameter goes to the spectral
    rule, if others have neither aux_lr nor lr, and whatever `route` refuses.
    """
    # A head among the matrices is the one mistake that routing by blocks can make: report it.
    routes = route(model, aux, matrices, split)
    if (
        matrices == MATRICES
        and not aux
        and not _is_language_model(model)
        and not _has_blocks(_occurrences(model))
    ):
        for last in [r for r in routes if r.rule == "spectral" and r.reason == "linear layer"][-1:]:
            shape = " x ".join(map(str, last.shape))
            warnings.warn(
                f"{type(model).__name__} has no blocks (a ModuleList, or modules of one class in "
                "sequence), so the weights of all linear layers are matrices. If the last linear "
                f"layer, {last.name} ({shape}), is the output layer, write aux=[{last.name!r}], "
                "so that AdamW updates the output layer, as in other models",
                stacklevel=2,
            )
    if not routes:
        raise ValueError(
            f"{type(model).__name__} has no trainable parameter; set requires_grad of parameters"
        )
    if needs_matrix and not any(r.rule == "spectral" for r in routes):
        reasons = ", ".join(sorted({r.reason for r in routes}))
        raise ValueError(
            f"{type(model).__name__} has no weight matrix for a spectral optimizer ({reasons}); "
            "use AdamW"
        )
    # Two groups at most. Settings that are None are left to the optimizer's defaults.
    aux_lr = lr if aux_lr is None else aux_lr
    others = [r for r in routes if r.rule == "adamw"]
    if others and aux_lr is None:
        raise ValueError(
            "aux_lr: is missing; write aux_lr or lr, the learning rate of the other parameters "
            f"({others[0].name}, ...)"
        )
    settings = {
        "spectral": {"lr": lr, "weight_decay": weight_decay},
        "adamw": {"lr": aux_lr, "weight_decay": aux_weight_decay},
    }
    groups = []
    for rule, values in settings.items():
        members = [r for r in routes if r.rule == rule]
        if members:
            lists: dict[str, Any] = {
                "params": [r.parameter for r in members],
                "param_names": [r.name for r in members],
            }
            if weight_layouts := {r.name: r.layout for r in members if r.is_stored_otherwise}:
                lists["weight_layouts"] = weight_layouts
            groups.append(
                {"rule": rule, **lists, **{k: v for k, v in values.items() if v is not None}}
            )
    return groups


def _is_language_model(model: nn.Module) -> bool:
    """Whether a model names its output layer, as those of transformers do."""
    return hasattr(model, "get_output_embeddings")


def _has_blocks(parameters: Mapping[nn.Parameter, Sequence[_Occurrence]]) -> bool:
    """Whether a matrix lies in a list of blocks; if so, those outside are the input's and the
    output's.
    """
    matrices = (
        o
        for parameter, occurrences in parameters.items()
        if parameter.ndim == 2
        for o in occurrences
    )
    return any(o.in_block and o.layout(2) is not None for o in matrices)


def routing_table(routes: Sequence[Route]) -> list[dict[str, Any]]:
    """One dict per rule and reason: {"rule", "reason", "tensors", "matrices", "numel"}, the
    spectral rule first.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for r in sorted(routes, key=lambda r: r.rule != "spectral"):
        row = rows.setdefault(
            (r.rule, r.reason), {"rule": r.rule, "reason": r.reason, **dict.fromkeys(_COUNTS, 0)}
        )
        row["tensors"] += 1
        row["matrices"] += r.num_matrices if r.rule == "spectral" else 0
        row["numel"] += math.prod(r.shape)
    return list(rows.values())


def spectral_share(table: Sequence[Mapping[str, Any]]) -> float:
    """The share of the trained parameters that go to the spectral rule."""
    spectral = sum(row["numel"] for row in table if row["rule"] == "spectral")
    return spectral / max(1, sum(row["numel"] for row in table))


def share_notices(optimizer: str, table: Sequence[Mapping[str, Any]]) -> list[str]:
    """A notice if `optimizer` updates less than half of the trained parameters; none for AdamW,
    which updates all.
    """
    share = spectral_share(table)
    if optimizer == "adamw" or share >= 0.5:
        return []
    most = max((row for row in table if row["rule"] == "adamw"), key=lambda row: row["numel"])
    return [
        f"{optimizer} updates only {share:.1%} of the trained parameters. AdamW updates the "
        "other parameters, with optimizer.aux_lr; most of them are of this kind: "
        f"{most['reason']}"
    ]


def _occurrences(model: nn.Module) -> dict[nn.Parameter, list[_Occurrence]]:
    """The occurrences of every trainable parameter; the first one gives its name."""
    # All names of a parameter: a tied head must be found under its embedding, whichever is first.
    modules = dict(model.named_modules(remove_duplicate=False))
    is_own = not _is_language_model(model)
    lists = set()  # of blocks: in a class of one's own also modules of one class in sequence
    for name, module in modules.items():
        children = list(module.children())
        # transformers' models have their blocks in a ModuleList, and use nn.Sequential for other
        # things.
        in_sequence = is_own and isinstance(module, nn.Sequential) and len(children) > 1
        are_alike = (
            in_sequence
            and len({*map(type, children)}) == 1
            and all([*child.children()] for child in children)
        )
        if are_alike or isinstance(module, nn.ModuleList):
            lists.add(name)
    routers = {name for name, module in modules.items() if _ROUTER.search(type(module).__name__)}
    occurrences = defaultdict(list)
    for path, owner in modules.items():
        parts = path.split(".")
        parents = [".".join(parts[:end]) for end in range(len(parts))]
        in_block = not lists.isdisjoint(parents)
        # Most routers are nn.Linear, without a class of their own: their place shows them.
        beside_experts = (
            parts[-1] in ("gate", "router") and ".".join([*parts[:-1], "experts"]) in modules
        )
        is_router = (isinstance(owner, nn.Linear) and beside_experts) or not routers.isdisjoint(
            [*parents, path]
        )
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.requires_grad:
                whole_name = f"{path}.{name}" if path else name
                around = modules[parents[-1]]
                occurrences[parameter].append(
                    _Occurrence(whole_name, owner, around, in_block, is_router)
                )
    return occurrences


def _obstacle(
    occurrences: Sequence[_Occurrence],
    shape: tuple[int, ...],
    aux: Sequence[str],
    needs_block: bool,
) -> str | None:
    """The reason why a parameter does not go to the spectral rule; None if it does."""
    if any(isinstance(o.owner, nn.Embedding) for o in occurrences):
        return "embedding"
    if glob := _glob_of(occurrences, aux):
        return f"named by aux {glob!r}"
    if len(shape) == 2 and any(o.is_router for o in occurrences):
        return "router"
    if len(shape) == 2 and all(o.name.endswith("bias") for o in occurrences):
        return "bias"  # of experts
    if None in [o.layout(len(shape)) for o in occurrences]:
        return (
            "not the weight of a linear layer" if len(shape) == 2 else f"{len(shape)}-dimensional"
        )
    if needs_block and not any(o.in_block for o in occurrences):
        return "outside the blocks"
    return None


def _glob_of(occurrences: Sequence[_Occurrence], aux: Sequence[str]) -> str | None:
    """The first glob of `aux` that matches one of a parameter's names."""
    return next((glob for glob in aux if any(fnmatchcase(o.name, glob) for o in occurrences)), None)


def _is_of_transformers(module: nn.Module, name: str) -> bool:
    """Whether it is an instance of this class, without importing transformers."""
    return any(
        c.__name__ == name and c.__module__.startswith("transformers.")
        for c in type(module).__mro__
    )
