"""The n-gram baselines of research/studies/ngrams.py, against the definition with dictionaries in float64."""

import math
from collections import Counter

import numpy as np
import pytest
from research.studies import ngrams

pytestmark = pytest.mark.rest
VOCAB_SIZE = 7
TOKENS = np.random.default_rng(0).choice(VOCAB_SIZE - 1, 400, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01])  # the last: never


def reference(words, order):
    """{n: (counts, discounts)} of interpolated modified Kneser-Ney, by Chen and Goodman's definition."""
    levels = {}
    grams = Counter(tuple(words[i : i + order]) for i in range(len(words) - order + 1))
    for n in range(order, 0, -1):
        n1, n2, n3, n4 = (sum(count == k for count in grams.values()) for k in (1, 2, 3, 4))
        y = n1 / max(1, n1 + 2 * n2)
        raw = [1 - 2 * y * n2 / max(1, n1), 2 - 3 * y * n3 / max(1, n2), 3 - 4 * y * n4 / max(1, n3)]
        levels[n] = (grams, [0.0] + [min(max(d, 0.0), k) for k, d in enumerate(raw, start=1)])
        grams = Counter(gram[1:] for gram in grams)  # the number of different words before
    return levels


def probability(levels, context, word, n):
    if n == 0:
        return 1 / VOCAB_SIZE
    grams, discounts = levels[n]
    context = context[len(context) - n + 1 :] if n > 1 else ()
    after = {gram[-1]: count for gram, count in grams.items() if gram[:-1] == context}
    shorter = probability(levels, context[1:], word, n - 1)
    if not after:
        return shorter
    total, left = sum(after.values()), sum(discounts[min(count, 3)] for count in after.values())
    count = after.get(word, 0)
    return (count - discounts[min(count, 3)] + left * shorter) / total


@pytest.mark.parametrize("order", [1, 2, 3])
def test_kneser_ney_is_the_definition_and_sums_to_one(order):
    words = TOKENS.tolist()
    levels, model = reference(words, order), ngrams.KneserNey(TOKENS, VOCAB_SIZE, order)
    for context in ((0, 0), (1, 4), (5, 5), (6, 0), (3, 6)):  # some that do not occur
        probs = [math.exp(model.score(np.array([*context, word]))[2]) for word in range(VOCAB_SIZE)]
        assert sum(probs) == pytest.approx(1, abs=1e-12)
        assert probs == pytest.approx([probability(levels, context, word, order) for word in range(VOCAB_SIZE)])
