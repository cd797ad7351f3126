"""Measure retention: the KL divergence from the start, and the loss on retained examples.

Optimizers are compared at equal displacement, since one that hardly moves retains everything. At
the start and at every evaluation a few fixed tokens are scored; no random number is drawn and no
weight changes. The start's logits stay in the run folder until training ends, for resumed runs.
"""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import TrainerCallback

from ...core.errors import UserError
from ...core.files import append, digest, use_umask
from ...data import from_token_columns, has_turns, load_split, tokenize
from ...recipe import Recipe, trainer_value
from ...run.folder import RunFolder, metrics_line
from ...sharding.ranks import Ranks
from ..trained_optimizer import compact_copies
from .samples import evaluating

MAX_EXAMPLES = 64
"""Held-out examples, and retention examples, that are scored; of more, evenly spaced ones."""
MAX_TOKENS = 256
"""Answer tokens of a retention example that are scored; of more, evenly spaced ones."""
MAX_INPUTS, MAX_LOGITS = 4096, 512
"""Tokens, and positions with logits, of one forward pass over several examples: 0.3 GB of float32
logits with a vocabulary of 150,000."""
CHUNK = 32
"""Positions whose distributions are compared at a time: 20 MB each."""


@dataclass(frozen=True)
class Probe:
    """An example, and the positions of its tokens that are predicted from those before them."""

    ids: list[int]
    positions: list[int]


@dataclass(frozen=True)
class Probes:
    """The tokens to score, equal on all ranks. source: of the retention examples, for run.json."""

    held_out: tuple[Probe, ...] = ()
    retention: tuple[Probe, ...] = ()
    source: dict[str, Any] | None = None

    def digest(self) -> str:
        """A hash of the held-out tokens, in whose order the start's logits are stored."""
        return digest([[probe.ids, probe.positions] for probe in self.held_out])


def read_probes(recipe: Recipe, held_out: Any, tokenizer: Any) -> Probes | None:
    """Return the tokens that `run.kl_to_start` and `data.retention` ask for; None if the recipe has
    neither.

    held_out: dataset of tokens, or None. Raises UserError for retention examples that cannot be
    read.
    """
    if not recipe.run.kl_to_start and recipe.data.retention is None:
        return None
    max_length = trainer_value(recipe, "max_length")
    probes, retention, source = (), (), None
    if recipe.run.kl_to_start and held_out is not None:
        answers = _answers(held_out, recipe.data_task, max_length)
        probes = _spread(answers, recipe.run.kl_to_start)
    if recipe.data.retention is not None:
        split = load_split(recipe.data.retention, "sft")
        examples = _some(split.dataset)
        tokens = tokenize(examples, "sft", tokenizer, None, has_turns(split.dataset))
        answers = _answers(tokens, "sft", max_length)
        retention = _sorted(part for probe in answers for part in _spread([probe], MAX_TOKENS))
        source = split.source | {"num_scored": len(retention)}
        if not retention:
            raise UserError(
                f"data.retention: trainer.max_length {max_length} cuts every example of "
                f"{split.name} before its answer; write a larger trainer.max_length, or use "
                "examples with shorter prompts"
            )
    return Probes(probes, retention, source)


