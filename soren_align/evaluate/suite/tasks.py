"""Load the tasks of a suite with lm-eval, and check each question.

lm-eval scores two mistakes silently: a field that some questions do not have is the text "None" in
its templates, and a question whose key is none of its choices counts as answered wrong.
"""

import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from lm_eval.api.group import Group
from lm_eval.api.registry import AGGREGATION_REGISTRY, get_aggregation, register_metric
from lm_eval.api.task import Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ...core.errors import UserError, closest, in_one_line
from ...core.silence import silence
from ...data.files import InvalidRecord, read_records
from ..stats.points import NO_MEAN
from .answer_match import answer_match
from .sandbox import documents, loading, rendering
from .suites import Suite, SuiteTask, refuse_missing_packages

# Task files may name it, as any metric of lm-eval.
register_metric(metric="answer_match", higher_is_better=True, aggregation="mean")(answer_match)

Tasks = dict[str, Task | Group]
"""Each column's task, or a group of tasks (MMLU's 57 subjects)."""
MEANS = ("mean", "nanmean")
"""lm-eval's own aggregations that are means over questions; a task may have others of its own."""
GROUP = "suite_{}"
"""The name of the group that `_manager` makes for a task."""
SETTINGS = ("doc_to_text", "doc_to_choice", "doc_to_target")
SPLITS = ("test_split", "validation_split")
LETTERS = "ABCDEFGHIJ"
"""Keys of the right choice in many datasets."""
_FIELD = re.compile(r"\{\{-?\s*([A-Za-z_]\w*)\s*-?\}\}")


def load_tasks(
    suite: Suite, on_column: Callable[[str], object] | None = None, *, trusted: bool = False
) -> Tasks:
    """Load the suite's tasks with their data.
    Called before training too, so that missing data are found early.

    on_column: called with each column before it is loaded (MMLU's 57 datasets take seconds).
    trusted: the suite's files may run code. Raises UserError, with the task, if a task, metric or
    dataset is missing, if an untrusted file would run code, or if a task cannot be scored: without
    questions or right answers, or with code that a model writes.
    """
    refuse_missing_packages(suite)
    tasks: Tasks = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        loading(trusted, Path(folder)),
        documents(suite.seeds) as seed,
    ):
        manager = _manager(suite, Path(folder))
        for task in suite.tasks:
            if on_column:
                on_column(task.column)
            file = suite.file_of(task)
            with silence():
                try:
                    # Anew for each task: the order of GPQA's choices must not depend on the columns
                    # before it.
                    seed()
                    loaded = manager.load([GROUP.format(task.task)])
                    tasks[task.column] = (loaded.get("groups", {}) | loaded["tasks"])[task.task]
                    sizes = num_questions(tasks[task.column])
                except UserError as error:
                    raise UserError(f"{file}: {error}") from None
                except Exception as error:  # anything that lm-eval, datasets or the hub may raise
                    raise UserError(_reason(suite, task, error)) from error
            members = subtasks(tasks[task.column])
            if empty := [name for name, size in sizes.items() if not size]:
                raise UserError(
                    f"{file}: task {empty[0]} has no questions; add questions, or remove the task"
                )
            if any(getattr(subtask, "UNSAFE_CODE", False) for subtask in members):
                raise UserError(
                    f"{file}: this task runs code that a model writes, which is not supported;"
                    " choose another task"
                )
            # lm-eval renders a missing field as the text "None", and scores the question without a
            # message.
            if missing := missing_field(*_own_data(suite, task)):
                raise UserError(missing)
            lines = [
                f"{place}:{number}" for place, number, _ in _questions(*_own_data(suite, task))
            ]
            # A question whose key is none of its choices counts as wrong for every model.
            for subtask in members:
                refuse_wrong_keys(subtask, file, lines)
            # without a metric_list: lm-eval's defaults for the output_type
            aggregations = members[0].aggregation()
            # Such as perplexity, which is of the whole corpus: no question has a share of it.
            others = [get_aggregation(n) for n in AGGREGATION_REGISTRY if n not in MEANS]
            means = {m for m, function in aggregations.items() if function not in others}
            config, filters = members[0].config, {"none"}
            if config.filter_list:
                filters = {entry["name"] for entry in config.filter_list}
            for entry in [] if config.process_results else config.filter_list or []:
                if not {"take_first", "custom"} & {part["function"] for part in entry["filter"]}:
                    raise UserError(
                        f"{file}: the filter {entry['name']!r} gives a list of answers, but a score"
                        " is of one; add `- function: take_first` as its last function"
                    )
            if isinstance(task.num_choices, dict) and task.num_choices.keys() != sizes.keys():
                differing = sorted(task.num_choices.keys() ^ sizes.keys())
                raise UserError(
                    f"{suite.path} {task.column}: num_choices and the subtasks of {task.task}"
                    f" differ in {', '.join(differing)}; write the number of choices of"
                    f" {', '.join(sizes)}"
                )
            # Checked now: a wrong metric or filter would fail only after the model has answered.
            scores = [key.split(",") for key in score_keys(task)]
            wanted = [("metric", name, means) for metric, _ in scores for name in metric.split("+")]
            wanted += [("filter", name, filters) for _, name in scores]
            for word, name, allowed in wanted:
                if name not in allowed:
                    finding = f"{task.task} has no {word} {name!r}"
                    if word == "metric" and name in aggregations:
                        finding = f"{name} is {NO_MEAN}"
                    choices = " or ".join(sorted(allowed)) or "the name of another task"
                    raise UserError(f"{suite.path} {task.column}: {finding}; write {choices}")
    return tasks


