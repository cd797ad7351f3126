"""Write the model card.

The whole page is written again from run.json, recipe.yaml, samples and the evaluations' results
whenever one of them changes; card.md is its template. It contains no local path: see `public`.
"""

import json
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import EvalResult, ModelCardData, constants
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from ..core.errors import UserError
from ..core.files import write
from ..core.text import Table, fenced, html_text, markdown_line, without_html
from ..evaluate.report import tables
from ..evaluate.report.results import NAME, Results, Row, evaluations, read_results
from ..recipe import Recipe, adapter_config, load_resolved, to_yaml
from ..run.folder import RunFolder
from ..run.preferences import describe_preferences
from ..run.provenance import declared_digits
from ..run.record import (
    SURVIVAL_THRESHOLD,
    TRAINED,
    describe_dropped,
    describe_earlier_runs,
    describe_early_stop,
    describe_losses,
)
from ..tasks import TASKS
from .answers import Answers, of_evaluation, of_samples

SMALL_CHANGE = 1e-4
"""Relative to the matrices' norm: a fortieth of bfloat16's ulp (2^-8)."""
MAX_GAINS = 8
"""Scores in the first lines; the table has the others."""
MAX_PICTURE_BYTES = 4 << 20
WIDTHS = {"curves": 600, "scores": 520}
"""Widths of pictures on a wide page: half of their pixels."""


def write_card(run: RunFolder, merged: bool = False) -> None:
    """Write README.md into the run's model, or into its merged model, with copies of the pictures
    that it shows.
    """
    folder = run.merged if merged else run.model
    for name, picture in pictures(run).items():
        write(folder / name, picture.read_bytes())
    write(folder / "README.md", card(run, run.name, merged))


def pictures(run: RunFolder) -> dict[str, Path]:
    """Return the pictures of a run by their names beside the card: curves.png, scores.png,
    scores-2.png, each also as NAME-dark.png."""
    scores = [folder / "scores.png" for folder in evaluations(run.path)]
    names = {"curves": run.curves} | {
        f"scores{f'-{i}' * (i > 1)}": file for i, file in enumerate(scores, 1)
    }
    files = {
        f"{name}{dark}.png": file.with_stem(file.stem + dark)
        for name, file in names.items()
        for dark in ("", "-dark")
    }
    shown = {}
    for name, file in files.items():
        # The pictures are published: no links, no large files, and nothing that only has the name
        # of a PNG.
        if not file.is_symlink() and file.is_file() and file.stat().st_size <= MAX_PICTURE_BYTES:
            with file.open("rb") as stream:
                if stream.read(8) == b"\x89PNG\r\n\x1a\n":
                    shown[name] = file
    return shown


def card(
    run: RunFolder, title: str, merged: bool = False, *, repo: str = "", revision: str | None = None
) -> str:
    """Return the page of a trained run: YAML front matter for the hub, then Markdown.

    title: the model's name. repo, revision: where it is uploaded to; "": the page is read in the
    model's folder.
    """
    # From files alone, without the model: a card is written again whenever an evaluation ends.
    own_record, recipe = run.record(*TRAINED), load_resolved(run.recipe)
    record, train = public_record(own_record, recipe), own_record["data"]["train"]
    is_adapter = adapter_config(run.model) is not None
    is_lora = is_adapter and not merged
    sources = train.get("sources", [train])
    base, shown, url = on_hub(own_record["start"]["path"]), pictures(run), ""
    if repo:  # pages of the hub do not lie beside their files
        url = f"{constants.ENDPOINT}/{repo}/resolve/{quote(revision or 'main', safe='')}/"
    scores, gains, eval_results, answers = _evaluated(run, recipe, shown, url, merged)
    datasets = [source["path"] for source in sources if "revision" in source]
    # The hub's filters and links: base model, data, and the scores of its leaderboards.
    front_matter = ModelCardData(
        base_model=base,
        datasets=list(dict.fromkeys(datasets)) or None,
        library_name="peft" if is_lora else "transformers",
        pipeline_tag="text-generation",
        tags=["trl", recipe.optimizer.name, recipe.task, *(["lora"] if is_lora else [])],
        model_name=without_html(title) if eval_results else None,
        eval_results=eval_results or None,
    ).to_yaml()
    # Texts of strangers go through the template's filters, which leave no HTML and no new lines.
    what = TASKS[recipe.task].title + (f" of {base.split('/')[-1]}" if base else "")
    what += f" with {recipe.optimizer.title}"
    what += " from random weights" if recipe.model.init_seed is not None else ""
    earlier, place = record["start"].get("after", []), json.dumps(repo or ".")
    facts = [[name, fact] for name, fact in _facts(recipe, record).items() if fact]
    rows = [[str(public(text)) for text in row] for row in (answers.rows if answers else [])]
    columns = ["prompt", answers.before, answers.after] if answers else []
    return _template().render(
        front_matter=front_matter,
        title=title,
        what=f"LoRA adapter, {what}" if is_lora else what,
        merged=merged,
        is_adapter=is_adapter,
        is_lora=is_lora,
        num_parameters=record["parameters"]["trainable" if is_lora else "total"],
        is_further=bool(earlier) and earlier[-1]["task"] == recipe.task,
        method=f"{TASKS[recipe.task].title} with {recipe.optimizer.title}",
        start=_start(recipe, record),
        num_examples=train["num_kept"],
        sources=[public(source["path"]) for source in sources],
        gains=gains,
        scores=scores,
        place=f"{place}, revision={json.dumps(revision)}" if revision else place,
        comment="" if repo else "  # this folder",
        prompt=_prompt(run, recipe, answers),
        answers=answers,
        answers_table=Table(columns, rows, align="lll").markdown() if answers else "",
        curves=_picture("curves", "Losses along the training", shown, url),
        facts=Table(["fact", "value"], facts, align="ll").markdown(),
        recipe=fenced(to_yaml(public(recipe.model_dump())), "yaml"),
        **_change(record["training"], merged),
    )


