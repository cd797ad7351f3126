"""A suite is data: its files run no code, unless the user trusts them.

lm-eval's task files may name Python functions (`!function`), metrics that the `evaluate` package
loads as scripts, any loader of `datasets`, and Jinja templates, which lm-eval renders outside of a
sandbox. lm-eval handles each of these in one function, which is replaced by a checked one while
tasks are loaded and evaluated. Includes and groups use it too. What lm-eval's own functions take
from generators and clocks is made to depend on the suite's seeds alone.
"""

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import datasets
import lm_eval.api.metrics  # noqa: F401 (registers them)
import numpy as np
import pyarrow as pa
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import utils
from lm_eval.api import registry
from pyarrow.json import ParseOptions

from ...core import shipped
from ...core.errors import UserError
from ...core.patches import patched
from .suites import LM_EVAL_TASKS, Seeds

OWN = (LM_EVAL_TASKS.resolve(), (shipped.ROOT / "eval").resolve())
"""The folders whose task files may name functions: lm-eval's own and the shipped suites."""
PLAIN = ("arrow", "csv", "json", "parquet", "text")
"""Loaders of `datasets` that only read files; `pandas`, for example, reads pickles in some
versions."""
KEYWORDS = {
    *("data_files", "data_dir", "revision", "streaming", "split", "trust_remote_code"),
    "keep_in_memory",
}
"""Allowed in `dataset_kwargs`; `datasets` 5 runs no scripts, whatever the value of
trust_remote_code."""
REMEDY = (
    "read the suite's files, and add --trust-suite (eval.trust_suite: true) to let them run code"
)


@contextlib.contextmanager
def loading(trusted: bool, cache_folder: Path) -> Iterator[None]:
    """A context in which task files load only lm-eval's own code.
    cache_folder: the only one datasets may write to.

    trusted: this suite may run code.
    """

    def guarded_function(name: str, folder: Path) -> Any:
        # Resolved first: `..` or a link could otherwise pass for a file of lm-eval's.
        resolved = Path(folder).expanduser().resolve()
        if trusted:
            return processing_once(load_function(name, folder))
        if not any(resolved.is_relative_to(own) for own in OWN):
            raise UserError(f"a task file in {folder} runs code (!function {name}); {REMEDY}")
        if _runs_generated_code(resolved):
            raise UserError(f"the functions in {resolved} run code that a model writes; {REMEDY}")
        return processing_once(load_function(name, folder))

    def guarded_metric(name: Any, hf_evaluate_metric: bool = False) -> Any:
        if hf_evaluate_metric or name not in registry.metric_registry:
            raise UserError(
                f"metric {name!r} is no metric of lm-eval and would be run as a script; {REMEDY}"
            )
        return load_metric(name)

    def guarded_dataset(path: Any = None, name: Any = None, *rest: Any, **options: Any) -> Any:
        # A list of what is allowed: options that later versions of `datasets` add stay refused.
        unsafe = sorted(options.keys() - KEYWORDS - {"cache_dir"})
        if "cache_dir" in options and not Path(options["cache_dir"]).resolve().is_relative_to(
            cache_folder.resolve()
        ):
            unsafe.append("cache_dir")
        if unsafe:
            raise UserError(
                f"dataset_kwargs: {', '.join(unsafe)} may do more than read data; {REMEDY}"
            )
        if path in _PACKAGED_DATASETS_MODULES and path not in PLAIN:
            raise UserError(
                f"dataset_path: the loader {path} does more than read a file; write"
                f" {', '.join(PLAIN)}, or {REMEDY}"
            )
        return load_dataset(path, name, *rest, **options)

    def read_texts(source: Any, *options: Any, **others: Any) -> pa.Table:
        table = read_json(source, *options, **others)
        schema = pa.schema([field.with_type(_of_texts(field.type)) for field in table.schema])
        if schema == table.schema:
            return table
        source.seek(0)
        others["parse_options"] = ParseOptions(explicit_schema=schema)
        return read_json(source, *options, **others)

    with contextlib.ExitStack() as stack:
        stack.enter_context(rendering())
        read_json = stack.enter_context(patched("pyarrow.json.read_json", read_texts))
        load_function = stack.enter_context(
            patched("lm_eval.tasks._yaml_loader._import_func_in_yml", guarded_function)
        )
        if not trusted:
            load_metric = stack.enter_context(
                patched("lm_eval.api.task.get_metric", guarded_metric)
            )
            load_dataset = stack.enter_context(patched("datasets.load_dataset", guarded_dataset))
        yield


