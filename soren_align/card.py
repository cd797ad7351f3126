"""The model card: whether training moved the model, what it scores, and what is needed to make it again.

It is composed anew, whole, from run.json, recipe.yaml and the evaluations' results.json, each time that one of them has
changed. Of this machine it has no path but those that the user wrote into the recipe.
"""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from .errors import UserError
from .evaluate import tables
from .evaluate.results import read_results
from .evaluate.tables import in_cell, plain
from .files import write
from .manifest import SURVIVAL_THRESHOLD, TRAINED, describe_dropped
from .recipe import Recipe, adapter_config, load_resolved
from .run_folder import RunFolder

HARDLY = 1e-4
"""Of their norm. Matrices that changed by less moved a fortieth of the gap between two bfloat16 numbers (2^-8)."""
NAMES = {"soren": "Soren", "muon": "Muon", "htmuon": "HTMuon", "adamw": "AdamW"}


def write_card(run: RunFolder, merged: bool = False) -> None:
    """Write README.md into the run's model, or into its merged model."""
    write((run.merged if merged else run.model) / "README.md", card(run, run.name, merged))


def card(run: RunFolder, title: str, merged: bool = False) -> str:
    """The whole page of a trained run: YAML front matter for the hub, then Markdown."""
    recipe, record = load_resolved(run.recipe), run.record(*TRAINED)
    is_adapter = adapter_config(run.model) is not None
    facts = "".join(f"| {name} | {in_cell(said)} |\n" for name, said in _facts(recipe, record).items() if said)
    parts = [
        f"---\n{_front_matter(recipe, record, is_adapter and not merged)}\n---",
        f"# {plain(title)}",
        plain(_first_words(recipe, record, is_adapter, merged)),
        _moved(record["training"], is_adapter, merged),
        *_evaluations(run, recipe),
        f"## How it was made\n\n| | |\n|---|---|\n{facts}".rstrip(),
        f"<details><summary>The recipe</summary>\n\n{_fenced(run.recipe.read_text(encoding='utf-8'))}\n\n</details>",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def public(record: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """run.json for strangers: the start by the name that the recipe gives it, and no message of this machine's."""
    start = record["start"] | {"path": _named(record, recipe)}
    return {key: value for key, value in record.items() if key != "last_error"} | {"start": start}


def on_hub(start: str) -> str | None:
    """The hub's name of a start, or of what it was trained from, as far as the runs between are still here."""
    seen: set[str] = set()
    while Path(start).is_absolute():  # run.json has folders written out to their root
        folder = Path(start)
        try:
            made_by = RunFolder(folder.parent).read() if folder.name in ("model", "merged") else None
            adapter = adapter_config(folder)
        except UserError:  # damaged since; the card of what was trained from it does not depend on it
            return None
        if start in seen or not (made_by or adapter):
            return None
        seen.add(start)
        start = (
            made_by["start"]["path"]
            if made_by and "start" in made_by
            else str((adapter or {})["base_model_name_or_path"])
        )
    return start


def _front_matter(recipe: Recipe, record: dict[str, Any], is_adapter: bool) -> str:
    data = record["data"]["train"]
    datasets = [source["path"] for source in data.get("sources", [data]) if "revision" in source]
    return ModelCardData(
        base_model=on_hub(record["start"]["path"]),
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", recipe.optimizer.name, recipe.task, *(["lora"] if is_adapter else [])],
    ).to_yaml()


def _first_words(recipe: Recipe, record: dict[str, Any], is_adapter: bool, merged: bool) -> str:
    what = "A LoRA adapter, trained" if is_adapter else "Trained"
    whole = " It is merged with its base into one model." if merged else ""
    name = NAMES[recipe.optimizer.name]
    return f"{what} by {recipe.task.upper()} with {name} from {_start(recipe, record)}.{whole}"


def _moved(training: dict[str, Any], is_adapter: bool, merged: bool) -> str:
    """Whether training moved the model, in the first lines that a person reads."""
    if "relative_change" not in training:  # a run of an older version
        return ""
    change, rest = training["relative_change"], training.get("aux_relative_change", 0.0)
    what = "factors of the adapter" if is_adapter else "matrices"
    lines = [f"The {what} changed by {_percent(change)} of their norm over training"]
    lines[0] += f", everything else by {_percent(rest)}." if "aux_relative_change" in training else "."
    saved = training.get("survival", {})
    kept = saved.get("matrices", {})
    if merged:
        lines.append("What merging rounds off was not measured.")
    elif kept:
        lines.append(
            f"In the {saved['dtype']} that it is saved in, {_percent(kept['projection'])} of that change is kept, and "
            f"{_percent(kept['entries'])} of the entries that changed differ from the start."
        )
    if change == rest == 0:
        lines.insert(0, "**Training did not move this model: its weights are those that it started from.**")
    elif max(change, rest) < HARDLY:
        lines.insert(0, "**Training hardly moved this model: expect what it started from.**")
    elif kept and not merged and min(kept["entries"], kept["projection"]) < SURVIVAL_THRESHOLD:
        lines.insert(0, "**Most of what training did was rounded away when the model was saved.**")
    else:
        lines.insert(0, "Training moved this model.")
    if training["first_loss"] is not None and training["last_loss"] is not None:
        lines.append(f"Its loss went from {training['first_loss']:.3f} to {training['last_loss']:.3f}.")
    return " ".join(lines)


def _evaluations(run: RunFolder, recipe: Recipe) -> list[str]:
    """A table for each suite in the run folder, the starting checkpoint in its first row.

    A finished training is not held up by results that cannot be read: then the page says so.
    """
    parts = []
    for file in sorted(run.path.glob("eval/*/results.json")):
        try:
            results = read_results(file.parent)
        except UserError:
            parts.append(f"The results in `eval/{plain(file.parent.name)}` could not be read.")
            continue
        if results is not None:
            parts.append(f"##{tables.markdown(_shown(results, recipe))}".rstrip())
    return ["## What it scores", *parts] if parts else ["It has not been evaluated."]


def _shown(results: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    rows = [row | {"model": _from_cache(row["model"])} for row in results["rows"]]
    settings, title = dict(results["settings"]), results["title"]
    if Path(settings.get("data", "hub")).is_absolute():
        settings["data"] = (recipe.eval and recipe.eval.data_root) or "local files"
        title = re.sub(r": on the data in .*", ": on local data", title, flags=re.DOTALL)
    return results | {"title": title, "rows": rows, "settings": settings}


def _from_cache(model: str) -> str | None:
    """owner/name@commit, where a folder is the hub's cache of it; None for any other folder."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/(\w+)", model)
    return f"{found[1]}/{found[2]}@{found[3]}" if found else None


def _facts(recipe: Recipe, record: dict[str, Any]) -> dict[str, str | None]:
    optimizer, training, parameters = recipe.optimizer, record["training"], record["parameters"]
    proof, seeds = record.get("optimizer", {}), record["seeds"]
    inner = {"lr", "aux_lr", "name", *(() if optimizer.aux else ("aux",))}
    settings = {k: v for k, v in optimizer.model_dump(exclude=inner).items() if v is not None}
    rest = f", AdamW on everything else at {optimizer.aux_lr:g}" if optimizer.aux_lr else ""
    matrices = f"{proof['num_matrices']} " if proof.get("num_matrices") else "the "
    saved = training.get("survival", {}).get("dtype")
    processes, device = record.get("processes") or 1, record["device"].split(":")[0]
    return {
        "trained from": _start(recipe, record),
        "weights there": _identity(record["start"]["sha256_or_revision"]),
        "data": _data(record["data"]["train"]),
        "optimizer": f"{proof.get('class', optimizer.name)} on {matrices}matrices at {optimizer.lr:g}{rest}",
        "its settings": ", ".join(f"{key} {_word(value)}" for key, value in settings.items()),
        "steps": f"{training['steps']} of {record['examples_per_step']} rows",
        "processes": f"{processes} ({record['parallel']}, {device})" if processes > 1 else f"1 ({device})",
        "parameters": f"{parameters['total']:,}, of which {parameters['trainable']:,} trained",
        "dtype": f"{', '.join(parameters['dtype'])} in training" + (f", saved in {saved}" if saved else ""),
        "seeds": ", ".join(f"{key} {value}" for key, value in seeds.items() if value is not None),
        "versions": ", ".join(f"{name} {version}" for name, version in record["versions"].items()),
        "commit": record.get("commit"),
        "began": record.get("started"),
    }


def _start(recipe: Recipe, record: dict[str, Any]) -> str:
    name, seed = _named(record, recipe), recipe.model.init_seed
    return f"random weights (seed {seed}) in the form of {name}" if seed is not None else name


def _named(record: dict[str, Any], recipe: Recipe) -> str:
    start = record["start"]["path"]
    return recipe.model.name_or_path if Path(start).is_absolute() else start


def _identity(said: str | None) -> str | None:
    """What a start's weights are: sha256 of a folder's files, or the hub's commit."""
    return f"{'sha256' if len(said) == 64 else 'revision'} {said}" if said else None


def _data(train: dict[str, Any]) -> str:
    """Each source with its revision or hash, then the rows that were kept of all."""
    sources = train.get("sources", [train])
    kept = f"{train['num_examples']} of {train['num_examples'] + sum(train['dropped'].values())} rows kept"
    counts = [kept, describe_dropped(train["dropped"])]
    return "; ".join([*(_source(source) for source in sources), ", ".join(filter(None, counts))])


def _source(source: dict[str, Any]) -> str:
    found = f"revision {source['revision']}" if "revision" in source else f"sha256 {source.get('sha256')}"
    weight = f", weight {source['weight']:g}" if source.get("weight", 1) != 1 else ""
    return f"{source['path']} ({source['split']}, {found}{weight})"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return " ".join(map(_word, value)) if isinstance(value, list) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _fenced(text: str) -> str:
    """A block of YAML, by a fence that no line of it can close."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}yaml\n{text}{fence}"
