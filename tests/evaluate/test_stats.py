"""`soren-align stats`: the results of other tools, by our own tests; broken files get one sentence."""

import csv
import json
import random
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.answers.comparison import align, read_models
from soren_align.evaluate.answers.files import Columns
from soren_align.evaluate.stats.intervals import average, score_points
from soren_align.evaluate.stats.paired import ModelAnswers, Paired, points_json
from soren_align.evaluate.stats.power import detectable_by, part_of
from soren_align.evaluate.stats.significance import compare
from tests.support import command

N = 60
RIGHT = {"a": [i % 3 > 0 for i in range(N)], "b": [i % 4 > 0 or i < 20 for i in range(N)]}
"""The answers of two models, which every format below holds."""


# Writers of the formats: a function from a folder and the answers to the path of a model's results.


def lm_eval(folder, right, task="arc", name="samples_{}_2026-11-20T10-11-12.123456.jsonl", **changes):
    """As lm-eval 0.4.13 writes them, with a second metric, and a second filter that gets nothing right."""
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / name.format(task)).open("w") as stream:
        for filter_name in ("strict-match", "flexible-extract"):
            for i, is_right in enumerate(right):
                points = {"acc": 0.0, "acc_norm": float(is_right and filter_name == "strict-match")}
                hashes = {f"{kind}_hash": f"{kind}{i}" for kind in ("doc", "prompt", "target")} | changes
                sample = {"doc_id": i, "doc": {"passage": f"p{i // 5}"}, "target": "x", "arguments": {}, "resps": []}
                sample |= {"filtered_resps": [], "filter": filter_name, "metrics": [*points], **hashes, **points}
                stream.write(json.dumps(sample) + "\n")
    return folder


def records(kind):
    def write(folder, right):
        folder.mkdir(exist_ok=True, parents=True)
        rows = [{"id": f"q{i}", "task": "arc", "score": int(r)} for i, r in enumerate(right)]
        file = folder / f"{folder.name}.{kind}"
        if kind == "jsonl":
            file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
        elif kind == "json":
            file.write_text(json.dumps(rows, indent=1))
        elif kind == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        else:
            with file.open("w", newline="", encoding="utf-8-sig") as stream:
                writer = csv.writer(stream, delimiter="\t" if kind == "tsv" else ",")
                writer.writerow(["question_id", "note", "is_correct", "task"])
                writer.writerows([f"q{i}", "two\nlines, quoted", bool(r), "arc"] for i, r in enumerate(right))
        return file

    return write


FORMATS = {"lm-eval": lm_eval}
FORMATS |= {kind: records(kind) for kind in ("jsonl", "json", "csv", "tsv", "parquet")}


def run(*arguments, code=0):
    return command.run("stats", *arguments, code=code)


def comparisons(*arguments):
    return json.loads(run(*arguments, "--json").stdout)["comparisons"]


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_all_formats_of_the_same_answers_give_the_same_comparison(write, tmp_path):
    paths = [write(tmp_path / name, right) for name, right in RIGHT.items()]
    (d,) = comparisons(f"a={paths[0]}", f"b={paths[1]}")
    a, b = (np.array(right, float) for right in RIGHT.values())
    expected = compare([("a", ModelAnswers({}, {"x": a})), ("b", ModelAnswers({}, {"x": b}))], False)[1]["x"]
    assert (d["model"], d["task"], d["n"]) == ("b", "arc", N)
    assert (d["reference_score"], d["score"]) == (100 * a.mean(), 100 * b.mean())
    keys = ("low", "high", "p", "p_holm")
    assert {key: d[key] for key in keys} == {key: expected[key] for key in keys}
    assert d["difference"] == expected["value"]
    part = part_of(Paired(b - a), smooth=True)
    assert d["detectable"] == 100 * detectable_by(part)
    # One cluster has nearly all questions: below one degree of freedom scipy's search never ended.
    assert detectable_by(replace(part, degrees=0.1)) > 1


def test_the_metric_is_that_of_our_suites_unless_an_option_names_one(tmp_path):
    a, b = (lm_eval(tmp_path / name, right) for name, right in RIGHT.items())
    assert "arc acc_norm" in run(a, b).stdout
    assert comparisons(a, b, "--metric", "exact_match", "--metric", "acc")[0]["metric"] == "acc"
    assert comparisons(a, b, "--metric", "acc_norm,flexible-extract")[0]["difference"] == 0
    assert comparisons(a, b, "--metric", "acc_norm,strict-match")[0]["difference"] != 0
    assert comparisons(a, b, "--score", "acc")[0]["metric"] == "acc"


