"""answer_match: what counts as the same answer, and by which rule."""

from types import SimpleNamespace

import pytest
from soren_align.evaluate.report.tables import headline
from soren_align.evaluate.stats.scores import score_without_model
from soren_align.evaluate.suite.answer_match import answer_match, match_rule
from soren_align.evaluate.suite.suites import SuiteTask
from tests.support.result_tables import make_results


@pytest.mark.parametrize(("answer", "right", "rule"), [
    (" At nine.\n", "At nine.", "verbatim"),
    ("at  Nine", "At nine.", "words"),
    ("**GRÖSSE**", "größe", "words"),
    ("1. Empty it.\n\n2. Rinse twice!", "1. Empty it.\n2. Rinse twice.", "words"),
    ("9–17", "9-17", "words"),
    ("39 EUR", "39,00 €", "numbers"),
    ("It costs 2490 euros.", "It costs 2,490 €.", "numbers"),
    ("2.490,50 €", "€2,490.5", "numbers"),
    ("1\u00a0500 m", "1500 m", "numbers"),
    ("20 Prozent", "20 %", "numbers"),
    ("We open at nine.", "At nine.", "contained"),
    ("It weighs 9,8 kg in all.", "9.8kg", "contained"),
    # Each wrong in one way.
    ("1. Empty it.", "1. Empty it.\n2. Rinse twice.", ""),
    ("not at nine", "At nine.", ""),
    ("-5", "5", ""),
    ("1.5.2024", "15.2024", ""),
    ("Nine to five, " + "and so on, " * 9, "nine", ""),
    ("", "At nine.", ""),
])  # fmt: skip
def test_answers_are_compared_as_people_do(answer, right, rule):
    assert match_rule(answer, right) == rule
    assert answer_match(["something else", right], [answer]) == (rule != "")


PAIRS = [(["a long answer", "short"], 0)] * 9 + [(["short", "a long answer"], "short")]


@pytest.mark.parametrize(("kind", "metric", "samples", "expected"), [
    ("generate_until", "answer_match", ["good"] * 12 + ["bad"] * 8, ("always 'good'", 60)),
    ("generate_until", "answer_match", [f"answer {i}" for i in range(20)], None),
    ("multiple_choice", "acc_bytes", PAIRS, ("always the longest answer", 90)),
    ("multiple_choice", "acc_bytes", [*PAIRS[:5], *[(["short", "a long answer"], 0)] * 5], None),
    ("multiple_choice", "acc", [(["same", "size"], 0)] * 9, None),
])  # fmt: skip
def test_a_rule_that_reads_no_question_is_known_where_it_scores_well(kind, metric, samples, expected):
    task = SimpleNamespace(OUTPUT_TYPE=kind, task_name="t", config=SimpleNamespace(process_results=None))
    records = [{"filter": "none", "target": each} if isinstance(each, str) else
               {"filter": "none", "target": each[1], "arguments": [("prompt", choice) for choice in each[0]]}
               for each in samples]  # fmt: skip
    rule = score_without_model(SuiteTask(task="t", metric=metric), task, {"samples": {"t": records}})
    assert rule == (expected and {"rule": expected[0], "value": expected[1]})


def test_the_sentence_over_the_table_counts_and_names_what_it_cannot_show():
    results = make_results(2, 2, average=False)
    base, sft = results["rows"]
    for row, values in ((base, (0, 50)), (sft, (90, 60))):
        for column, value in zip(row["scores"], values, strict=True):
            row["scores"][column] = {"value": value, "n": 20}
    for difference, p in zip(sft["differences"].values(), (0.001, 0.7), strict=True):
        difference["p_holm"] = p
    first, second = base["scores"]
    sft["scores"][second]["without_model"] = {"rule": "always 'good'", "value": 65.0}
    assert headline(results) == (
        f"{sft['name']} is right on 18 of 20 {first} questions (before: 0) and 12 of 20 {second} questions"
        f" (before: 10, no clear change; always 'good', without a model: 13)."
    )
    sft["scores"][first]["value"] = 91.3  # no count
    assert headline(results) == headline(make_results(1, 1)) == ""
