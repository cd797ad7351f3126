"""Write evaluations as records of Every Eval Ever, a shared schema of evaluation results (evaleval,
version 0.3.0).

A record is one model's scores in one suite, in the layout of its datastore:

    data/soren-align/OWNER/MODEL/UUID.json             scores with intervals, versions, seeds, hash of the weights
    data/soren-align/OWNER/MODEL/UUID_samples.jsonl    optional: each question, the model's answer and its points

Scores are shares, not percent. The same evaluation has the same UUID, so that a second export
replaces the first. A record has no local paths.
"""

import hashlib
import json
import re
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from pathlib import Path
from typing import Any

from ..core.errors import UserError
from ..core.files import digest, read_text, write
from ..evaluate.report.results import NAME, Results, Row, evaluations
from ..evaluate.stats.points import metric_points
from ..recipe import load_resolved
from ..run.folder import RunFolder
from .card import public, public_results

SCHEMA_VERSION = "0.3.0"
COLLECTION = "soren-align"
METRIC_IDS = {"acc": "accuracy", "exact_match": "exact-match"}
"""lm-eval's names -> those of the schema's registry; others are prefixed by the harness."""
MAX_SAMPLES = 256 << 20
"""Bytes of a file of samples."""


@dataclass(frozen=True)
class Names:
    """The names in the records of a run."""

    owner: str
    """Who trained and evaluated: a user or an organization."""
    model: str
    """Of the trained model."""
    prefix: str
    """Before the names of the table's other models that are not on the hub, such as the starting
    checkpoint."""
    details: Mapping[str, str]
    """Further facts about the trained model."""


def export_run(run: RunFolder, output: Path, names: Names, *, samples: bool) -> list[Path]:
    """Write the records of all evaluations of a run, and of the models beside it; return their
    files.

    samples: write the instance-level records too. Raises UserError if there is no evaluation, or if
    one is damaged.
    """
    recipe, record, written = load_resolved(run.recipe), run.record(), []
    for folder in evaluations(run.path):
        results, own = public_results(folder, run, recipe)
        values = [score["value"] for row in results["rows"] for score in row["scores"].values()]
        if not results["settings"].get("metrics") or not all(map(isfinite, values)):
            raise UserError(
                f"{folder / NAME}: has no metrics, or scores that are no numbers; evaluate the run again"
            )
        for index, row in enumerate(results["rows"]):
            model, _, revision = (row["model"] or "").partition("@")
            details = {
                "revision": revision,
                "model_availability": "open_weights" if model else "unknown",
            }
            model = model or f"{names.owner}/{_component(names.prefix)}-{_component(row['name'])}"
            if index == own:
                seeds = {
                    f"{name}_seed": seed
                    for name, seed in record.get("seeds", {}).items()
                    if seed is not None
                }
                model = f"{names.owner}/{_component(names.model)}"
                details = {
                    "model_availability": "unknown",
                    **names.details,
                    "commit": record.get("commit"),
                    **seeds,
                }
                details |= {
                    "task": recipe.task,
                    "optimizer": recipe.optimizer.name,
                    "lr": recipe.optimizer.lr,
                }
            content = _record(results, row, model, details, names.owner)
            key = digest([model, {**content, "evaluation_id": "", "retrieved_timestamp": ""}])
            name = uuid.UUID(hashlib.sha256(key.encode()).hexdigest()[:32], version=4)
            place = Path("data", COLLECTION, *model.split("/"), f"{name}.json")
            (output / place).parent.mkdir(parents=True, exist_ok=True)
            if samples:
                lines = list(_instances(folder / "samples" / row["name"], results, row, content))
                sidecar, text = place.with_name(f"{name}_samples.jsonl"), "".join(lines)
                write(output / sidecar, text)
                content["detailed_evaluation_results"] = {
                    "format": "jsonl", "file_path": sidecar.as_posix(), "hash_algorithm": "sha256",
                    "checksum": hashlib.sha256(text.encode()).hexdigest(), "total_rows": len(lines),
                }  # fmt: skip
            written.append(output / place)
            write(written[-1], json.dumps(content, indent=2) + "\n")
    if not written:
        raise UserError(f"{run}: has no evaluation; run `soren-align eval {run}` first")
    return written