def subtasks(task: Task | Group) -> list[Any]:
    """Return the tasks of a group, or the task itself in a list."""
    return task.get_all_tasks() if isinstance(task, Group) else [task]


def num_questions(task: Task | Group) -> dict[str, int]:
    """Return the number of questions of each subtask, by its name."""
    return {subtask.task_name: len(subtask.eval_docs) for subtask in subtasks(task)}


def score_keys(task: SuiteTask) -> list[str]:
    """Return lm-eval's keys (`metric,filter`) of the reported scores; the column's own is the
    first.
    """
    return [
        f"{task.metric},{task.filter}",
        *(a if "," in a else f"{a},{task.filter}" for a in task.also),
    ]


def _manager(suite: Suite, folder: Path) -> TaskManager:
    """Return lm-eval's manager with the tasks of this suite only (its own index of all tasks takes
    half a minute).

    Each task is a generated YAML file that includes the suite's: a dict instead of a file would
    inherit nothing, silently. A group is a member as `group: mmlu`; with `task: mmlu`, as in
    lm-eval's own `openllm`, its 57 subjects would all get this one name and replace one another.
    """
    members = []
    for task in suite.tasks:
        file = suite.file_of(task)
        is_group = "group" in _read(file)
        files = sorted(file.parent.glob("*.yaml")) if is_group else [file]
        contents = [_read(each) for each in files]
        settings: dict[str, Any] = {}
        if task.num_fewshot is not None:
            settings["num_fewshot"] = task.num_fewshot
        if not task.num_fewshot and (
            task.num_fewshot == 0 or not any(c.get("num_fewshot") for c in contents)
        ):
            # Only the split with the questions is read. Otherwise lm-eval reads the split that
            # few-shot examples would come from, such as PIQA's train split, and fails without it.
            unused = ["training_split", "fewshot_split"]
            if all(content.get("test_split") for content in contents if "task" in content):
                unused.append("validation_split")
            settings |= {
                key: None for key in unused if any(content.get(key) for content in contents)
            }
        if (root := suite.data_folder()) is not None:
            names = {
                str(content["dataset_path"]) for content in contents if content.get("dataset_path")
            }
            if len(names) != 1:
                raise UserError(
                    f"{file}: has {len(names)} dataset_path entries; write exactly one, relative to"
                    f" the data_root of {suite.path}"
                )
            data = root / names.pop()
            if not data.is_dir():
                raise UserError(
                    f"{file}: there is no dataset folder {data}; correct dataset_path or data_root"
                )
            # Converted anew each time and kept in memory (the leaderboard's 62 tasks: 17 s in place
            # of 9): a cached file has no hash, and one bit in it is another question. A folder for
            # each task, because `datasets` identifies data by their folder's last name and README
            # only.
            cache = tempfile.mkdtemp(dir=folder, prefix="data-")
            kwargs = {"cache_dir": cache, "keep_in_memory": True}
            settings |= {"dataset_path": str(data), "dataset_kwargs": kwargs}
        if is_group:
            members.append(str(file.parent))
            member = {"group": task.task, **settings}
        else:
            member = {"task": task.task, **settings}
            included = yaml.safe_dump({"include": str(file), "task": task.task})
            (folder / f"{task.task}.yaml").write_text(included, encoding="utf-8")
        group = GROUP.format(task.task)
        wrapper = yaml.safe_dump({"group": group, "task": [member]})
        (folder / f"{group}.yaml").write_text(wrapper, encoding="utf-8")
    return TaskManager(include_path=[str(folder), *members], include_defaults=False)


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a task's file and its includes; functions are not resolved."""
    try:
        return load_yaml(file, resolve_func=False)
    except (
        OSError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        yaml.YAMLError,
    ) as error:
        raise UserError(
            f"{file}: is no valid task file: {in_one_line(error)}; correct the file"
        ) from None


