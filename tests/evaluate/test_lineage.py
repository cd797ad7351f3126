"""A run's rows begin at the checkpoint that everything came from."""

import json
import shutil

import pytest
from soren_align.core.errors import UserError
from soren_align.evaluate.run.lineage import lineage, lineages, parents
from soren_align.run.folder import RunFolder
from soren_align.run.provenance import fingerprint
from tests.support.edited_files import edit, edited
from tests.support.run_folders import record_run

NO_ROW = "the table has no row for the checkpoint that {} was trained from, because the checkpoint"


def model(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def run(folder, task, start, status="finished"):
    model(folder / "model")
    (folder / "model" / "model.safetensors").write_text(str(folder))
    record_run(folder, start, fingerprint(str(start)), task, status)
    return folder


# base -> sft -> dpo


@pytest.fixture
def base(tmp_path):
    return model(tmp_path / "llama")


@pytest.fixture
def sft(tmp_path, base):
    return run(tmp_path / "sft", "sft", base)


@pytest.fixture
def dpo(tmp_path, sft):
    return run(tmp_path / "dpo", "dpo", sft / "model")


def test_the_rows_are_the_chain_from_the_base(base, sft, dpo):
    assert lineage(dpo) == [("base", base), ("SFT", sft / "model"), ("DPO", dpo / "model")]
    assert lineage(sft) == lineage(sft / "model") == [("base", base), ("SFT", sft / "model")]


def test_a_start_made_inside_the_run_folder_is_its_base(tmp_path):
    """What `model.init_seed` leaves: random weights in `start`, beside the same run.json."""
    start = model(tmp_path / "sft" / "start")
    model(tmp_path / "sft" / "model")
    record_run(tmp_path / "sft", start, fingerprint(str(start)))
    assert lineage(tmp_path / "sft") == [("base", start), ("SFT", tmp_path / "sft" / "model")]


def test_a_plain_model_is_one_row_named_by_its_folder(base, monkeypatch):
    assert lineage(base) == [("llama", base)]
    monkeypatch.chdir(base)
    assert [name for name, _ in lineage(".")] == ["llama"]


def test_of_a_task_that_comes_twice_both_rows_get_their_folders_beside_it(base, sft, tmp_path):
    again = run(tmp_path / "more", "sft", sft / "model")
    assert lineage(again) == [("base", base), ("SFT (sft)", sft / "model"), ("SFT (more)", again / "model")]


@pytest.fixture
def omitted():
    """Sentence -> path, of the starting checkpoints without a row."""
    return {}


def test_without_its_start_a_run_is_one_row_and_the_reason_is_reported(sft, dpo, omitted):
    shutil.rmtree(sft)
    assert lineage(dpo, omitted.__setitem__) == [("DPO", dpo / "model")]
    assert omitted == {f"{NO_ROW.format('dpo')} is missing": str(sft / "model")}


def test_a_start_on_the_hub_that_was_never_downloaded_has_no_row(sft, omitted):
    edit(sft / "run.json", start={"path": "lab/model", "sha256_or_revision": "c" * 40})
    assert lineage(sft, omitted.__setitem__) == [("SFT", sft / "model")]
    assert omitted == {f"{NO_ROW.format('sft')} is not on this machine": "lab/model"}


def test_a_run_that_was_written_over_by_its_descendant_has_no_row(sft, dpo, omitted):
    """Its weights are not those that the training started from: a comparison would be wrong."""
    edit(sft / "run.json", start={"path": str(dpo / "model"), "sha256_or_revision": None})
    assert lineage(dpo, omitted.__setitem__) == [("SFT", sft / "model"), ("DPO", dpo / "model")]
    assert omitted == {f"{NO_ROW.format('sft')} was overwritten later": str(dpo / "model")}


def test_an_unfinished_run_has_no_rows_nor_one_whose_model_was_removed(dpo):
    shutil.rmtree(dpo / "model")
    with pytest.raises(UserError, match="the model of this finished run was removed; train again"):
        lineage(dpo)
    RunFolder(dpo).update(status="training")
    with pytest.raises(UserError, match=r"has no model yet \(status: training\); finish the run first"):
        lineage(dpo)


def test_what_is_neither_run_nor_model_is_an_error(tmp_path):
    with pytest.raises(UserError, match="contains no run"):
        lineage(tmp_path)


def test_a_start_that_was_trained_anew_has_no_row(sft, dpo, omitted):
    (sft / "model" / "model.safetensors").write_text("other weights")
    assert lineage(dpo, omitted.__setitem__) == [("DPO", dpo / "model")]
    assert omitted == {f"{NO_ROW.format('dpo')} was overwritten later": str(sft / "model")}


def test_two_runs_stand_in_one_table_with_their_common_base_once(base, sft, tmp_path):
    (base / "model.safetensors").write_text("base")
    with edited(sft / "run.json") as record:
        record["start"]["sha256_or_revision"] = fingerprint(str(base))
    muon = run(tmp_path / "muon", "sft", base)
    rows = [("base", base), ("SFT (sft)", sft / "model"), ("SFT (muon)", muon / "model")]
    assert lineages([sft, muon]) == lineages([sft, muon, sft / "model"]) == rows


def test_an_adapter_brings_its_base_and_on_a_run_the_whole_chain(base, sft, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_model.safetensors").write_text("")
    for start, rows in ((base, []), (sft / "model", [("SFT", sft / "model")])):
        config = {"peft_type": "LORA", "base_model_name_or_path": str(start)}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        assert lineage(adapter) == [("base", base), *rows, ("adapter", adapter)]


def test_a_run_that_was_moved_has_its_own_start_beside_it(tmp_path):
    start = model(tmp_path / "old" / "start")
    (start / "model.safetensors").write_text("random")
    model(tmp_path / "old" / "model")
    record_run(tmp_path / "old", start, fingerprint(str(start)))
    (tmp_path / "old").rename(tmp_path / "new")
    assert lineage(tmp_path / "new") == [("base", tmp_path / "new" / "start"), ("SFT", tmp_path / "new" / "model")]


def test_parents_are_the_models_that_runs_began_with(base, sft, dpo):
    assert parents([base, sft / "model", dpo / "model"]) == {1: 0, 2: 1}
    assert parents([base, dpo / "model", "org/hub"]) == {}
    (sft / "model" / "model.safetensors").write_text("trained again")
    assert parents([base, sft / "model", dpo / "model"]) == {1: 0}