def _evaluated(
    run: RunFolder, recipe: Recipe, shown: dict[str, Path], url: str, merged: bool
) -> tuple[list[str], list[str], list[EvalResult], Any]:
    """Return what the evaluations of a run add to its page: a table for each suite, with the
    starting checkpoint in its first row; gains; the scores for the hub; and the answers of the
    first suite that has some in words, if the run has no samples.
    """
    scores, gains = list[str](), list[str]()
    eval_results, answers = list[EvalResult](), of_samples(run)
    for number, folder in enumerate(evaluations(run.path), 1):
        try:
            results, index = public_results(folder, run, recipe)
        except UserError:  # the page states it
            scores.append(f"The results in `eval/{without_html(folder.name)}` could not be read.")
            continue
        heading, _, rest = tables.markdown(results, fold=True).partition("\n\n")
        name = "scores" if number == 1 else f"scores-{number}"
        picture = _picture(name, results["title"], shown, url)
        scores += filter(None, [f"##{heading}", picture, rest.rstrip()])
        if index is None:
            continue
        own = results["rows"][index]
        start, lines = tables.gains(results, own)
        gains.append(_gains(results, own, start, lines))
        # The adapter was evaluated, not the merged model.
        eval_results += [] if merged else _eval_results(results, own, run)
        answers = answers or of_evaluation(folder, results, own, start)
    return scores, gains, eval_results, answers


def _template() -> Template:
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=folder,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"plain": without_html, "line": markdown_line, "percent": _percent}
    return environment.get_template("card.md")


def _gains(results: Results, own: Row, start: Row, lines: list[str]) -> str:
    """Return the first lines about a suite: each score, and whether it is better than that of the
    start.
    """
    title = f"{results['title']}; percent"
    if start is not own:
        title += f", beside {start['name']}"
    if any("[" in line for line in lines):
        title += ", with the 95% interval of the difference"
    first = lines[:MAX_GAINS]
    if len(lines) > MAX_GAINS:
        first.append(f"{len(lines) - MAX_GAINS} more in the table below")
    listed = [f"  - {markdown_line(line)}" for line in (*first, *tables.warnings(results))]
    return "\n".join([markdown_line(title), *listed])


def _picture(name: str, alt: str, shown: dict[str, Path], url: str) -> str:
    """Return a picture for a light and for a dark page; "" if there is none."""
    light, dark = f"{name}.png", f"{name}-dark.png"
    if light not in shown:
        return ""
    width, alt = WIDTHS[name.split("-")[0]], html_text(without_html(alt))
    image = f'<img src="{url}{light}" alt="{alt}" width="{width}">'
    source = (
        f'<source media="(prefers-color-scheme: dark)" srcset="{url}{dark}">'
        if dark in shown
        else ""
    )
    return f"<picture>{source}{image}</picture>"