def _component(name: str) -> str:
    """Return a name as a component of a path and of a model's name on the hub."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip("-.") or "model"


def _record(
    results: Results, row: Row, model: str, details: Mapping[str, Any], owner: str
) -> dict[str, Any]:
    """Return the record of one row of a table.
    Its free-form values are texts, as the schema wants them.
    """
    settings: dict[str, Any] = dict(results["settings"])
    now, versions = str(int(time.time())), _mapping(settings.get("versions"))
    engine = "transformers" if settings.get("backend", "hf") == "hf" else str(settings["backend"])
    facts = {"deployment_type": "self_deployed", **details, "dtype": settings.get("dtype")}
    is_own = details["model_availability"] == "unknown"
    source = {
        "source_name": results["title"],
        "source_type": "evaluation_run",
        "source_organization_name": owner,
    }
    source |= {"evaluator_relationship": "first_party" if is_own else "third_party"}
    evaluation_results = []
    for column, metric, filter_name, identity in _benchmarks(results, row):
        # The score of one benchmark, with its uncertainty and the difference to the starting
        # checkpoint.
        score = dict[str, Any](row["scores"][column])
        shares = {
            key: score[key] / 100
            for key in ("value", "stderr", "low", "high", "chance")
            if isfinite(score.get(key, nan))
        }
        uncertainty: dict[str, Any] = {"num_samples": score["n"]} if "n" in score else {}
        if "stderr" in shares:
            uncertainty["standard_error"] = {"value": shares["stderr"], "method": "analytic"}
        if "low" in shares and "high" in shares:
            interval = {"lower": shares["low"], "upper": shares["high"], "confidence_level": 0.95}
            uncertainty["confidence_interval"] = interval
        start = row.get("start") or {
            "name": results["rows"][0]["name"],
            "differences": row.get("differences") or {},
        }
        comparison: dict[str, Any] = {}
        if difference := start["differences"].get(column):
            comparison = {
                f"difference_{key}": difference[key] / 100 for key in ("value", "low", "high")
            }
            comparison |= {"difference_to": start["name"], "p_holm": difference["p_holm"]}
        conditions = {
            key: _mapping(settings.get(key)).get(column)
            for key in ("num_fewshot", "task_versions", "clusters")
        }
        conditions |= {
            key: settings.get(key)
            for key in ("chat_template", "batch_size", "bos", "limit", "seeds")
        }
        origin = _texts({"suite": results["suite"], "data": settings.get("data")})
        evaluation_results.append(
            {
                "evaluation_result_id": identity,
                "evaluation_name": column,
                "source_data": {
                    "dataset_name": column,
                    "source_type": "other",
                    "additional_details": origin,
                },
                "metric_config": {
                    "metric_id": METRIC_IDS.get(metric, f"lm-evaluation-harness.{metric}"),
                    "metric_name": metric,
                    "metric_unit": "proportion",
                    "lower_is_better": False,
                    "score_type": "continuous",
                    "min_score": -1.0 if column in _mapping(settings.get("num_choices")) else 0.0,
                    "max_score": 1.0,
                    "additional_details": _texts(
                        {"filter": filter_name, "chance": shares.get("chance")}
                    ),
                },
                "score_details": {
                    "score": shares["value"],
                    "uncertainty": uncertainty,
                    "details": _texts(comparison),
                },
                "generation_config": {"additional_details": _texts(conditions)},
            }
        )
    return {
        "schema_version": SCHEMA_VERSION,
        "evaluation_id": f"{results['suite']}/{model}/{now}",
        "retrieved_timestamp": now,
        "source_metadata": source
        | {"additional_details": _texts({"notes": "; ".join(results["notes"])})},
        "eval_library": {
            "name": "lm_eval",
            "version": str(versions.get("lm-eval", "unknown")),
            "additional_details": _texts(versions | {"commit": settings.get("commit")}),
        },
        "model_info": {
            "name": model,
            "id": model,
            "inference_engine": {"name": engine, "version": str(versions.get(engine, "unknown"))},
            "additional_details": _texts(facts | {"weights_sha256": row.get("weights_sha256")}),
        },
        "evaluation_results": evaluation_results,
    }


def _benchmarks(results: Results, row: Row) -> Iterator[tuple[str, str, str, str]]:
    """Yield (column, metric, filter, identity) of the benchmarks: an average has no metric and no
    questions.
    """
    for column, key in results["settings"].get("metrics", {}).items():
        metric, _, filter_name = key.partition(",")
        if column in row["scores"]:
            identity = f"{column}/{metric}" + (f":{filter_name}" if filter_name != "none" else "")
            yield column, metric, filter_name, identity


def _mapping(value: Any) -> dict[str, Any]:
    """Return a mapping among unchecked settings; an empty one in the place of anything else."""
    return value if isinstance(value, dict) else {}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return free-form values as texts, without those that are unknown and without local paths."""
    known = {key: value for key, value in values.items() if value not in (None, "", {})}
    return {
        key: str(public(v)) if isinstance(v, str) else json.dumps(public(v))
        for key, v in known.items()
    }


