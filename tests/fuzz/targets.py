"""What is called on each input, and what counts as fine: it is accepted or refused by a UserError, nothing else.

No process is started, and models answer at once.
"""

import contextlib
import copy
import io
import os
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from soren_align import importers, recipe
from soren_align.cli import app
from soren_align.core import errors
from soren_align.launch import commands, preparation
from soren_align.run.folder import RunFolder, step_of
from soren_align.run.provenance import provenance
from tests.fuzz import folders
from tests.fuzz.box import Box

REFUSED = 2
"""The exit code of a UserError."""
MOST_OUTPUT = 60_000
"""Characters that a command may say."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class Wrong(AssertionError):
    """Accepted, and yet not as it should be."""


@contextlib.contextmanager
def _without_processes(*, trains: bool = True):
    """Nothing starts ranks; trains: nor does anything train."""
    fakes = [mock.patch.object(preparation, "provenance", side_effect=lambda: dict(_provenance()))]
    fakes += [mock.patch.object(commands, "_start_ranks", return_value=0)]
    fakes += [] if trains else [mock.patch.object(commands, "train_here", return_value=0)]
    with mock.patch.dict(os.environ), contextlib.ExitStack() as stack:
        for fake in fakes:
            stack.enter_context(fake)
        yield


@cache
def _provenance() -> dict[str, Any]:
    return provenance()


def a_recipe(box: Box, arguments: dict[str, Any]) -> None:
    """Load it; if it is accepted, read it back, and prepare its run folder."""
    _and_start(recipe.load("recipe.yaml", task=arguments["task"]), arguments["processes"])


def _and_start(accepted: Any, processes: int) -> None:
    text = recipe.to_yaml(accepted)
    if _plain(recipe.load_text(text)) != _plain(accepted):
        raise Wrong("read back, it is another recipe")
    recipe.global_batch(accepted, processes)
    if Path(accepted.run.output_dir).expanduser().resolve().is_relative_to(Path.cwd()):
        with _without_processes(trains=False):
            commands.train(accepted, processes)


def _plain(made: Any) -> str:
    return repr(made.model_dump())  # nan equals nan


def an_override(box: Box, arguments: dict[str, Any]) -> None:
    """As `a_recipe`, of a shipped one with --set."""
    _and_start(recipe.load(arguments["name"], [box.told(text) for text in arguments["texts"]]), 1)


def an_import(box: Box, arguments: dict[str, Any]) -> None:
    """Import it; what comes out is a recipe, and the table has 80 columns."""
    text, table = importers.import_file(Path(arguments["name"]), arguments["task"])
    recipe.load_text(text)
    if max(map(len, table.splitlines())) > 80:
        raise Wrong("the table is wider than 80 columns")


def a_data_file(box: Box, arguments: dict[str, Any]) -> None:
    """Load the split or the mixture; render and count what is left."""
    import datasets
    from soren_align import data

    spec = arguments["spec"] | {"path": arguments["file"]}
    task, only = arguments["task"], arguments["only_assistant"]
    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", box.own[0]):
        if arguments["weights"]:
            sources = [recipe.TrainSplit.model_validate(spec | {"weight": weight}) for weight in arguments["weights"]]
            loaded = data.mix([data.load_split(source, task) for source in sources], sources, 0)
        else:
            loaded = data.load_split(recipe.DataSplit.model_validate(spec), task)
        tokenizer = _tokenizer()
        if Path("own.jinja").is_file():
            data.set_template(tokenizer, "own.jinja", None)
        data.check_template(tokenizer, task, only, loaded.dataset)
        account = data.dataset_stats(loaded.dataset, task, tokenizer, max_length=64, assistant_only_loss=only,
                                     source_indices=loaded.source_indices)  # fmt: skip
        if account.num_kept:
            data.show_example(account)


def _tokenizer() -> Any:
    return copy.deepcopy(_loaded_tokenizer())


@cache
def _loaded_tokenizer() -> Any:
    from soren_align.core import shipped
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shipped.ROOT / "recipes/quickstart/base")


def a_run_folder(box: Box, arguments: dict[str, Any]) -> int:
    """Run a command on it, as far as it goes without a model; its output is short and plain."""
    said = io.StringIO()
    before = {name: _content(name) for name in arguments["foreign"]}
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), _without_models(box.own[0]):
        code = _command([box.told(word) for word in arguments["command"]])
    if found := CONTROL.search(said.getvalue()):
        raise Wrong(f"the output has the control character {found[0]!r}")
    if len(said.getvalue()) > MOST_OUTPUT:
        raise Wrong(f"the output has {len(said.getvalue())} characters")
    if changed := [name for name, content in before.items() if _content(name) != content]:
        raise Wrong(f"files of others were overwritten: {', '.join(changed)}")
    if code not in (0, REFUSED):
        raise Wrong(f"exit code {code}")
    return code


def _content(name: str) -> bytes | None:
    return Path(name).read_bytes() if Path(name).is_file() else None


def _command(words: list[str]) -> int:
    """The exit code of a soren-align command."""
    with _without_processes():
        return app.main(words)


@contextlib.contextmanager
def _without_models(cache: Path | None = None):
    """Models answer at once, a training is over at once, and the hub takes everything. cache: of datasets."""
    import datasets
    from soren_align.evaluate.report import tables
    from soren_align.evaluate.run import harness, stage
    from soren_align.publish import push
    from soren_align.training import checkpoints, run
    from soren_align.training import setup as training_setup
    from soren_align.training.model import starting_checkpoint

    def answers(model: Any, suite: Any, *_: Any, **__: Any) -> Any:
        columns = [task.column for task in suite.tasks]
        score = {"value": 50.0, "stderr": 1.0, "low": 48.0, "high": 52.0, "n": 2}
        sample = {"arguments": [("a", "b")], "resps": [["x"]], "filtered_resps": ["x"], "doc": {}}
        return harness.ModelResults(
            settings={"batch_size": suite.batch_size, "versions": {"lm-eval": "0"}, "device": "cpu"},
            scores={column: dict(score) for column in columns}, samples={column: [sample] for column in columns},
            points={column: [0.0, 1.0] for column in columns},
            prompt_hashes={column: [("a", "b")] for column in columns}, num_requests={"computed": 1, "cached": 0},
        )  # fmt: skip

    def set_up_training(made: Any, folder: RunFolder, *_: Any, **__: Any) -> Any:
        return SimpleNamespace(recipe=made, start=starting_checkpoint(made, folder)[0], tokenizer=_tokenizer())

    def train(ready: Any, folder: RunFolder, console: Any, ranks: Any, benchmark: Any = None) -> bool:
        found = run._find_checkpoint(ready.recipe, folder, folders.ORIGIN, console)
        if found:
            checkpoints.verify(found)
        folder.drop_measurements_after(step_of(found) if found else 0)
        saves = SimpleNamespace(save_model=_save_model, save_pretrained=lambda path: None)
        run._save_model(saves, saves, folder, ranks)
        folder.update(status="trained", **_record())
        return True

    hub = SimpleNamespace(
        create_repo=lambda *_, **__: None, create_branch=lambda *_, **__: None,
        model_info=lambda *_, **__: SimpleNamespace(private=True), upload_folder=lambda *_, **__: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for where, name, fake in (
            (stage, "evaluate_model", answers),
            (stage, "saved_row", _saved_row),
            (stage, "preflight", lambda *_: ({}, [])),
            (stage, "check", lambda rows, suite, *_: (_tasks(suite), [])),
            (stage, "planned_rows", lambda *_, **__: []),
            (tables, "draw", lambda _, path: Path(path).write_bytes(b"PNG")),
            (stage, "commit", lambda: "c" * 40),
            (datasets.config, "HF_DATASETS_CACHE", cache),  # contamination: the training examples are read
            (training_setup, "set_up_training", set_up_training),
            (run, "train", train),
            (push, "HfApi", lambda: hub),
            (push, "get_token", lambda: "token"),
            (push, "constants", SimpleNamespace(HF_HUB_OFFLINE=False, ENDPOINT="hub")),  # for it alone
        ):
            stack.enter_context(mock.patch.object(where, name, fake))
        yield


def _saved_row(name: str, model: Any) -> Any:
    from soren_align.evaluate.run.preflight import PlannedRow

    return PlannedRow(name, model, _tokenizer(), 256, {}, template_of=name)


def _save_model(folder: str) -> None:
    Path(folder).mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        (Path(folder) / name).write_text("{}")


@cache
def _record() -> dict[str, Any]:
    import json

    said = json.loads(folders.whole("finished")["run/run.json"])
    kept = ("training", "start", "data", "seeds", "device", "parameters", "optimizer")
    return {key: said[key] for key in kept} | {"global_batch_size": 64, "parallel": "ddp"}


def _tasks(suite: Any) -> Any:
    """The tasks of a suite, loaded once for the shipped one."""
    from soren_align.core import shipped
    from soren_align.evaluate.suite.tasks import load_tasks

    if suite.path == shipped.suites()["quickstart"]:
        return _quickstart_tasks()
    return load_tasks(suite, None)


@cache
def _quickstart_tasks() -> Any:
    from soren_align.evaluate.suite.suites import load_suite
    from soren_align.evaluate.suite.tasks import load_tasks

    return load_tasks(load_suite("quickstart"), None)


RECIPE = """
task: sft
model: {name_or_path: adapter}
data: {train: {path: shipped:recipes/quickstart/data/chat_test.jsonl}}
optimizer: {name: soren, lr: 1e-3}
trainer: {use_cpu: true, bf16: false, max_steps: 1}
run: {output_dir: run}
"""
WHOLE = RECIPE.replace("path: adapter", "path: model").replace("1e-3", "1e-3, aux_lr: 1e-3")


def an_adapter(box: Box, arguments: dict[str, Any]) -> int:
    """Train on from it, and evaluate it."""
    from soren_align.evaluate.run import backends, lineage
    from soren_align.training.model import load_model

    steps = [lambda: recipe.adapter_config("adapter"), lambda: recipe.load_text(RECIPE),
             lambda: lineage.lineages(["adapter"]), lambda: backends.load_tokenizer(Path("adapter"))]  # fmt: skip
    if arguments["loaded"] == "training":
        steps.append(lambda: load_model(recipe.load_text(RECIPE), "adapter"))
    elif arguments["loaded"]:
        setup = backends.BackendSettings("hf", "float32", "cpu", 1)
        steps.append(lambda: backends.load_lm(Path("adapter"), _tokenizer(), setup))
    refused = False
    for step in steps:  # each is another command's, so that none is spared by another's refusal
        try:
            step()
        except errors.UserError:
            refused = True
    return REFUSED if refused else 0


def a_model(box: Box, arguments: dict[str, Any]) -> None:
    """Read what a plan reads of the model, talk to it, let it answer a question, or train it for a step."""
    import datasets
    import torch
    from soren_align.evaluate.run import backends, preflight, workers
    from soren_align.launch.chat import ChatModel, Conversation
    from soren_align.planning import inputs
    from soren_align.planning.flops import build_model

    with mock.patch.object(datasets.config, "HF_DATASETS_CACHE", box.own[0]):
        match arguments["done"]:
            case "plan":
                made = inputs.on_this_machine(recipe.load_text(WHOLE))
                config = inputs.load_inputs(made, RunFolder("run"), None).config
                with torch.device("meta"):  # the rest of a plan takes 4 seconds
                    build_model(config, None, torch.float32)
            case "chat":
                Conversation(ChatModel("model", "model"), None, 2, 0.0).ask("hi", str, str)
            case "evaluation":
                row = preflight.saved_row("model", "model")
                settings = backends.BackendSettings("hf", "float32", "cpu", 1)
                lm = workers.InProcess(Path("model"), row.tokenizer, settings)
                list(lm.run([("a", "loglikelihood", [("a", " b")])]))
            case "training":
                quiet = io.StringIO()
                with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), _without_processes():
                    commands.train(recipe.load_text(WHOLE), 1)


def a_journal(box: Box, arguments: dict[str, Any]) -> None:
    """Open the study and draw what is left to draw."""
    from soren_align.study import declaration, search

    with mock.patch.object(declaration, "commit", return_value=None):
        search.create(Path("study"), search.Progress(Path("study")).study)
    search.Progress(Path("study")).update()


def a_suite(box: Box, arguments: dict[str, Any]) -> None:
    """Read a suite and a quoted table."""
    from soren_align.evaluate.suite.suites import load_published, load_suite

    with contextlib.suppress(errors.UserError):
        load_published("quoted.yaml", "quickstart")
    made = load_suite("suite")
    made.data_folder()


RUN_OWN = ("run", "out", "summary.json", f"summary.json.{os.getpid()}.part", "copy.yaml", "imported.yaml")
TARGETS = {"recipe": a_recipe, "override": an_override, "import": an_import, "data": a_data_file, "run": a_run_folder,
           "adapter": an_adapter, "model": a_model, "journal": a_journal, "suite": a_suite}  # fmt: skip


def allowed(kind: str, box: Box) -> list[str]:
    """The folders that an input of the kind may write to."""
    more = {"recipe": [box.work], "override": [box.work], "journal": [box.work / "study"]}
    more["run"] = more["model"] = [box.work / name for name in RUN_OWN]
    return [str(path) for path in (*box.own, *more.get(kind, ()))]


def warm_up(box: Box, kinds: list[str]) -> None:
    """Import and load what the targets need, before anything is watched."""
    if {"run", "adapter", "data", "model"} & set(kinds):
        import datasets  # noqa: F401
        import transformers  # noqa: F401
    if "journal" in kinds:
        folders.whole("study")
    if "model" in kinds:
        here = os.getcwd()  # the first of each takes seconds, of imports and of torch's own warming up
        whole = {f"model/{name}": data for name, data in folders.model_files().items() if "index" not in name}
        for done in ("plan", "chat", "evaluation", "training"):
            box.lay_out(whole)
            a_model(box, {"done": done})
        os.chdir(here)
    _provenance()
    if "data" in kinds or "adapter" in kinds:
        _loaded_tokenizer()
    if {"adapter", "model"} & set(kinds):
        assert (folders.tiny_model() / "config.json").is_file()
    if "run" in kinds:
        _quickstart_tasks()
        _record()
        with _without_models():
            pass


SHARED = {"tiny": folders.tiny_model}