def test_the_results_equal_our_own_table_to_the_last_digit(tmp_path):
    rng = np.random.default_rng(0)
    evaluated = []
    for name in ("base", "SFT", "DPO"):
        points = {"facts": (rng.random(90) < 0.6) * 1.0, "mc2": rng.random(50), "law": (rng.random(80) < 0.5) * 1.0}
        points = {column: each.tolist() for column, each in points.items()}
        hashes = {column: [("q", name if column == "law" and name == "DPO" else "p")] for column in points}
        clusters = {"law": [f"text {i // 4}" for i in range(80)]}
        evaluated.append((name, ModelAnswers({}, points, clusters=clusters, prompt_hashes=hashes)))
    rows = []
    for (name, model), differences in zip(evaluated, compare(evaluated, average=True), strict=True):
        scores = {c: score_points([p], model.clusters.get(c)) for c, p in model.points.items()}
        scores["average"] = average([*scores.values()])
        rows.append({"name": name, "model": None, "scores": scores, "differences": differences})
    rows[2]["unpaired"] = {"law": "its prompts differ", "average": "not all columns are compared"}
    head = {"format": 1, "title": "t", "suite": "s", "published": [], "settings": {}, "notes": []}
    (tmp_path / "results.json").write_text(json.dumps(head | {"rows": rows}))
    (tmp_path / "points.json").write_text(points_json(dict(evaluated)))
    printed = json.loads(run(tmp_path, "--json").stdout)
    found = {row["name"]: {} for row in rows[1:]}
    for d in printed["comparisons"]:
        found[d["model"]][d["task"]] = {"value": d["difference"]} | {k: d[k] for k in ("low", "high", "p", "p_holm")}
    keys, extra = ("value", "low", "high", "p", "p_holm"), ("chance", "without_model")
    assert found == {row["name"]: {c: {k: d[k] for k in keys} for c, d in row["differences"].items()}
                     for row in rows[1:]}  # fmt: skip
    assert printed["scores"] == {row["name"]: {c: {k: v for k, v in score.items() if k not in extra}
                                               for c, score in row["scores"].items()} for row in rows}  # fmt: skip
    assert [*printed["not_compared"]] == ["DPO"]
    assert run(tmp_path, tmp_path, "--json").stdout == json.dumps(printed, indent=2) + "\n"  # the same rows, once


def own_evaluation(folder, **rows):
    """Write results.json and points.json of rows with these points on one benchmark of 60 questions."""
    hashes = {"facts": [("q", "p")]}
    evaluated = [(name, ModelAnswers({}, {"facts": [float(i < right) for i in range(60)]}, prompt_hashes=hashes))
                 for name, right in rows.items()]  # fmt: skip
    table = [{"name": name, "model": None, "scores": {"facts": score_points([model.points["facts"]], None)},
              "differences": d}
             for (name, model), d in zip(evaluated, compare(evaluated, average=False), strict=True)]  # fmt: skip
    head = {"format": 1, "title": "t", "suite": "s", "published": [], "settings": {}, "notes": []}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(head | {"rows": table}))
    (folder / "points.json").write_text(points_json(dict(evaluated)))


def test_a_run_is_its_only_evaluation_and_its_name_is_that_of_its_own_model(tmp_path):
    for name, right in (("a", 20), ("b", 50)):
        own_evaluation(tmp_path / name / "eval/zoo", base=10, SFT=right)
        (tmp_path / name / "run.json").write_text("{}")
        (tmp_path / name / "checkpoints").mkdir()
        (tmp_path / name / "checkpoints/state.json").write_text("{}")
    a, b = tmp_path / "a", tmp_path / "b"
    assert [d["model"] for d in comparisons(f"adamw={a}", f"soren={b}")] == ["adamw", "soren"]
    (_, d) = comparisons(f"adamw={a}", f"soren={b}", "--reference", "adamw")
    assert (d["model"], d["difference"]) == ("soren", pytest.approx(50))
    assert "two models have the name SFT; write NAME=" in run(a, b, code=2).stderr
    for option in (["--metric", "acc"], ["--cluster", "x"]):
        assert "which has one metric per task; remove --metric" in run(f"x={a}", f"y={b}", *option, code=2).stderr
    own_evaluation(a / "eval/other", base=10, SFT=20)
    assert "was evaluated with 2 suites (other and zoo); name one: " in run(a, code=2).stderr
    shutil.rmtree(b / "eval")
    assert f"this run has no evaluation; run soren-align eval {b} first" in run(b, code=2).stderr