def _eval_results(results: Results, own: Row, run: RunFolder) -> list[EvalResult]:
    """Return the scores for the hub's `model-index`, without those of a part of the questions.

    Its `args` have what it has no fields for: the 95% interval, the number of questions, the seed
    of the training, and of a study's final run the digits of the declaration.
    """
    settings: dict[str, Any] = dict(results["settings"])
    metrics, shots = settings.get("metrics", {}), settings.get("num_fewshot") or {}
    facts = {
        "seed": run.record("seeds")["seeds"].get("trainer"),
        "study_declaration": declared_digits(run.path),
    }
    eval_results = []
    for column, score in own["scores"].items():
        if column not in metrics or settings.get("limit") or not math.isfinite(score["value"]):
            continue
        args = {
            "num_questions": score.get("n"),
            "stderr": score.get("stderr"),
            "low": score.get("low"),
        }
        args |= {"high": score.get("high"), **facts}
        args = {
            key: round(value, 2) if isinstance(value, float) else value
            for key, value in args.items()
        }
        eval_results.append(
            EvalResult(
                task_type="text-generation",
                task_name="Text Generation",
                dataset_type=without_html(column),
                dataset_name=without_html(f"{column} ({results['title']})"),
                dataset_args={"num_few_shot": shots[column]} if column in shots else None,
                metric_type=without_html(metrics[column].split(",")[0]),
                metric_name=without_html(
                    f"{metrics[column].removesuffix(',none').replace(',', ', ')}, percent"
                ),
                metric_value=round(score["value"], 2),
                metric_args={key: value for key, value in args.items() if value is not None}
                or None,
            )
        )
    return eval_results


def _prompt(run: RunFolder, recipe: Recipe, answers: Answers | None) -> str:
    """Return a prompt in Python: the first of the answers, or a greeting."""
    # The reader's first command should show something that the model was trained for.
    prompt = str(public(answers.rows[0][0])) if answers else ""
    is_short = 0 < len(prompt) <= 80 and prompt.isprintable()
    text = json.dumps(prompt if is_short else "Hello", ensure_ascii=False)
    is_chat = recipe.task != "pretrain" and (run.model / "chat_template.jinja").is_file()
    return f'[{{"role": "user", "content": {text}}}]' if is_chat else text


def public(value: Any) -> Any:
    """Return plain data without local paths, which name people and machines: of each, "..." and the
    last part, and for a run's model that of the run.

    Absolute paths, those that begin with ~ or .., and file:// are local; "shipped:..." and paths
    below the working directory are not.
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
    # Every run has a folder "model": the name of the run stays beside it.
    parts = path.rstrip("/").split("/")
    return "/".join(
        ["...", *parts[-2 if parts[-1] in ("model", "merged") and len(parts) > 2 else -1 :]]
    )


_IS_LOCAL_PATH = re.compile(r"(file://)?(~[^\s/]*|\.\.|/[^\s/][^/\n]*)(/[^\n]*)+")
_LOCAL_PATH = re.compile(
    r"(?<![\w./~])(file://)?(~[^\s/]*|\.\.|/[^\s/]+)(/[^\s/\"'`,;()\[\]{}<>|]+)+/?"
)


def public_record(record: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return run.json for publication: the starting checkpoint by its name in the recipe, and no
    error message.
    """
    start = record["start"]["path"]
    named = record["start"] | {
        "path": recipe.model.name_or_path if Path(start).is_absolute() else start
    }
    return public(
        {key: value for key, value in record.items() if key != "last_error"} | {"start": named}
    )


def on_hub(start: str) -> str | None:
    """Return the hub name of a starting checkpoint, or of its own start; None if a run between them
    is gone.
    """
    seen: set[str] = set()
    while Path(start).is_absolute():  # run.json has absolute paths of folders
        folder = Path(start)
        try:
            run = RunFolder(folder.parent).read() if folder.name in ("model", "merged") else None
            adapter = adapter_config(folder)
        except UserError:  # damaged or of an older version, which must not stop a later run's card
            return None
        # A chain that leads back to itself would have no end.
        if start in seen or not (run or adapter):
            return None
        seen.add(start)
        start = (
            run["start"]["path"]
            if run and "start" in run
            else str((adapter or {})["base_model_name_or_path"])
        )
    return start


def _change(training: dict[str, Any], merged: bool) -> dict[str, Any]:
    """Return the page's sentences about the change of the weights, and a warning if training broke
    or did not change the model.
    """
    # The paper's learning rates change a weight by 1e-9 to 1e-8 a step: a training that does
    # nothing must not look like one.
    change, aux_change = (training.get(f"{part}relative_change") for part in ("", "aux_"))
    saved = training.get("change_after_saving", {})
    survival, largest, warning = saved.get("matrices", {}), max(change or 0, aux_change or 0), ""
    if change is None:
        pass
    elif "diverged" in training:
        warning = f"Training diverged, and this model is broken: {training['diverged']}."
    elif largest == 0:
        warning = "Training did not change this model: its weights are those of the starting "
        warning += "checkpoint."
    elif largest < SMALL_CHANGE:
        warning = "Training hardly changed this model: expect the behavior of the starting "
        warning += "checkpoint."
    elif survival and not merged and min(survival.values()) < SURVIVAL_THRESHOLD:
        warning = "Most of the change was lost to rounding when the model was saved."
    return {
        "warning": warning,
        "change": change,
        "aux_change": aux_change,
        "survival": survival,
        "saved_dtype": saved.get("dtype"),
        "measurements": [*describe_losses(training), *describe_preferences(training, remedy=False)],
    }


