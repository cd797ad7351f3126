"""Drop the examples with an answer of which the chat template prints nothing: training on them would teach silence.

Such an answer is tool calls alone, under a template without tool calls. The example is dropped, not only its answer:
what follows would be trained as an answer without the call and its result.
"""

from dataclasses import replace

from datasets import Dataset

from ..errors import UserError
from .split import LoadedSplit
from .tokens import EncodedExample
from .tool_calls import EMPTY_ANSWER

_REASON = "an answer is tool calls alone, which the chat template does not print"


def drop_reason_of(example: EncodedExample) -> str | None:
    """The reason to drop an example with such an answer; None for others."""
    return _REASON if EMPTY_ANSWER in example.left_out else None


def without_empty_answers(split: LoadedSplit, tokens: Dataset) -> tuple[LoadedSplit, Dataset]:
    """(the split, its tokens) without such examples, which are counted under `dropped`; unchanged if there are none.

    tokens: of `tokenize`, of the split's examples. Raises UserError if no example of a source is left.
    """
    rows = tokens["left_out"][:]
    indices = [i for i, kinds in enumerate(rows) if EMPTY_ANSWER not in kinds]
    if len(indices) == len(rows):
        return split, tokens
    sources = tuple(split.source_indices[i] for i in indices) if split.source_indices else ()
    if not indices or set(sources) != set(split.source_indices):
        lost = set(split.source_indices) - set(sources)
        name = split.source["sources"][min(lost)]["path"] if lost else split.name
        raise UserError(f"{name}: of each example {_REASON}; name a model.chat_template that does, or leave it out")
    dropped = {**split.dropped, _REASON: len(rows) - len(indices)}
    rest = replace(split, dataset=split.dataset.select(indices), dropped=dropped, source_indices=sources)
    return rest, tokens.select(indices)