def _instances(folder: Path, results: Results, row: Row, content: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each answer of a row.
    folder: of its samples. Raises UserError if they are damaged.
    """
    for column, metric, filter_name, identity in _benchmarks(results, row):
        file = folder / f"{column}.jsonl"
        if file.is_symlink() or not file.is_file():
            raise UserError(f"{file}: is missing; evaluate the run again, or leave out --samples")
        for number, line in enumerate(read_text(file, MAX_SAMPLES).split("\n")[:-1], 1):
            try:
                sample = json.loads(line)
                if sample["filter"] != filter_name:
                    continue
                answer, choices = _answer(sample, metric)
                question, target, (points,) = (
                    sample["prompt"],
                    sample["target"],
                    metric_points([sample], metric),
                )
                question = question if isinstance(question, str) else json.dumps(question)
                target = choices[target] if choices and isinstance(target, int) else str(target)
                name = f"{sample.get('task', column)}/{sample['doc_id']}"
                if not isfinite(points):
                    raise ValueError("no points")
            except (
                ValueError,
                TypeError,
                KeyError,
                IndexError,
                RecursionError,
                ZeroDivisionError,
            ) as error:
                raise UserError(
                    f"{file}:{number} is damaged ({type(error).__name__}); evaluate the run again, or leave out "
                    "--samples"
                ) from None
            instance = {
                "schema_version": SCHEMA_VERSION,
                "evaluation_id": content["evaluation_id"],
                "model_id": content["model_info"]["id"],
                "evaluation_name": column,
                "evaluation_result_id": identity,
                "sample_id": name,
                "sample_hash": hashlib.sha256(json.dumps([question, target]).encode()).hexdigest(),
                "interaction_type": "single_turn",
                "input": {"raw": question, "reference": [target], "choices": choices},
                "output": {"raw": [answer]},
                "answer_attribution": [
                    {"turn_idx": 0, "source": "output.raw", "extracted_value": answer, "is_terminal": True,
                     "extraction_method": "log-likelihood" if choices else filter_name}
                ],
                "evaluation": {"score": points, "is_correct": points == 1},
            }  # fmt: skip
            yield json.dumps(instance) + "\n"


def _answer(sample: dict[str, Any], metric: str) -> tuple[str, list[str] | None]:
    """Return the answer of a sample, and the choices, of which it is the most likely one; None: it
    is generated.
    """
    responses, choices = sample["filtered_resps"], sample["choices"]
    if not all(isinstance(choice, str) for choice in choices):
        return str(responses[0]), None
    lengths = [max(len(choice), 1) if metric == "acc_norm" else 1 for choice in choices]
    scores = [
        float(response[0]) / length for response, length in zip(responses, lengths, strict=True)
    ]
    return choices[scores.index(max(scores))], choices
