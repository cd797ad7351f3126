"""points.json: what one evaluation writes, another process compares, and a stranger may have changed."""

import hashlib
import json
from types import SimpleNamespace

import numpy as np
import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.stats.paired import points_json, read_points

POINTS = {"acc": [1.0, 0.0, 0.25, 1.0], "gen": [0.0, 1.0]}


def model(points=POINTS, settings=None, prompt="a", truncated=None):
    """As the harness's ModelResults."""
    return SimpleNamespace(
        points=points,
        clusters={"acc": ["law", "art", "law", "art"]},
        prompt_hashes={column: [(str(i), prompt) for i in range(len(each))] for column, each in points.items()},
        truncated=truncated or {},
        settings=settings or {"bos": True},
    )


def written(folder, rows, **changes):
    scores = [{c: {"value": 100 * sum(p) / len(p)} for c, p in each.points.items()} for each in rows.values()]
    head = {"format": 1, "title": "t", "suite": "s", "published": [], "settings": {}, "notes": []}
    entries = [{"name": name, "model": None, "scores": each} for name, each in zip(rows, scores, strict=True)]
    digest = hashlib.sha256(points_json(rows).encode()).hexdigest()
    (folder / "results.json").write_text(json.dumps(head | {"rows": entries, "points_sha256": digest}))
    content = json.loads(points_json(rows))
    for name, change in changes.items():
        content["rows"]["SFT"]["acc"][name] = change
    (folder / "points.json").write_text(json.dumps(content) + "\n")
    return folder


def test_points_and_clusters_are_read_as_they_were(tmp_path):
    rows = read_points(written(tmp_path, {"base": model(), "SFT": model({"acc": [0.0] * 4, "gen": [1.0, 1.0]})}))
    assert list(rows) == ["base", "SFT"]
    assert rows["base"]["acc"].each.tolist() == POINTS["acc"]
    assert rows["SFT"]["gen"].each.tolist() == [1.0, 1.0]
    assert rows["SFT"]["acc"].clusters.tolist() == [0, 1, 0, 1]
    assert rows["SFT"]["gen"].clusters is None
    assert rows["SFT"]["acc"].each.dtype == np.float64


@pytest.mark.parametrize(
    "other", [{"prompt": "b"}, {"truncated": {"acc": 1}}, {"settings": {"bos": False}}, {"settings": {"bos": None}}]
)
def test_the_hash_differs_if_the_models_were_evaluated_differently(tmp_path, other):
    rows = read_points(written(tmp_path, {"base": model(), "same": model(), "other": model(**other)}))
    assert rows["base"]["acc"].prompts == rows["same"]["acc"].prompts != rows["other"]["acc"].prompts


@pytest.mark.parametrize(("changes", "problem"), [
    ({"points": []}, "at least 1 item"), ({"points": ["1", 0.0, 0.0, 0.0]}, "valid number"),
    ({"points": [1.0, 1.0, 1.0, 1.0]}, "differs from the file that belongs to results.json"),
])  # fmt: skip
def test_a_changed_file_is_refused(tmp_path, changes, problem):
    folder = written(tmp_path, {"base": model(), "SFT": model()}, **changes)
    with pytest.raises(UserError, match=problem) as error:
        read_points(folder)
    assert "evaluate the run again" in str(error.value)
