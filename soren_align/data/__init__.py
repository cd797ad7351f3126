"""Data: files and hub datasets, validated and converted to TRL's columns, and statistics of their
tokens.
"""

from .arrow import (
    dataset_of,
    filled,
    filtered,
    has_turns,
    iterable_dataset,
    token_lengths,
    with_other_answers,
)
from .cache import uncached, verified_values
from .encode import BATCH_SIZE, encode, has_marks, text_ids
from .formats import PLAIN_LABELLED, PLAIN_PAIRS
from .masks import (
    FIRST,
    TRAINED,
    LossMasks,
    Tokens,
    answered,
    from_token_columns,
    last_visible,
    token_columns,
)
from .pairs import auc, auc_error
from .rendering import TEMPLATE_REMEDY, template_errors
from .split import LoadedSplit, hold_out, load_split, mix, shuffled
from .stats import DatasetStats, dataset_stats, show_example
from .stream import Preview, State, Stream, open_split, open_stream
from .tokenizer import check_template, set_template, texts_of, trained_tokenizer, within_vocabulary
from .tokens import tokenize, without_empty_answers
from .turns import CUT_ANSWER, EMPTY_ANSWER
