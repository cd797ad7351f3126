"""The plans of the recipes for real models: no network, no weights, and the numbers that are published."""

import json

import pytest

from tests.support.command import run

pytestmark = pytest.mark.model

WANTED = {
    # matrices, tensors that share one embedding, parameters, steps
    "qwen2.5-3b/paper-soren": (252, 3_085_938_688, 1624, 110_758),
    "mistral-7b/paper-soren": (224, 7_241_732_096, 478, 110_758),
}


@pytest.fixture(scope="module", params=WANTED)
def planned(request, tmp_path_factory):
    here = tmp_path_factory.mktemp("elsewhere")
    ran = run("plan", request.param, "--json", cwd=here, env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(here / "empty")})
    assert ran.returncode == 0, ran.stderr
    return request.param, json.loads(ran.stdout)


def test_every_matrix_of_the_blocks_goes_to_soren_and_the_rest_once_to_adamw(planned):
    name, found = planned
    matrices, parameters, *_ = WANTED[name]
    (spectral,) = [row for row in found["routing"] if row["rule"] == "spectral"]
    assert spectral["tensors"] == matrices
    assert found["model"]["parameters"] == parameters == sum(row["numel"] for row in found["routing"])
    embeddings = [row for row in found["routing"] if "embedding" in row["reason"]]
    if name.startswith("qwen"):
        assert [(row["rule"], row["tensors"], row["reason"]) for row in embeddings] == [
            ("adamw", 1, "input embedding, tied to lm_head.weight")
        ]
    else:
        assert [row["tensors"] for row in embeddings] == [1, 1]


def test_steps_and_requests_are_the_published_datasets(planned):
    name, found = planned
    *_, steps, requests = WANTED[name]
    assert found["steps"]["total"] == steps
    assert found["evaluation"]["requests_per_model"] == requests
    assert not found["data"]["counted"]
    assert "out of reach" in found["notices"][0]


def test_adamw_would_hold_one_more_moment_of_every_matrix(planned):
    _, found = planned
    shared = found["processes"]
    matrices = next(row["numel"] for row in found["routing"] if row["rule"] == "spectral")
    moments = {p["name"]: p["num_bytes"] for p in shared["memory"]}["optimizer states"]
    others = found["model"]["parameters"] - matrices
    assert moments == 4 * (matrices + 2 * others)
    more = shared["memory_total_adamw"]["device"]["passes"] - shared["memory_total"]["device"]["passes"]
    assert more == 4 * matrices


def test_the_papers_rates_are_told_to_move_next_to_nothing(planned):
    name, found = planned
    rows = [row for row in found["updates"] if row["rule"] == "spectral"]
    assert {tuple(row["shape"]) for row in rows} >= {(2048, 2048) if "qwen" in name else (4096, 4096)}
    # lr x 1/2 / sqrt(max(m, n)), and against float32's distance at 0.02, 1.86e-9
    largest = max(row["rms"] for row in rows)
    assert largest == pytest.approx(1e-6 * 0.5 / 2048**0.5 if "qwen" in name else 4e-7 * 0.5 / 4096**0.5)
    assert all(row["in_steps_of_dtype"] == pytest.approx(row["rms"] / 1.8626451e-9) for row in rows)
    assert all(row["sets_bfloat16"] < 1 for row in rows)