def _own_data(suite: Suite, task: SuiteTask) -> tuple[dict[str, Any], Path | None]:
    """Return the content of a task's file, and the folder of its data; None if they are on the
    hub.
    """
    settings, root = _read(suite.file_of(task)), suite.data_folder()
    return settings, root and root / str(settings.get("dataset_path"))


def _reason(suite: Suite, task: SuiteTask, error: Exception) -> str:
    """Return why a task cannot be loaded: the place in its data if a question is the cause, else
    lm-eval's words.
    """
    settings, folder = _own_data(suite, task)
    if missing := missing_field(settings, folder):
        return missing
    first = (str(error).strip().splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}"
    if isinstance(error, KeyError):
        reason = f"the task's data have no split or column {first}, which {task.task} needs"
    # To `datasets` a broken line is "An error occurred while generating the dataset": the files are
    # read again to find its place.
    records = (
        ((file, *each) for file in sorted(folder.rglob("*.jsonl")) for each in read_records(file))
        if folder
        else ()
    )
    invalid = next(
        ((file, number, r) for file, number, r in records if isinstance(r, InvalidRecord)), None
    )
    if invalid:
        reason = f"{invalid[0]}:{invalid[1]}: {invalid[2].reason}"
    if suite.data_root is None:
        reason += (
            ". Without a network, pass downloaded datasets by --data-root DIR (eval.data_root)"
        )
    return f"{suite.file_of(task)}: task {task.task} cannot be loaded: {reason}"


def missing_field(settings: dict[str, Any], folder: Path | None) -> str:
    """Return the place of the first question without a field that its task needs, and the remedy;
    "" if there is none.

    settings: the task file's, with its includes. folder: of its data; None: they are on the hub,
    and not read.
    """
    fields = {}
    for setting in SETTINGS:
        template = settings.get(setting)
        if isinstance(template, str) and "{%" not in template:  # without a condition
            # A setting without braces is the name of a field, or plain text.
            is_field = setting != "doc_to_text" and template.isidentifier()
            fields |= dict.fromkeys([template] if is_field else _FIELD.findall(template), setting)
    for file, number, record in _questions(settings, folder) if fields else ():
        if isinstance(record, InvalidRecord):
            continue  # reported elsewhere
        for field, setting in fields.items():
            if record.get(field) is None:
                similar = closest(field, [key for key in record if key not in fields])
                remedy = (
                    f"rename {similar!r} to {field!r}"
                    if similar
                    else f"add {field!r}, or remove this question"
                )
                return (
                    f"{file}:{number}: the question has no {field!r}, which {setting} of the task"
                    f" reads, but only {', '.join(map(str, record))[:200]}; {remedy}"
                )
    return ""


def _questions(settings: dict[str, Any], folder: Path | None) -> Iterator[tuple[Path, int, Any]]:
    """File, line and record of each question of a task whose data are in `folder`, as they are
    there.

    None for data on the hub, and where `process_docs` may add fields or leave questions out.
    """
    split = next((str(settings[key]) for key in SPLITS if settings.get(key)), "")
    if folder is None or settings.get("process_docs"):
        return
    for file in sorted(folder.rglob("*.jsonl")):
        if split in file.name:
            yield from ((file, number, record) for number, record in read_records(file))


def refuse_wrong_keys(task: Any, file: Any, lines: Sequence[str] = ()) -> None:
    """Raises UserError if the key of a question is none of its choices. task: lm-eval's.

    file: the task's; lines: the places of its questions, as many as there are, where these are
    known.
    """
    if task.OUTPUT_TYPE != "multiple_choice" or callable(task.config.process_results):
        return  # a task's own function may read another field
    wrong: list[tuple[int, Any, list[Any]]] = []
    with silence(), rendering():
        for number, question in enumerate(task.eval_docs, 1):
            choices = task.doc_to_choice(question)
            key = (
                task.doc_to_text(question) if task.multiple_input else task.doc_to_target(question)
            )
            keys = key if isinstance(key, list) else [key]
            if not all(
                0 <= one < len(choices) if isinstance(one, int) else one in choices for one in keys
            ):
                wrong.append((number, key, choices))
    if wrong:
        number, key, choices = wrong[0]
        more = f" (and {len(wrong) - 1:,} more questions)" if len(wrong) > 1 else ""
        is_letter = isinstance(key, str) and len(key) == 1 and key in LETTERS
        remedy = f": for {key!r} write {LETTERS.index(key)}" if is_letter else ""
        is_known = len(lines) == len(task.eval_docs)
        where = lines[number - 1] if is_known else f"{file}: {task.task_name}, question {number}"
        raise UserError(
            f"{where}{more}: doc_to_target gives {key!r:.60}, which is none of the question's"
            f" {len(choices)} choices ({', '.join(map(repr, choices)):.200}); let doc_to_target"
            f" give the number of the right choice (the first is 0) or its text{remedy}"
        )
