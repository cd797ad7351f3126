"""Baselines of a pre-training recipe: n-gram models on the validation tokens that its evaluation
predicts.

    python -m research.studies.ngrams quickstart/stdlib [--set KEY=VALUE]

Unigram with add-one counts; bigram and trigram with interpolated modified Kneser-Ney (Chen and
Goodman 1998, Section 3): three discounts per order from the counts of counts, no held-out text.
tests/research/test_ngrams.py has the definition.
"""

import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np

MAX_VOCABULARY = 2**21
"""Three tokens are one 64-bit key."""


class Unigram:
    """P(w) = (c(w) + 1) / (N + V)."""

    def __init__(self, tokens: np.ndarray, vocab_size: int):
        counts = np.bincount(tokens, minlength=vocab_size) + 1.0
        self.log_probs = np.log(counts / counts.sum())

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token, in nats."""
        return self.log_probs[tokens]


class KneserNey:
    """P(w | h) = max(c(h w) - D, 0) / c(h) + gamma(h) P(w | h without its first token), down to 1 /
    V.

    c are counts in the highest order, and numbers of different tokens before an n-gram in the lower
    ones. A context that does not occur has the distribution of the shorter one.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int):
        """tokens: of all documents, in a row."""
        assert vocab_size <= MAX_VOCABULARY
        self.vocab_size, self.order = vocab_size, order
        grams, counts = np.unique(_keys(tokens, order, vocab_size)[order - 1 :], return_counts=True)
        self.levels = []
        for length in range(order, 0, -1):
            self.levels.append(_Level(grams, counts, vocab_size))
            # Each n-gram counts once for the shorter one that it ends in.
            grams, counts = np.unique(grams % vocab_size ** (length - 1), return_counts=True)
        self.levels.reverse()

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """Return the log-probability of each token after those before it, in nats; of the first
        ones after fewer.
        """
        probs = np.full(len(tokens), 1 / self.vocab_size)
        for length, level in enumerate(self.levels, start=1):
            keys = _keys(tokens, length, self.vocab_size)
            probs[length - 1 :] = level.interpolated(keys[length - 1 :], probs[length - 1 :])
        return np.log(probs)


class _Level:
    """The n-grams of one order."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, vocab_size: int):
        """grams: sorted keys of different n-grams."""
        self.grams, self.vocab_size = grams, vocab_size
        n1, n2, n3, n4 = (np.count_nonzero(counts == k) for k in (1, 2, 3, 4))
        y = n1 / max(1, n1 + 2 * n2)
        above = [
            k - (k + 1) * y * more / max(1, less)
            for k, less, more in ((1, n1, n2), (2, n2, n3), (3, n3, n4))
        ]
        discounts = np.array([0.0, *above]).clip(0, [0, 1, 2, 3])[np.minimum(counts, 3)]
        self.discounted = counts - discounts
        self.contexts, index = np.unique(grams // vocab_size, return_inverse=True)
        self.totals = np.bincount(index, counts)
        self.left = np.bincount(index, discounts)

    def interpolated(self, keys: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Return the probabilities of n-grams by their keys. shorter: those of the lower order."""
        counts, _ = _at(self.grams, self.discounted, keys)
        totals, is_known = _at(self.contexts, self.totals, keys // self.vocab_size)
        left, _ = _at(self.contexts, self.left, keys // self.vocab_size)
        return np.where(
            is_known, (counts + left * shorter) / np.where(is_known, totals, 1), shorter
        )


def _keys(tokens: np.ndarray, length: int, vocab_size: int) -> np.ndarray:
    """Return the key of the n-gram that ends at each token; the first length - 1 are of shorter
    ones.
    """
    tokens = tokens.astype(np.int64)
    keys = np.zeros_like(tokens)
    for back in range(min(length, len(tokens))):
        keys[back:] += tokens[: len(tokens) - back] * vocab_size**back
    return keys


def _at(names: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (the values of the wanted names, 0 where there is none; where there is one).
    names: sorted.
    """
    places = np.searchsorted(names, wanted).clip(max=len(names) - 1)
    is_known = names[places] == wanted
    return np.where(is_known, values[places], 0.0), is_known


def predicted(lengths: Sequence[int], max_length: int | None, is_wrapped: bool) -> np.ndarray:
    """Return the positions, in the concatenation, of the tokens that an evaluation predicts.

    All but the first of a sequence: of each example up to max_length, or, wrapped, of each
    max_length tokens.
    """
    total = sum(lengths)
    if is_wrapped:
        return np.flatnonzero(np.arange(total) % max_length)
    within = np.concatenate([np.arange(length) for length in lengths])
    return np.flatnonzero((within > 0) & (within < (max_length or total)))


def flat(tokens: Any) -> np.ndarray:
    """Return the tokens of all examples in a row. tokens: a dataset with `input_ids`."""
    return np.concatenate([np.asarray(ids, dtype=np.int64) for ids in tokens["input_ids"]])


def perplexities(
    train: np.ndarray, test: np.ndarray, positions: np.ndarray, vocab_size: int
) -> dict[str, float]:
    """Return the perplexity of each baseline, trained on `train`, over the positions of `test`."""
    models = {
        "unigram": Unigram(train, vocab_size),
        "bigram": KneserNey(train, vocab_size, 2),
        "trigram": KneserNey(train, vocab_size, 3),
        "4-gram": KneserNey(train, vocab_size, 4) if vocab_size**4 < 2**63 else None,
    }
    return {
        name: float(np.exp(-model.score(test)[positions].mean()))
        for name, model in models.items()
        if model
    }


def main(name: str, *overrides: str) -> None:
    """Print the baselines of a recipe."""
    from soren_align import recipe
    from soren_align.planning.inputs import on_this_machine
    from soren_align.run.folder import RunFolder
    from soren_align.training.setup import set_up_training

    loaded = on_this_machine(recipe.load(name, overrides))
    with tempfile.TemporaryDirectory() as folder:
        setup = set_up_training(loaded, RunFolder(folder))
        train, test = flat(setup.tokens.train), flat(setup.tokens.eval)
        lengths = [len(ids) for ids in setup.tokens.eval["input_ids"]]
    settings, vocab_size = loaded.trainer, len(setup.tokenizer)
    positions = predicted(
        lengths, settings.get("max_length"), settings.get("packing_strategy") == "wrapped"
    )
    print(
        f"{len(train):,} training tokens, {len(test):,} validation tokens, {len(positions):,} of them predicted"
    )
    print("\n| baseline | validation perplexity |\n|---|---|")
    for baseline, value in perplexities(train, test, positions, vocab_size).items():
        print(f"| {baseline} | {value:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1], *(argument for argument in sys.argv[2:] if argument != "--set"))
