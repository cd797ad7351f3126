"""The plans of the recipes for real models: no network, no weights, and the published numbers."""

import json
import os
import resource
import subprocess
import sys

import pytest

pytestmark = pytest.mark.model

WANTED = {
    # matrices, tensors that share one embedding, parameters, steps
    "qwen2.5-3b/paper-soren": (252, 3_085_938_688, 1624, 110_758),
    "mistral-7b/paper-soren": (224, 7_241_732_096, 478, 110_758),
}


@pytest.fixture(scope="module")
def planned_offline(planned):
    """`planned`, without the hub and with an empty cache."""
    from soren_align.core.errors import OutOfReach
    from soren_align.planning import inputs

    def unreachable(*_):
        raise OutOfReach("the hub cannot be reached")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inputs, "set_up_training", unreachable)
        yield planned


@pytest.fixture(scope="module", params=WANTED)
def shipped(request, planned_offline):
    """(name, plan)."""
    return request.param, planned_offline(request.param)[0]


@pytest.mark.process
def test_the_command_plans_without_hub_files_or_memory_for_weights(tmp_path):
    """In 20 GB of address space, where 7 billion float32 weights would need 29 GB."""
    limit = 20 * 10**9
    command = [sys.executable, "-m", "soren_align", "plan", "mistral-7b/paper-soren", "--processes", "8", "--json"]
    command += ["--set", "run.parallel=zero3"]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder,
                         env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}, timeout=300,
                         preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert "out of reach" in plan["notices"][0]
    assert (plan["processes"]["num_processes"], plan["processes"]["parallel"]) == (8, "ZeRO 3")
    assert plan["steps"]["total"] == WANTED["mistral-7b/paper-soren"][2]
    assert list(folder.iterdir()) == []


@pytest.mark.rest
def test_the_leaderboard_v2_is_planned_without_the_hub(planned_offline):
    evaluation = ("eval.suite=open-llm-leaderboard-v2", "eval.published=[]")
    plan, text = planned_offline("qwen2.5-3b/paper-soren", *evaluation)
    assert plan["evaluation"]["num_requests_per_model"] == 154_816
    assert plan["evaluation"]["columns"] == ["ifeval", "bbh", "math_hard", "gpqa", "musr", "mmlu_pro"]
    assert "154,816 requests" in " ".join(text.split())


@pytest.mark.rest
def test_every_matrix_of_the_blocks_goes_to_soren_and_the_rest_once_to_adamw(shipped):
    name, plan = shipped
    matrices, parameters, *_ = WANTED[name]
    (spectral,) = [row for row in plan["routing"] if row["rule"] == "spectral"]
    assert spectral["tensors"] == matrices
    assert plan["model"]["num_parameters"] == parameters == sum(row["numel"] for row in plan["routing"])
    embeddings = [row for row in plan["routing"] if "embedding" in row["reason"]]
    if name.startswith("qwen"):
        (embedding,) = [(row["rule"], row["tensors"], row["reason"]) for row in embeddings]
        assert embedding == ("adamw", 1, "input embedding, tied to lm_head.weight")
    else:
        assert [row["tensors"] for row in embeddings] == [1, 1]


def test_steps_and_requests_are_the_published_datasets(shipped):
    name, plan = shipped
    *_, steps, requests = WANTED[name]
    assert plan["steps"]["total"] == steps
    assert plan["evaluation"]["num_requests_per_model"] == requests
    assert not plan["data"]["is_tokenized"]
    assert "out of reach" in plan["notices"][0]