def table(tmp_path, name, lines, head="id,score"):
    (tmp_path / f"{name}.csv").write_text("\n".join([head, *lines]) + "\n")
    return tmp_path / f"{name}.csv"


def test_different_questions_are_refused_or_left_out(tmp_path):
    a = table(tmp_path, "a", [f"q{i},{i % 2}" for i in range(40)])
    b = table(tmp_path, "b", [f"q{i},1" for i in range(39, 4, -1)])
    problem = run(a, b, code=2).stderr
    assert "5 questions differ between a (40 questions) and b (35), first q0 (only a has it); add --common" in problem
    result = run(a, b, "--common").stdout
    assert "compared on the 35 questions that all have; left out: 5 of a, 0 of b" in " ".join(result.split())
    assert comparisons(a, b, "--common")[0]["reference_score"] == pytest.approx(100 * 18 / 35)
    other = lm_eval(tmp_path / "other", RIGHT["a"], doc_hash="another text")
    same = lm_eval(tmp_path / "same", RIGHT["a"])
    assert "60 questions differ" in run(same, other, code=2).stderr
    assert "its content differs" in run(same, other, code=2).stderr
    assert "no question is in the results of all models" in run(same, other, "--common", code=2).stderr
    other = lm_eval(tmp_path / "other", RIGHT["b"], prompt_hash="a chat template")
    assert "60 of 60 prompts of other are not those of same" in " ".join(run(same, other).stdout.split())
    two = lm_eval(tmp_path / "same", RIGHT["b"], task="boolq")
    assert "same has the task boolq, but other has not; add --common" in run(two, other, code=2).stderr
    assert [d["task"] for d in comparisons(two, other, "--common")] == ["arc"]


