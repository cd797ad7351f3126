"""`stats --gate`: ten pairs of models with known answers, exit codes, JUnit, and broken policies."""

import json
from xml.etree import ElementTree

import pytest
from tests.support import command


def write_models(folder, num, lost, gained=0):
    """CSV files of a reference that is right on the first half of `num` questions, and of a model that answers `lost`
    of these wrong and `gained` others right."""
    half = num // 2
    for name, right in (("old", set(range(half))), ("new", {*range(lost, half), *range(half, half + gained)})):
        lines = "\n".join(f"{i},{int(i in right)}" for i in range(num))
        (folder / f"{name}.csv").write_text(f"id,score\n{lines}\n")


def gate(folder, policy, *options, code):
    (folder / "policy.yaml").write_text(policy)
    models = ("old=old.csv", "new=new.csv")
    return command.run("stats", *models, "--gate", "policy.yaml", *options, cwd=folder, code=code)


@pytest.mark.parametrize(("num", "lost", "gained", "margin", "outcome"), [
    (1000, 0, 0, 1, "passed"), (1000, 0, 50, 0, "passed"), (1000, 5, 5, 2, "passed"), (4000, 40, 0, 2, "passed"),
    (1000, 100, 0, 2, "FAILED: loses more than the margin"), (1000, 100, 0, 15, "passed"),
    (1000, 20, 0, 2, "FAILED: is not shown to lose less than the margin"),
    (100, 1, 0, 2, "FAILED: is not shown to lose less than the margin"),  # too small for two points
    (1000, 0, 0, 0, "FAILED: is not shown to lose less than the margin"),  # no number of equal answers shows exactly 0
    (10, 0, 0, 5, "FAILED: too few questions to show anything"),
])  # fmt: skip
def test_a_model_passes_if_it_is_shown_to_lose_less_than_the_margin(tmp_path, num, lost, gained, margin, outcome):
    write_models(tmp_path, num, lost, gained)
    done = gate(tmp_path, f"margins: {{score: {margin}.0}}", "--junit", "out.xml", code=int(outcome != "passed"))
    assert f"gate new, score: {outcome} (" in " ".join(done.stdout.split())
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", str(int(outcome != "passed")))
    assert len(suite.findall("testcase/failure")) == int(outcome != "passed")
    content = json.loads(gate(tmp_path, f"margins: {{score: {margin}}}", "--json", code=done.returncode).stdout)
    assert [bool(check["failure"]) for check in content["gate"]] == [outcome != "passed"]


@pytest.mark.parametrize(("policy", "message"), [
    ("margins: {}", "policy.yaml: margins: dictionary should have at least 1 item"),
    ("[1]", "policy.yaml: the file: input should be a valid dictionary"),
    ("margins: {score: much}", "policy.yaml: margins.score: input should be a valid number"),
    ("margins: {score: -1.0}", "policy.yaml: margins.score: found -1.0; write points from 0 to 100"),
    ("margins: {scor: 1.0}", "--gate: margins.scor: the table has no such column; did you mean 'score'?"),
    ("margins: {score: 1.0}\nalpha: 3", "policy.yaml: alpha: extra inputs are not permitted"),
    ("margins: [", "policy.yaml:"),
])  # fmt: skip
def test_a_broken_policy_is_one_sentence(tmp_path, policy, message):
    write_models(tmp_path, 40, 0)
    done = gate(tmp_path, policy, code=2)
    assert done.stderr.startswith("error: ")
    assert message in " ".join(done.stderr.split())


def test_a_gate_compares_and_junit_needs_it(tmp_path):
    write_models(tmp_path, 40, 0)
    (tmp_path / "policy.yaml").write_text("margins: {score: 1.0}")
    alone = command.run("stats", "old.csv", "--gate", "policy.yaml", cwd=tmp_path, code=2)
    assert "--gate: compares models with the first one" in alone.stderr
    unused = command.run("stats", "old.csv", "new.csv", "--junit", "out.xml", cwd=tmp_path, code=2)
    assert "--junit: has no effect without --gate" in " ".join(unused.stderr.split())
