"""A checkpoint is read without running what a stranger has put into it."""

import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from soren_align.core.errors import UserError
from soren_align.sharding import check_parts
from soren_align.sharding.checkpoints import refuse_pickles
from tests.support.tiny_run import Hostile


@pytest.fixture
def weights_only(monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "0")  # put back afterwards
    refuse_pickles()


def load_by_engine(file):
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    TorchCheckpointEngine().load(str(file))


@pytest.mark.parametrize("load", [lambda file: torch.load(file, weights_only=False), load_by_engine],
                         ids=["torch.load with weights_only=False", "DeepSpeed's engine"])  # fmt: skip
def test_what_deepspeed_loads_runs_no_code(weights_only, tmp_path, load):
    torch.save({"module": {}, "evil": Hostile(tmp_path / "made")}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(pickle.UnpicklingError):
        load(tmp_path / "mp_rank_00_model_states.pt")
    assert not (tmp_path / "made").exists()


def test_the_metadata_of_fsdp2_is_read_and_a_hostile_one_refused(tmp_path):
    dcp.save({"w": torch.ones(3, 4), "m": torch.ones(2, dtype=torch.bfloat16), "lr": 0.1}, checkpoint_id=tmp_path / "o")
    check_parts(tmp_path)
    (tmp_path / "o" / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))
    with pytest.raises(UserError, match=r"the file contains code \(posix\.mkdir\)"):
        check_parts(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_path_pickled_by_python_3_13_is_a_path(tmp_path):
    (tmp_path / "o").mkdir()
    written = pickle.dumps(tmp_path, protocol=2).replace(b"cpathlib\nPosixPath", b"cpathlib._local\nPosixPath")
    assert b"_local" in written
    (tmp_path / "o" / ".metadata").write_bytes(written)
    check_parts(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "made")))  # accelerate reads one there too
    with pytest.raises(UserError, match="the file contains code"):
        check_parts(tmp_path)