def public_results(folder: Path, run: RunFolder, recipe: Recipe) -> tuple[Results, int | None]:
    """Return an evaluation's results for publication, and the row of the run's model.

    Of a model in the hub's cache, the results have its name there and the commit. The run's row is
    found by its folder; if the run was moved, it is the last one if that is of the task. Raises
    UserError if the results are damaged.
    """
    results = read_results(folder)
    if results is None:
        raise UserError(f"{folder / NAME}: is missing; evaluate the run again")
    # Rows name folders of this machine: they are found by them, then replaced by hub names.
    models = [row["model"] for row in results["rows"]]
    own = [
        i
        for i, model in enumerate(models)
        if model and Path(model).resolve() == run.model.resolve()
    ]
    if not own and results["rows"][-1]["name"] == TASKS[recipe.task].title:
        own = [len(models) - 1]
    matches = [
        re.search(r"models--([^/]+)--([^/]+)/snapshots/(\w+)", model or "") for model in models
    ]
    names = [f"{match[1]}/{match[2]}@{match[3]}" if match else None for match in matches]
    rows = [row | {"model": name} for row, name in zip(results["rows"], names, strict=True)]
    settings, title = results["settings"].copy(), results["title"]
    if Path(settings.get("data", "hub")).is_absolute():
        settings["data"] = (recipe.eval and recipe.eval.data_root) or "local files"
        title = re.sub(r": on the data in .*", ": on local data", title, flags=re.DOTALL)
    return public(results | {"title": title, "rows": rows, "settings": settings}), (
        own[0] if own else None
    )


def _facts(recipe: Recipe, record: dict[str, Any]) -> dict[str, str | None]:
    optimizer, training, parameters = recipe.optimizer, record["training"], record["parameters"]
    # run.json has more: here is what a reader needs to train the same model again.
    measured, seeds, start = (
        record.get("optimizer", {}),
        record["seeds"],
        record["start"]["sha256_or_revision"],
    )
    inner = {"lr", "aux_lr", "name", *(() if optimizer.aux else ("aux",))}
    settings = {k: v for k, v in optimizer.model_dump(exclude=inner).items() if v is not None}
    aux = (
        f"; AdamW on the other parameters, learning rate {optimizer.aux_lr:g}"
        if optimizer.aux_lr
        else ""
    )
    name = measured.get("class", optimizer.title) + (
        f" ({optimizer.map_title})" if optimizer.map_title else ""
    )
    matrices = f"{measured['num_matrices']} " if measured.get("num_matrices") else "the "
    saved = training.get("change_after_saving", {}).get("dtype")
    early, best, validation = (
        training.get(key) for key in ("stopped_early", "best_model", "validation")
    )
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
        "ended early": (
            f"of {early['max_steps']} steps: {describe_early_stop(early)}" if early else None
        ),
        "validation perplexity": (
            validation
            and f"{validation['perplexity']:.2f}, of {validation['num_tokens']:,} held-out tokens"
        ),
        "model of step": (
            f"{best['step']}, the best by {best['metric']}: {best['value']:.4g}" if best else None
        ),
        "processes": (
            f"{processes} ({record['parallel']}, {device})" if processes > 1 else f"1 ({device})"
        ),
        "parameters": f"{parameters['total']:,}, of which {parameters['trainable']:,} trained",
        "dtype": (
            f"{', '.join(parameters['dtype'])} in training"
            + (f", saved in {saved}" if saved else "")
        ),
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
    identity = (
        f"revision {source['revision']}"
        if "revision" in source
        else f"sha256 {source.get('sha256')}"
    )
    if "num_files" in source:  # of a stream of files, whose contents are not hashed
        identity = f"{source['num_files']:,} files of {source['num_bytes']:,} bytes"
    weight = f", weight {source['weight']:g}" if source.get("weight", 1) != 1 else ""
    name = f"{source['name']}, " if "name" in source else ""
    return f"{source['path']} ({name}{source['split']}, {identity}{weight})"


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_word(part)}" for key, part in value.items()).removeprefix(
            "name "
        )
    return " ".join(map(_word, value)) if isinstance(value, list) else str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
