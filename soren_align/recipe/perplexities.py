"""Published perplexities, such as eval/paper/pretraining.yaml: shown after a pre-training, and
never compared.
"""

from typing import Annotated

from pydantic import Field

from ..core import shipped
from ..core.document import Section, parse
from ..core.errors import MissingError, did_you_mean
from ..core.files import read_text, resolve_path


class PublishedModel(Section):
    """The runs of one model."""

    perplexities: Annotated[
        dict[str, Annotated[float, Field(gt=1, allow_inf_nan=False)]], Field(min_length=1)
    ]
    """The perplexities by optimizer."""
    num_batches: Annotated[int, Field(ge=1)] | None = None
    """N of a validation loop that divides the sum of N losses by N + 1. null: unknown, or the loop
    is right."""

    def corrected(self) -> dict[str, float]:
        """The perplexities of the sum divided by N; empty if N is unknown."""
        # A perplexity is exp of the mean loss: the sum of N losses over N + 1 instead of N is the
        # (N + 1)/N-th root of it (notes/log.md, "the C4 recipes").
        n = self.num_batches
        return (
            {name: value ** ((n + 1) / n) for name, value in self.perplexities.items()} if n else {}
        )


class PublishedPerplexities(Section):
    """One published table."""

    source: str
    """Authors and publication."""
    data: str
    """The documents of the perplexities."""
    models: Annotated[dict[str, PublishedModel], Field(min_length=1)]
    """The models by name."""


def load_perplexities(name_or_path: str) -> PublishedPerplexities:
    """Read a shipped table ('paper/pretraining') or a YAML file of the same format.
    Raises UserError with all errors.
    """
    known = shipped.perplexities()
    path = known.get(name_or_path) or resolve_path(name_or_path)
    if not path.is_file():
        hint = did_you_mean(name_or_path, known, f"write {', '.join(known)}, or the path of a file")
        raise MissingError(f"there is no table of published perplexities {name_or_path!r}{hint}")
    remedy = f"is no mapping; write the keys {', '.join(PublishedPerplexities.model_fields)}"
    return parse(read_text(path), str(path), remedy).validated(PublishedPerplexities)


def describe_published(table: PublishedPerplexities, model: str) -> list[str]:
    """Return the lines of a model: the perplexities, those corrected for the loop's division, and
    the source.
    """
    runs = table.models[model]
    parts = {f"published for {model} on {table.data}, not compared": runs.perplexities}
    if n := runs.num_batches:
        parts[f"corrected, if their loop divided {n} losses by {n + 1}"] = runs.corrected()
    lines = [
        f"{head}: {', '.join(f'{name} {value:.2f}' for name, value in of.items())}"
        for head, of in parts.items()
    ]
    return [*lines, table.source]