def test_clusters_averages_and_names(tmp_path):
    paths = [lm_eval(tmp_path / name, right) for name, right in RIGHT.items()]
    (d,) = comparisons(*paths, "--cluster", "doc.passage")
    columns = [np.array(right, float) for right in RIGHT.values()]
    clusters = {"x": [i // 5 for i in range(N)]}
    rows = [(name, ModelAnswers({}, {"x": c}, clusters=clusters)) for name, c in zip("ab", columns, strict=True)]
    assert (d["p"], d["num_clusters"]) == (compare(rows, False)[1]["x"]["p"], 12)
    for name, right in RIGHT.items():
        lm_eval(tmp_path / name, right[::-1], task="arc_easy")
    assert [d["task"] for d in comparisons(*paths, "--average")] == ["arc", "arc_easy", "average"]
    assert [d["model"] for d in comparisons(*paths, "--reference", "b")] == ["a"] * 2
    assert "no model has the name c" in run(*paths, "--reference", "c", code=2).stderr
    assert "two models have the name x" in run(f"x={paths[0]}", f"x={paths[1]}", code=2).stderr
    assert "has results in 2 folders" in run(tmp_path, code=2).stderr


GOOD = "id,score\n" + "".join(f"q{i},{i % 2}\n" for i in range(30))
BAD = {
    "empty.csv": (b"", "is empty"),
    "text.txt": (b"Dear reader,\nthis is a letter.\n", "a column's name is empty or occurs twice"),
    "noid.csv": (b"x,score\n1,1\n", "has no id of the question, only x, score; name its column: --id"),
    "nan.csv": (b"id,score\nq0,1\nq1,nan\n", "nan.csv:3: score is 'nan', which is not a number"),
    "missing.csv": (b"id,score\nq0,1\nq1,\n", "missing.csv:3: score is ''"),
    "null.jsonl": (b'{"id": 1, "score": 1}\n{"id": 2, "score": null}\n', "null.jsonl:2: score is 'None'"),
    "minus.csv": (b"id,score\nq0,-1.5\n", "scores are from 0 to 1; divide the scores, or choose another --metric"),
    "twice.csv": (b"id,score\nq0,1\nq1,1\nq0,0\n", "twice.csv:4: the question q0 occurs a second time"),
    "cut.jsonl": (b'{"id": 1, "score": 1}\n{"id": 2, "sco', "cut.jsonl:2: is not JSON"),
    "indented.json": (b'{\n "results": {\n "arc": 1}}', "has no answers to single questions"),
    "short.csv": (b"id,score\nq0,1\nq1\n", "short.csv:3: has 1 fields, but the header has 2"),
    "latin.csv": ("id,score,text\nq0,1,é\n".encode("latin-1"), "is neither text in UTF-8"),
    "cut.parquet": (b"PAR1abc", "is no valid Parquet file"),
    "clusters.jsonl": (b'{"id": 1, "score": 1, "cluster": 1}\n{"id": 2, "score": 1}\n', "has no cluster"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_sentence(name, tmp_path):
    content, problem = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "good.csv").write_text(GOOD)
    result = run(tmp_path / "good.csv", tmp_path / name, code=2)
    assert problem in result.stderr
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert "; " in result.stderr  # the remedy


STRANGE = [None, True, -1, "", "1e999", "\ud800", [], [["acc"]], {"acc": 1}, 10**400, float("nan")]


def test_changed_records_are_read_or_refused_in_one_sentence(tmp_path):
    """Values and keys of samples of lm-eval and of a table, changed in one record or in all."""
    rng, outcomes, file = random.Random(7), Counter(), tmp_path / "a.jsonl"
    samples = [json.loads(line) for line in next(lm_eval(tmp_path / "l", RIGHT["a"][:4]).iterdir()).open()]
    tables = [{"id": f"q{i}", "task": "arc", "score": 1, "cluster": i} for i in range(4)]
    for _ in range(300):
        records = json.loads(json.dumps(rng.choice([samples, tables])))
        key, value = rng.choice([*records[0]]), rng.choice(STRANGE)
        some = records if rng.random() < 0.5 else [rng.choice(records)]
        for record in some:
            record.pop(key)
            if rng.random() < 0.8:
                record[key] = value
        file.write_text("\n".join(json.dumps(rng.choice([r] * 9 + [value])) for r in records))
        try:
            align(read_models([str(file)], Columns()), common=False)
            outcomes["read"] += 1
        except UserError as error:
            outcomes["refused"] += 1
            outcomes["in a sentence"] += str(file) in str(error) and "; " in str(error)
    assert min(outcomes["read"], outcomes["refused"]) > 50
    assert outcomes["refused"] == outcomes["in a sentence"]


@pytest.mark.process
def test_stats_imports_no_library_of_models(tmp_path):
    good = tmp_path / "good.csv"
    good.write_text(GOOD)
    heavy = {"torch", "transformers", "datasets", "lm_eval", "matplotlib.pyplot"}
    for words, modules in (([str(good), f"b={good}"], heavy), (["--help"], heavy | {"numpy", "scipy", "pandas"})):
        assert not command.imported(f"from soren_align.cli import app; app.main(['stats', *{words}])", modules)


def test_equal_questions_floats_as_ids_and_other_metrics(tmp_path):
    """Ten answers to one question are no ten questions; 1.0 is the id 1; another metric is no other task."""

    def table(name, head, rows):
        (tmp_path / name).write_text("\n".join([head, *(",".join(map(str, row)) for row in rows)]) + "\n")
        return tmp_path / name

    asked = [table(f"{s}.csv", "id,question,score", [(i, f"q{i % 4}", s) for i in range(40)]) for s in (0, 1)]
    (d,) = comparisons(*asked)
    assert d["p"] == 0.125  # a sign-flip test of four questions
    assert "40 answers to 4 different questions" in " ".join(run(*asked).stdout.split())

    plain = table("ints.csv", "id,score", [(i, i % 2) for i in range(40)])
    (tmp_path / "floats.json").write_text(json.dumps([{"id": float(i), "score": (i + 1) % 2} for i in range(40)]))
    (d,) = comparisons(plain, tmp_path / "floats.json")
    assert (d["n"], d["difference"]) == (40, 0.0)

    one = table("one.csv", "id,acc", [(i, 1) for i in range(40)])
    both = table("both.csv", "id,acc,acc_norm", [(i, 1, 0) for i in range(40)])
    assert "one is scored by acc, but both by acc_norm; name a metric that both have: --metric" in " ".join(
        run(one, both, code=2).stderr.split()
    )
    (d,) = comparisons(one, both, "--metric", "acc")
    assert d["difference"] == 0.0