def evenly(number: int, most: int) -> list[int]:
    """Return the indices 0 to number - 1; if these are more than `most`, so many evenly spaced
    ones.
    """
    if number <= most:
        return list(range(number))
    return [(2 * i + 1) * number // (2 * most) for i in range(most)]


def _some(dataset: Any) -> Any:
    return dataset.select(evenly(len(dataset), MAX_EXAMPLES))


def _answers(dataset: Any, task: Any, max_length: int | None) -> list[Probe]:
    """Return some examples with all positions of their answers; of a pair, those of the chosen
    one.
    """
    probes = []
    for example in from_token_columns(_some(dataset)[:], task):
        side = example.sides[0].truncated(max_length)
        # The first token is predicted from nothing.
        positions = [i for i, is_trained in enumerate(side.trained) if is_trained and i]
        probes.append(Probe(side.ids, positions))
    return probes


def _spread(probes: Sequence[Probe], most: int) -> tuple[Probe, ...]:
    """Return the probes with at most so many positions in all, evenly spaced; those without any are
    left out.
    """
    places = [(i, position) for i, probe in enumerate(probes) for position in probe.positions]
    by_probe: dict[int, list[int]] = {}
    for i, position in (places[j] for j in evenly(len(places), most)):
        by_probe.setdefault(i, []).append(position)
    return _sorted(
        Probe(probes[i].ids[: positions[-1] + 1], positions) for i, positions in by_probe.items()
    )


def _sorted(probes: Iterable[Probe]) -> tuple[Probe, ...]:
    """Return the probes by length, so that those of one forward pass need little padding."""
    return tuple(sorted(probes, key=lambda probe: len(probe.ids)))


class Retention(TrainerCallback):
    """Scores `probes`: `values` are merged into each evaluation's log.
    Collective: all ranks score the same tokens.

    The start's logits stand in `folder.start_logits` and on the first rank's CPU, in float32 or,
    where that is exact, bfloat16: 154 or 77 MB for 256 tokens of a vocabulary of 150,000.
    trainer: an instance of SorenTrainerMixin.
    """

    def __init__(self, trainer: Any, probes: Probes, folder: RunFolder, ranks: Ranks):
        self.trainer, self.probes, self.folder, self.ranks = trainer, probes, folder, ranks
        self._start: Tensor | None = None  # on the first rank

    def on_train_begin(self, args, state, control, **kwargs):
        """Score the start; a resumed run reads its logits."""
        if state.global_step:
            if self.probes.held_out and self.ranks.is_first:
                self._start = self._read_start()
            return
        file = self.folder.start_logits
        if self.probes.held_out:
            # All ranks score, because a sharded model's forward pass needs each of them.
            with evaluating(self.trainer.forward_model):
                logits = [part.cpu() for part in self._scores(self.probes.held_out)]
            if self.ranks.is_first:
                (self._start,) = compact_copies([torch.cat(logits)])
                save_file({"logits": self._start}, file, {"probes": self.probes.digest()})
                use_umask(file)
        # Without an evaluation at the start no log would have the start's values, to which all
        # later ones are compared.
        if not args.eval_on_start:
            line = {"step": 0, **self.values()}
            # From the history a resumed run restores damaged lines of the file.
            state.log_history.append(line)
            if self.ranks.is_first:
                append(self.folder.metrics, metrics_line(line))

    def _read_start(self) -> Tensor:
        file, remedy = (
            self.folder.start_logits,
            "restore the file, or resume with --set run.kl_to_start=0",
        )
        try:
            with safe_open(file, "pt") as stored:
                metadata, logits = stored.metadata(), stored.get_tensor("logits")
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{file}: the logits of the starting checkpoint cannot be read ({error}); {remedy}"
            ) from None
        if metadata["probes"] != self.probes.digest():  # such as of another number of tokens
            raise UserError(f"{file}: has the logits of other held-out tokens; {remedy}")
        return logits

    def values(self) -> dict[str, float]:
        """Return {"kl_to_start", "retention_loss"} in nats per token, those that the recipe asks
        for. Collective.
        """
        held_out, retention = self.probes.held_out, self.probes.retention
        divergence, loss, first = [], [], 0
        # The other ranks take part in the forward passes; only the first one has the start.
        with evaluating(self.trainer.forward_model):
            for logits in self._scores(held_out):
                if self._start is not None:
                    divergence.append(sum_of_kl(self._start[first : first + len(logits)], logits))
                    first += len(logits)
            for probe, logits in zip(retention, self._scores(retention), strict=True):
                targets = torch.tensor([probe.ids[i] for i in probe.positions])
                loss.append(
                    torch.nn.functional.cross_entropy(
                        logits, targets.to(logits.device), reduction="sum"
                    )
                )
        return _means("kl_to_start", divergence, held_out) | _means(
            "retention_loss", loss, retention
        )

    def _scores(self, probes: Sequence[Probe]) -> Iterator[Tensor]:
        """Yield each probe's logits at the positions before `probe.positions`: [positions,
        vocabulary], float32.
        """
        model, device = self.trainer.forward_model, self.trainer.args.device
        # Through the wrapper, which gathers sharded weights, but asked at the model's own forward.
        inner = getattr(model, "module", model)  # within DeepSpeed's wrapper
        base: Any = inner.get_base_model() if isinstance(inner, PeftModel) else inner
        # Not every architecture takes logits_to_keep.
        keeps = "logits_to_keep" in inspect.signature(type(base).forward).parameters
        for group in _groups(probes):
            # Logits at the scored positions alone: all of them would be 600 kB a token with a
            # vocabulary of 150,000.
            columns = sorted({position - 1 for probe in group for position in probe.positions})
            length = max(len(probe.ids) for probe in group) - 1
            ids = torch.zeros(len(group), length, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            # Padded on the right, where a causal model does not look.
            for row, probe in enumerate(group):
                own = len(probe.ids) - 1
                ids[row, :own], mask[row, :own] = torch.tensor(probe.ids[:-1]), 1
            options = {"logits_to_keep": torch.tensor(columns, device=device)} if keeps else {}
            output = model(
                input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False, **options
            )
            logits = output.logits if keeps else output.logits[:, columns]
            for row, probe in enumerate(group):
                # The logits before a token predict it.
                own = [columns.index(position - 1) for position in probe.positions]
                yield logits[row, own].float()


def _means(name: str, sums: list[Tensor], probes: Sequence[Probe]) -> dict[str, float]:
    """Return {name: mean over the probes' positions}, {} without any."""
    if not sums:
        return {}
    num_tokens = sum(len(probe.positions) for probe in probes)
    return {name: float(torch.stack(sums).sum()) / num_tokens}


def _groups(probes: Sequence[Probe]) -> Iterator[list[Probe]]:
    """Yield consecutive probes that fit into one forward pass; a longer one is alone."""
    group: list[Probe] = []
    columns: set[int] = set()
    for probe in probes:
        both = columns.union(probe.positions)
        rows, length = len(group) + 1, max(len(each.ids) for each in (*group, probe))
        if group and (rows * length > MAX_INPUTS or rows * len(both) > MAX_LOGITS):
            yield group
            group, both = [], {*probe.positions}
        group, columns = [*group, probe], both
    if group:
        yield group


def sum_of_kl(start: Tensor, now: Tensor) -> Tensor:
    """Return the sum over rows of KL(softmax(start) || softmax(now)), logits [n, vocabulary]; on
    `now`'s device.
    """
    total = torch.zeros((), device=now.device)
    for before, after in zip(start.split(CHUNK), now.split(CHUNK), strict=True):
        p, q = before.to(now.device).float().log_softmax(-1), after.log_softmax(-1)
        terms = p.exp() * (p - q)
        total += torch.where(p.isneginf(), 0.0, terms).sum()  # tokens that a model excludes
    return total