def _of_texts(kind: pa.DataType) -> pa.DataType:
    """A type that pyarrow infers from JSON, with texts for the timestamps, which JSON has not."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_of_texts(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_of_texts(field.type)) for field in kind])
    return kind


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox. lm-eval asks for the same template at each question, and to compile it takes
    longer than to render it: compiled templates are kept.
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        # Without it a search for repeated questions among 14,000 took 7.5 s, with it 0.4 s
        # (notes/log.md).
        own: Any = self
        own.from_string = functools.lru_cache(maxsize=100)(super().from_string)


def rendering() -> Any:
    """Return a context in which templates have access to a question's columns only, not to
    Python.
    """
    sandbox = _Sandbox(
        loader=utils.env.loader,
        undefined=utils.env.undefined,
        keep_trailing_newline=utils.env.keep_trailing_newline,
    )
    sandbox.filters.update(utils.env.filters)
    return patched("lm_eval.utils.env", sandbox)


@functools.cache
def _runs_generated_code(folder: Path) -> bool:
    """Whether lm-eval's tasks in `folder` are marked as unsafe.
    A file that includes them could remove the mark.
    """
    return any(
        "unsafe_code: true" in f.read_text("utf-8") for f in folder.iterdir() if "yaml" in f.name
    )


@contextlib.contextmanager
def documents(seeds: Seeds) -> Iterator[Callable[[], None]]:
    """A context in which the questions of a task depend on the seeds alone; yields a function that
    sets them.

    GPQA's code shuffles the choices with Python's generator. `datasets` would read the order of the
    first loading, by whichever program, from its cache. The generators' states are restored.
    """
    # Restored at the end: loading a suite must not change the random numbers of a training after
    # it.
    states, was_enabled = (random.getstate(), np.random.get_state()), datasets.is_caching_enabled()
    datasets.disable_caching()

    def seed() -> None:  # as simple_evaluate, before it loads tasks
        random.seed(seeds.random)
        np.random.seed(seeds.numpy)

    try:
        yield seed
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if was_enabled:
            datasets.enable_caching()


def processing_once(function: Any) -> Any:
    """Return a task's function; if it is its `process_docs`, it processes a dataset once.

    lm-eval calls it at each access to the questions, and would get another order of GPQA's choices
    each time.
    """
    processed: dict[str, Any] = {}

    @functools.wraps(function)
    def once(*arguments: Any, **options: Any) -> Any:
        if options or len(arguments) != 1 or not isinstance(arguments[0], datasets.Dataset):
            return function(*arguments, **options)
        # By the data's fingerprint: the tasks of a group may share a function, but not their
        # questions.
        key = arguments[0]._fingerprint
        if key not in processed:
            processed[key] = function(arguments[0])
        return processed[key]

    return once


@contextlib.contextmanager
def scoring(seeds: Seeds) -> Iterator[None]:
    """A context in which the points of a response do not depend on chance, and hardly on the
    machine's speed.

    For packages that a task's code has imported: IFEval's detects languages by a generator without
    a seed, and MATH's gives up after 1 or 5 seconds, within which the first call reads the grammar
    of LaTeX.
    """
    with contextlib.ExitStack() as stack:
        if languages := sys.modules.get("langdetect"):
            name = "langdetect.DetectorFactory.seed"
            stack.enter_context(
                patched(name, seeds.random, getattr(languages, "DetectorFactory", None))
            )
        if verifier := sys.modules.get("math_verify"):
            # Called once here: within the time limit of the first answer, reading the grammar of
            # LaTeX would turn a right answer into a wrong one.
            verifier.parse("$1$")
            import_module("sympy.parsing.latex").parse_latex("1")
        yield
