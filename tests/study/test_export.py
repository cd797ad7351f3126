"""Records of Every Eval Ever are those of its schema, of every model once, and without anything of the machine."""

import json
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
from soren_align.core.errors import UserError
from soren_align.run.folder import RunFolder
from soren_align.study import audit
from soren_align.study.export import export
from soren_align.study.report.verdict import VERDICT
from tests.support import command
from tests.support.large_study import SMALL, plant, write_verdict

# Of eval.schema.json 0.3.0 and instance_level_eval.schema.json 0.3.0: the required keys, and all keys where others are
# refused. The whole schema is compared where the package is installed (Python 3.12, not among this package's own).
RECORD = {
    "": ({"schema_version", "evaluation_id", "retrieved_timestamp", "source_metadata", "model_info", "eval_library",
          "evaluation_results"}, {"evaluation_timestamp", "detailed_evaluation_results"}),
    "source_metadata": ({"source_type", "source_organization_name", "evaluator_relationship"}, None),
    "eval_library": ({"name", "version"}, None),
    "model_info": ({"name", "id", "additional_details"}, None),
    "model_info.additional_details": ({"deployment_type", "model_availability"}, None),
    "evaluation_results.0": ({"evaluation_name", "source_data", "metric_config", "score_details"}, None),
    "evaluation_results.0.source_data": ({"dataset_name", "source_type"}, {"additional_details"}),
    "evaluation_results.0.metric_config": ({"lower_is_better", "score_type", "min_score", "max_score"}, None),
    "evaluation_results.0.score_details": ({"score"}, {"details", "uncertainty"}),
    "evaluation_results.0.score_details.uncertainty.confidence_interval": ({"lower", "upper"}, {"confidence_level"}),
    "detailed_evaluation_results": ({"format", "file_path"}, {"hash_algorithm", "checksum", "total_rows"}),
}  # fmt: skip
INSTANCE = {
    "": ({"schema_version", "evaluation_id", "model_id", "evaluation_name", "sample_id", "interaction_type", "input",
          "output", "answer_attribution", "evaluation"}, {"evaluation_result_id", "sample_hash"}),
    "input": ({"raw", "reference"}, {"choices"}),
    "output": ({"raw"}, set()),
    "answer_attribution.0": ({"turn_idx", "source", "extracted_value", "extraction_method", "is_terminal"}, set()),
    "evaluation": ({"score", "is_correct"}, set()),
}  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A small study that has ended, with its verdict.json; of the report nothing else."""
    folder = tmp_path_factory.mktemp("export")
    plant(folder, **SMALL)
    with mock.patch.object(audit, "write_report", write_verdict):
        assert audit.conclude(folder / "study").problems == []
    return folder / "study"


def records_in(folder):
    return {file: json.loads(file.read_text()) for file in sorted(folder.glob("data/*/*/*/*.json"))}


def part(content, place):
    for key in place.split(".") if place else ():
        content = content[int(key) if key.isdecimal() else key]
    return content


def assert_form(content, form):
    for place, (required, others) in form.items():
        keys = part(content, place).keys()
        assert keys >= required, place
        assert others is None or keys <= required | others, place


def assert_texts(content):
    """Free-form values are texts."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if key in ("additional_details", "details"):
            assert all(isinstance(each, str) for each in value.values())
        elif isinstance(value, dict | list):
            assert_texts(value)


def test_a_study_has_a_record_of_each_final_run_and_one_of_the_start(study, tmp_path):
    first = export(str(study), str(tmp_path), owner="zoo-lab", samples=True)
    records = records_in(tmp_path)
    assert sorted(first) == [*records]
    runs = [f"{path.parent.name}-{path.name}" for path in study.glob("verdict/*/*") if path.is_dir()]
    names = sorted(record["model_info"]["id"] for record in records.values())
    assert names == sorted(f"zoo-lab/study-{name}" for name in ("base", *runs))
    for file, record in records.items():
        assert_form(record, RECORD)
        assert_texts(record)
        assert record["schema_version"] == "0.3.0"
        assert file.parent.parent.name + "/" + file.parent.name == record["model_info"]["id"]
        samples = tmp_path / record["detailed_evaluation_results"]["file_path"]
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        assert samples == file.with_name(f"{file.stem}_samples.jsonl")
        assert len(lines) == record["detailed_evaluation_results"]["total_rows"] == 60
        assert_form(lines[0], INSTANCE)
        for result in record["evaluation_results"]:
            own = [line for line in lines if line["evaluation_result_id"] == result["evaluation_result_id"]]
            points = [line["evaluation"]["score"] for line in own]
            assert result["score_details"]["score"] == pytest.approx(sum(points) / len(points), abs=1e-12)
            assert result["score_details"]["uncertainty"]["num_samples"] == len(points) == 10
    assert export(str(study), str(tmp_path), owner="zoo-lab", samples=True) == first  # replaced, not added
    assert records_in(tmp_path).keys() == records.keys()
    assert str(study.parent) not in "".join(file.read_text() for file in tmp_path.rglob("*.json*"))


