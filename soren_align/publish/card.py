"""The model card: whether training changed the model, its scores, and how to reproduce it.

The whole page is written again from run.json, recipe.yaml and the evaluations' results.json whenever one of them
changes. It contains no local path: see `public`.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from ..core.errors import UserError
from ..core.files import write
from ..core.text import fenced, without_html
from ..evaluate.report import tables
from ..evaluate.report.results import Results, read_results
from ..recipe import Recipe, adapter_config, load_resolved, to_yaml
from ..run.folder import RunFolder
from ..run.record import (
    SURVIVAL_THRESHOLD,
    TRAINED,
    describe_dropped,
    describe_earlier_runs,
    describe_early_stop,
    describe_losses,
)
from ..tasks import TASKS

SMALL_CHANGE = 1e-4
"""Relative to the matrices' norm: a fortieth of bfloat16's ulp (2^-8)."""


def write_card(run: RunFolder, merged: bool = False) -> None:
    """Write README.md into the run's model, or into its merged model."""
    write((run.merged if merged else run.model) / "README.md", card(run, run.name, merged))


def card(run: RunFolder, title: str, merged: bool = False) -> str:
    """Return the page of a trained run: YAML front matter for the hub, then Markdown."""
    own_record = run.record(*TRAINED)
    recipe = load_resolved(run.recipe)
    record, yaml = public_record(own_record, recipe), public_recipe(recipe)
    is_adapter, train = adapter_config(run.model) is not None, own_record["data"]["train"]
    datasets = [source["path"] for source in train.get("sources", [train]) if "revision" in source]
    front_matter = ModelCardData(
        base_model=on_hub(own_record["start"]["path"]),
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="peft" if is_adapter and not merged else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", recipe.optimizer.name, recipe.task, *(["lora"] if is_adapter and not merged else [])],
    ).to_yaml()
    subject = "A LoRA adapter, trained" if is_adapter else "Trained"
    earlier = record["start"].get("after", [])
    further = " further" if earlier and earlier[-1]["task"] == recipe.task else ""
    method = f"{TASKS[recipe.task].title} with {recipe.optimizer.title}"
    merge = " It is merged with its base model." if merged else ""
    cells = {name: without_html(fact).replace("|", "\\|") for name, fact in _facts(recipe, record).items() if fact}
    facts = "".join(f"| {name} | {cell} |\n" for name, cell in cells.items())
    # A table for each suite in the run folder, with the starting checkpoint in its first row.
    evaluations = []
    for file in sorted(run.path.glob("eval/*/results.json")):
        try:
            results = read_results(file.parent)
        except UserError:  # the page states it
            evaluations.append(f"The results in `eval/{without_html(file.parent.name)}` could not be read.")
            continue
        if results is not None:
            evaluations.append(f"##{tables.markdown(_without_paths(results, recipe))}".rstrip())
    parts = [
        f"---\n{front_matter}\n---",
        f"# {without_html(title)}",
        without_html(f"{subject}{further} by {method} from {_start(recipe, record)}.{merge}"),
        _change(record["training"], is_adapter, merged),
        *(["## Evaluation", *evaluations] if evaluations else ["This model has not been evaluated."]),
        f"## Training\n\n| | |\n|---|---|\n{facts}".rstrip(),
        f"<details><summary>Recipe</summary>\n\n{fenced(yaml, 'yaml')}\n\n</details>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def public(value: Any) -> Any:
    """Return plain data without local paths, which name people and machines: of each, "..." and the last part, and for
    a run's model that of the run.

    Absolute paths, those that begin with ~ or .., and file:// are local; "shipped:..." and paths below the working
    directory are not.
    """
    if isinstance(value, dict):
        return {key: public(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [public(part) for part in value]
    if not isinstance(value, str):
        return value
    if _IS_LOCAL_PATH.fullmatch(value):  # as a whole, it may contain blanks
        return _without_folders(value)
    return _LOCAL_PATH.sub(lambda path: _without_folders(path[0]), value)


def _without_folders(path: str) -> str:
    parts = path.rstrip("/").split("/")
    return "/".join(["...", *parts[-2 if parts[-1] in ("model", "merged") and len(parts) > 2 else -1 :]])


_IS_LOCAL_PATH = re.compile(r"(file://)?(~[^\s/]*|\.\.|/[^\s/][^/\n]*)(/[^\n]*)+")
_LOCAL_PATH = re.compile(r"(?<![\w./~])(file://)?(~[^\s/]*|\.\.|/[^\s/]+)(/[^\s/\"'`,;()\[\]{}<>|]+)+/?")


def public_record(record: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return run.json for publication: the starting checkpoint by its name in the recipe, and no error message."""
    start = record["start"]["path"]
    named = record["start"] | {"path": recipe.model.name_or_path if Path(start).is_absolute() else start}
    return public({key: value for key, value in record.items() if key != "last_error"} | {"start": named})


def public_recipe(recipe: Recipe) -> str:
    """Return recipe.yaml for publication."""
    return to_yaml(public(recipe.model_dump()))


def on_hub(start: str) -> str | None:
    """Return the hub name of a starting checkpoint, or of its own start; None if a run between them is gone."""
    seen: set[str] = set()
    while Path(start).is_absolute():  # run.json has absolute paths of folders
        folder = Path(start)
        try:
            run = RunFolder(folder.parent).read() if folder.name in ("model", "merged") else None
            adapter = adapter_config(folder)
        except UserError:  # damaged or of an older version, which must not stop a later run's card
            return None
        if start in seen or not (run or adapter):
            return None
        seen.add(start)
        start = run["start"]["path"] if run and "start" in run else str((adapter or {})["base_model_name_or_path"])
    return start


def _change(training: dict[str, Any], is_adapter: bool, merged: bool) -> str:
    """Return whether training changed the model: the first lines that a person reads."""
    if "relative_change" not in training:
        return ""
    change, aux_change = training["relative_change"], training.get("aux_relative_change", 0.0)
    tensors = "factors of the adapter" if is_adapter else "matrices"
    lines = [f"Training changed the {tensors} by {_percent(change)} of their norm"]
    lines[0] += f", the other parameters by {_percent(aux_change)}." if "aux_relative_change" in training else "."
    saved = training.get("change_after_saving", {})
    survival = saved.get("matrices", {})
    if merged:
        lines.append("The rounding error of the merge was not measured.")
    elif survival:
        preserved, differ = (_percent(survival[key]) for key in ("projection", "fraction_changed"))
        rounding = f"; rounding preserves {preserved} of that change, and {differ} of the changed entries still differ"
        is_exact = min(survival.values()) > 0.9995
        lines.append(f"The model is saved in {saved['dtype']}{'' if is_exact else rounding}.")
    if "diverged" in training:
        lines.insert(0, f"**Training diverged, and this model is broken: {without_html(training['diverged'])}.**")
    elif change == aux_change == 0:
        lines.insert(0, "**Training did not change this model: its weights are those of the starting checkpoint.**")
    elif max(change, aux_change) < SMALL_CHANGE:
        lines.insert(0, "**Training hardly changed this model: expect the behavior of the starting checkpoint.**")
    elif survival and not merged and min(survival["fraction_changed"], survival["projection"]) < SURVIVAL_THRESHOLD:
        lines.insert(0, "**Most of the change was lost to rounding when the model was saved.**")
    lines += [f"{text[0].upper()}{text[1:]}." for text in describe_losses(training)]
    return " ".join(lines)


def _without_paths(results: Results, recipe: Recipe) -> Results:
    """Return results for publication: of a model in the hub's cache, its name there and the commit."""
    rows = []
    for row in results["rows"]:
        match = re.search(r"models--([^/]+)--([^/]+)/snapshots/(\w+)", row["model"] or "")
        rows.append(row | {"model": f"{match[1]}/{match[2]}@{match[3]}" if match else None})
    settings, title = results["settings"].copy(), results["title"]
    if Path(settings.get("data", "hub")).is_absolute():
        settings["data"] = (recipe.eval and recipe.eval.data_root) or "local files"
        title = re.sub(r": on the data in .*", ": on local data", title, flags=re.DOTALL)
    return public(results | {"title": title, "rows": rows, "settings": settings})


def _facts(recipe: Recipe, record: dict[str, Any]) -> dict[str, str | None]:
    optimizer, training, parameters = recipe.optimizer, record["training"], record["parameters"]
    measured, seeds, start = record.get("optimizer", {}), record["seeds"], record["start"]["sha256_or_revision"]
    inner = {"lr", "aux_lr", "name", *(() if optimizer.aux else ("aux",))}
    settings = {k: v for k, v in optimizer.model_dump(exclude=inner).items() if v is not None}
    aux = f"; AdamW on the other parameters, learning rate {optimizer.aux_lr:g}" if optimizer.aux_lr else ""
    name = measured.get("class", optimizer.title) + (f" ({optimizer.map_title})" if optimizer.map_title else "")
    matrices = f"{measured['num_matrices']} " if measured.get("num_matrices") else "the "
    saved = training.get("change_after_saving", {}).get("dtype")
    early, best, validation = (training.get(key) for key in ("stopped_early", "best_model", "validation"))
    share = parameters.get("spectral_share")  # none of AdamW
    share = f" ({share:.1%} of the trained parameters)" if share else ""
    processes, device = record.get("processes") or 1, record["device"].split(":")[0]
    return {
        "trained from": _start(recipe, record),
        "starting weights": start and f"{'sha256' if len(start) == 64 else 'revision'} {start}",
        "data": _data(record["data"]["train"]),
        "optimizer": f"{name} on {matrices}matrices{share}, learning rate {optimizer.lr:g}{aux}",
        "optimizer settings": ", ".join(f"{key} {_word(value)}" for key, value in settings.items()),
        "steps": f"{training['steps']}, {record['global_batch_size']} examples each",
        "ended early": f"of {early['max_steps']} steps: {describe_early_stop(early)}" if early else None,
        "validation perplexity": validation
        and f"{validation['perplexity']:.2f}, of {validation['num_tokens']:,} held-out tokens",
        "model of step": f"{best['step']}, the best by {best['metric']}: {best['value']:.4g}" if best else None,
        "processes": f"{processes} ({record['parallel']}, {device})" if processes > 1 else f"1 ({device})",
        "parameters": f"{parameters['total']:,}, of which {parameters['trainable']:,} trained",
        "dtype": f"{', '.join(parameters['dtype'])} in training" + (f", saved in {saved}" if saved else ""),
        "seeds": ", ".join(f"{key} {value}" for key, value in seeds.items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "commit": record.get("commit"),
        "started": record.get("started"),
    }


def _start(recipe: Recipe, record: dict[str, Any]) -> str:
    name, seed = record["start"]["path"], recipe.model.init_seed
    if seed is not None:
        return f"random weights (seed {seed}) with the architecture of {name}"
    return ", ".join(filter(None, (name, describe_earlier_runs(record["start"]))))


def _data(train: dict[str, Any]) -> str:
    """Return each source with its revision or hash, then the number of examples."""
    sources = train.get("sources", [train])
    total = train["num_kept"] + sum(train["dropped"].values())
    number = f"{train['num_kept']} of {total} examples"
    if "num_read" in train:
        number = f"streamed, {train['num_read']:,} examples read"
    counts = [number, describe_dropped(train["dropped"])]
    return "; ".join([*(_source(source) for source in sources), ", ".join(filter(None, counts))])


def _source(source: dict[str, Any]) -> str:
    identity = f"revision {source['revision']}" if "revision" in source else f"sha256 {source.get('sha256')}"
    if "num_files" in source:  # of a stream of files, whose contents are not hashed
        identity = f"{source['num_files']:,} files of {source['num_bytes']:,} bytes"
    weight = f", weight {source['weight']:g}" if source.get("weight", 1) != 1 else ""
    name = f"{source['name']}, " if "name" in source else ""
    return f"{source['path']} ({name}{source['split']}, {identity}{weight})"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(part)}" for key, part in value.items()).removeprefix("name ")
    return " ".join(map(_word, value)) if isinstance(value, list) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
