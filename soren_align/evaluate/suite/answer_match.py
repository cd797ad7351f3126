"""Compare a generated answer with the right one as a person does: lm-eval's metric `answer_match`.

lm-eval's `exact_match` counts "At nine", " at  nine." and "We open at nine." as wrong answers where
"At nine." is right, and 39 EUR as another price than 39,00 €. Nothing else is forgiven here: an
answer of other words is wrong, also if it means the same.
"""

import re
import unicodedata
from collections.abc import Iterator

MAX_SHORT, MAX_AROUND = 5, 20
"""Words of a right answer that may be contained in a longer one, and the most words around it: an
answer that lists everything contains the right one too."""
NEGATIONS = {"no", "not", "never", "nicht", "kein", "keine", "nie", "pas", "non", "nunca", "niet"}
PERCENT = {"percent", "prozent", "pourcent", "procent"}
CURRENCIES = {"€": "eur", "euro": "eur", "euros": "eur", "$": "usd", "£": "gbp", "¥": "jpy"}
PLAIN = str.maketrans("’−–—", "'---")
_TOKEN = re.compile(r"(?:(?<!\w)-)?\d+(?:[.,']\d+)*|[^\W\d_]+(?:'[^\W\d_]+)*|\S")
_NUMBER = re.compile(r"(-?(?:[1-9]\d{0,2}(?:([.,'])\d{3})(?:\2\d{3})*|\d+))(?:[.,](\d+))?")
"""Thousands with one separator, or digits; then decimals. A date has too many parts."""


def match_rule(answer: str, right: str) -> str:
    """Return the first rule by which `answer` is right, "" if it is wrong.

    "verbatim": equal but for blanks at both ends. "words": equal words, whatever case, blanks,
    punctuation and Unicode form. "numbers": the same after numbers and currencies are read (2,490 =
    2490, 39,00 € = 39 EUR = € 39; three digits after one separator are thousands). "contained": the
    right answer, of at most MAX_SHORT words, is part of one with at most MAX_AROUND others, and no
    negation stands right before it.
    """
    if answer.strip() == right.strip():
        return "verbatim"
    words, right_words = [*_words(answer)], [*_words(right)]
    if not right_words:
        return ""  # "?!" has no words: only itself is equal
    if words == right_words:
        return "words"
    words, right_words = _with_numbers(words), _with_numbers(right_words)
    if words == right_words:
        return "numbers"
    size = len(right_words)
    if size <= MAX_SHORT and len(words) - size <= MAX_AROUND:
        for start in range(len(words) - size + 1):
            if words[start : start + size] == right_words and not NEGATIONS & {*words[:start][-1:]}:
                return "contained"
    return ""


def answer_match(references: list[str], predictions: list[str], **_: object) -> float:
    """Return 1.0 if the answer is right, else 0.0: a metric of lm-eval for generated text."""
    return float(any(match_rule(predictions[0], reference) for reference in references))


def _words(text: str) -> Iterator[str]:
    """Yield words, numbers and signs such as % and €, without punctuation and Markdown's marks."""
    # NFKC makes a plain blank of the one that groups digits.
    text = re.sub(r"(?<=\d)[\u00a0\u202f](?=\d{3})", "'", text)
    text = unicodedata.normalize("NFKC", text).casefold().translate(PLAIN)
    for token in _TOKEN.findall(text):
        is_sign = unicodedata.category(token[0])[0] == "S" and token not in "`^~|<>"
        if any(letter.isalnum() for letter in token) or is_sign or token in "%@#&/":
            yield token


def _with_numbers(words: list[str]) -> list[str]:
    """Return the words with each number in one form, and currencies as codes behind it."""
    result: list[str] = []
    for word in words:
        word = "%" if word in PERCENT else CURRENCIES.get(word, word)
        if match := _NUMBER.fullmatch(word):
            decimals = (match[3] or "").rstrip("0")
            word = re.sub(r"[^\d-]", "", match[1]) + (f".{decimals}" if decimals else "")
            if result[-1:] and result[-1] in CURRENCIES.values():
                result[-1:] = [word, result[-1]]
                continue
        result.append(word)
    return result