def test_a_final_run_has_its_seed_and_the_studys_declaration_also_alone(study, tmp_path):
    digits = json.loads((study / VERDICT).read_text())["digits"]
    for source, name in ((study, "study-soren-102"), (study / "verdict/soren/102", "102")):
        export(str(source), str(tmp_path / name), owner="me")
        records = [each for each in records_in(tmp_path / name).values() if each["model_info"]["id"] == f"me/{name}"]
        details = records[0]["model_info"]["additional_details"]
        assert (details["study_declaration"], details["trainer_seed"]) == (digits, "102")
        assert (details["optimizer"], details["task"]) == ("soren", "sft")
        assert "detailed_evaluation_results" not in records[0]
    export(str(study / "verdict/soren/102"), str(tmp_path), owner="me")
    assert {each["model_info"]["id"] for each in records_in(tmp_path).values()} == {"me/102", "me/102-base"}


@pytest.mark.parametrize("name", ["eval.schema.json", "instance_level_eval.schema.json"])
def test_records_are_valid_by_the_published_schema(study, tmp_path, name):
    jsonschema = pytest.importorskip("jsonschema")
    package = Path(pytest.importorskip("every_eval_ever").__file__).parent
    schema = jsonschema.Draft7Validator(json.loads((package / "schemas" / name).read_text()))
    export(str(study), str(tmp_path), owner="me", samples=True)
    if name.startswith("eval"):
        contents = [*records_in(tmp_path).values()]
    else:
        contents = [json.loads(line) for file in tmp_path.rglob("*.jsonl") for line in file.read_text().splitlines()]
    assert [error.message for content in contents for error in schema.iter_errors(content)] == []


def damage(study, place, **changes):
    """Change keys of a file of JSON; None: remove the file."""
    file = study / place
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes) if changes else "{")


RESULTS = "verdict/soren/102/eval/open-llm-leaderboard-v1/results.json"
BAD = {
    "a folder of something else": (lambda s: (s / "study.yaml").unlink(), "", "is neither a run folder nor a study's"),
    "problems": (lambda s: damage(s, VERDICT, problems=["a: b; c"]), "", "no verdict because of 1 problem, .* a: b; c"),
    "no answers": (lambda s: damage(s, VERDICT, differences=[]), "", "has no verdict yet; rerun soren-align compare"),
    "no report": (lambda s: (s / VERDICT).unlink(), "", "verdict.json: is missing; run soren-align compare STUDY"),
    "a damaged verdict": (lambda s: damage(s, VERDICT), "", "verdict.json:1 cannot be read as JSON"),
    "damaged results": (lambda s: damage(s, RESULTS), "", "is not an evaluation's results, or is damaged"),
    "results without metrics": (lambda s: damage(s, RESULTS, settings={}), "", "has no metrics, or scores that are no"),
    "no evaluation": (lambda s: shutil.rmtree(s / "verdict/soren/102/eval"), "", "run `soren-align eval .*102` first"),
    "a run that was not evaluated": (lambda s: None, "search/soren/00", "00: has no evaluation; run `soren-align eval"),
    "no such folder": (lambda s: None, "nowhere", "is neither a run folder nor a study's folder; name a folder"),
    "damaged samples": (
        lambda s: (s / RESULTS).with_name("samples").joinpath("SFT/mmlu.jsonl").write_text("{}\n"), "",
        "mmlu.jsonl:1 is damaged .KeyError.; evaluate the run again, or leave out --samples"),
    "lost samples": (lambda s: shutil.rmtree((s / RESULTS).with_name("samples") / "SFT"), "", "jsonl: is missing"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BAD)
def test_bad_input_is_one_sentence_and_exit_code_2(study, tmp_path, fault):
    change, place, words = BAD[fault]
    shutil.copytree(study, tmp_path / "study", symlinks=True)
    change(tmp_path / "study")
    result = command.run("export", tmp_path / "study" / place, "--samples", cwd=tmp_path, env={"COLUMNS": "1000"})
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.splitlines()) == 1
    assert re.search(words, result.stderr), result.stderr


@pytest.mark.parametrize(("output", "owner", "words"), [
    ("file", "me", "is not a folder"), ("out", "a/b", "which may have only"), ("out", "data", "which may have only"),
    ("out", "../x", "which may have only"), ("out", "", "which may have only"),
])  # fmt: skip
def test_bad_options_are_refused_before_anything_is_written(study, tmp_path, output, owner, words):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=words):
        export(str(study), str(tmp_path / output), owner=owner)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_names_of_folders_become_names_of_models(study, tmp_path):
    copy = tmp_path / "my run (2)"
    shutil.copytree(study / "verdict/soren/102", copy)
    export(str(copy), str(tmp_path / "out"), owner="me")
    names = sorted(path.name for path in (tmp_path / "out/data/soren-align/me").iterdir())
    assert names == ["my-run-2", "my-run-2-base"]
    assert RunFolder(copy).read()["status"] == "finished"


def test_the_command_prints_the_number_of_records(study, tmp_path):
    result = command.run("export", study, "--output", "out", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, "out: 13 records (every_eval_ever)\n")
    assert len(records_in(Path(tmp_path) / "out")) == 13
