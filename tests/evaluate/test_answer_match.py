"""answer_match: what counts as the same answer, and by which rule."""

import pytest
from soren_align.evaluate.suite.answer_match import answer_match, match_rule


@pytest.mark.parametrize(("answer", "right", "rule"), [
    (" At nine.\n", "At nine.", "verbatim"),
    ("at  Nine", "At nine.", "words"),
    ("**GRÖSSE**", "größe", "words"),
    ("1. Empty it.\n\n2. Rinse twice!", "1. Empty it.\n2. Rinse twice.", "words"),
    ("9–17", "9-17", "words"),
    ("−5 °C", "-5°C", "words"),
    ("39 EUR", "39,00 €", "numbers"),
    ("It costs 2490 euros.", "It costs 2,490 €.", "numbers"),
    ("2.490,50 €", "€2,490.5", "numbers"),
    ("1\u00a0500 m", "1500 m", "numbers"),
    ("We open at nine.", "At nine.", "contained"),
    ("It weighs 9,8 kg in all.", "9.8kg", "contained"),
    # Each wrong in one way.
    ("1. Empty it.", "1. Empty it.\n2. Rinse twice.", ""),
    ("not at nine", "At nine.", ""),
    ("-5", "5", ""),
    ("1.5.2024", "15.2024", ""),
    ("Nine to five, " + "and so on, " * 9, "nine", ""),
    ("the shop opens at nine, and closes at six", "the shop opens at nine in May", ""),
    ("?", "?!", ""),
    ("", "At nine.", ""),
])  # fmt: skip
def test_answers_are_compared_as_people_do(answer, right, rule):
    assert match_rule(answer, right) == rule
    assert answer_match(["something else", right], [answer]) == (rule != "")
