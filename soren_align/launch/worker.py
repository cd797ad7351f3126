"""What the process that does the work does, top to bottom.

    python -m soren_align.launch.worker ranks N train RUN_FOLDER [--timeout SECONDS]
    python -m soren_align.launch.worker train RUN_FOLDER [--timeout SECONDS]
    python -m soren_align.launch.worker universal RUN_FOLDER
    python -m soren_align.launch.worker merge RUN_FOLDER
    python -m soren_align.launch.worker plan [--processes N] [--json] < RECIPE
    python -m soren_align.launch.worker eval MODEL_OR_RUN... --asked JSON [--output DIR] [--summary FILE] [--cache DIR]
    python -m soren_align.launch.worker bench maps|step --shapes S [--device D] [--tokens N] [--json] [--output PAGE]

`ranks` is torchrun: it starts `train` N times and says in one place what went wrong. With RANK and WORLD_SIZE in the
environment, whoever set them, `train` is one rank of a run: all train, the first writes and speaks, and evaluates when
the others have gone.

Exit codes: 0 done, 2 something the user can mend, 130 stopped by a signal (the same command goes on).
"""

import argparse
import gc
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.status import Status

from ..card import write_card
from ..errors import UserError, of_the_system
from ..evaluate.results import refuse_foreign, refuse_foreign_summary
from ..recipe import Eval, load_resolved, load_text
from ..run_folder import RunFolder, now
from ..terminal import Terminal
from .environment import without_ranks

console = Terminal(stderr=True)
STOPPED = "stopped by a signal"


def train(path: str, timeout_seconds: float) -> int:
    """Train the run folder's recipe, then evaluate; whatever is already done is not done again."""
    folder = RunFolder(path)
    with _busy("Loading torch, transformers and TRL"):
        from ..sharding.ranks import init_ranks
        from ..trainers import training, training_setup

        _hush()
    number = os.environ.get("WORLD_SIZE", "1")
    with _busy(f"Waiting for all {number} processes") if number != "1" else nullcontext():
        ranks = init_ranks(timeout_seconds)
    recipe = load_resolved(folder.recipe)  # after joining: the first rank may just have written it
    with _alone_in(folder) if ranks.is_first else nullcontext():
        if ranks.is_first:
            folder.update(last_error=None)
        if ranks.broadcast((folder.read() or {}).get("status")) != "trained":
            with console.status("Checking data and evaluation") as status, ranks.first_goes_first():
                ready = training_setup.set_up_training(recipe, folder, _counting(status), ranks)
                if recipe.eval and ranks.is_first:
                    from ..evaluate import stage

                    refuse_foreign(stage.output_of(folder, recipe.eval), [])
                    stage.preflight(recipe.eval, lambda column: status.update(f"Checking evaluation: {column}"))
            if not training.train(ready, folder, console, ranks):
                if ranks.is_first:
                    folder.update(last_error=STOPPED)
                return 130
        ranks.leave()
        if ranks.is_first:
            write_card(folder)
        if ranks.is_first and not (ranks.launched and recipe.eval):
            if recipe.eval:
                _evaluate_finished(folder, recipe.eval)
            folder.update(status="finished", finished=now(), last_error=None)
            console.print(f"done      {folder}", highlight=False)
    if ranks.launched and ranks.is_first and recipe.eval:
        # The rest is for one process, and libraries remember that they were several: a fresh one takes this place.
        os.execvpe(
            sys.executable,
            [sys.executable, "-m", "soren_align.launch.worker", "train", path],
            without_ranks(os.environ),
        )
    return 0


def _evaluate_finished(folder: RunFolder, asked: Eval) -> None:
    """Evaluate what was just trained. UserError that says where the model is, and how its evaluation is repeated."""
    try:
        _evaluate([str(folder)], asked, None, None, None)
    except (UserError, OSError) as error:
        refused = of_the_system(error) if isinstance(error, OSError) else error
        if refused is None:
            raise
        raise UserError(
            *refused.problems,
            f"The model is trained ({folder.model}); only its evaluation is missing. `soren-align eval {folder}` does "
            "it, with other options too; so does the same command, once the cause is fixed",
        ) from error


def start_ranks(num_ranks: int, arguments: list[str]) -> int:
    """Start `num_ranks` workers, wait, and say what became of them."""
    with console.status(f"Starting {num_ranks} processes"):
        from . import torchrun
    os.environ[torchrun.OURS] = "1"
    code, said = torchrun.start(num_ranks, arguments)
    if arguments[0] == "train" and said:
        folder = RunFolder(arguments[1])
        if code == 130 and (folder.read() or {}).get("last_error") == STOPPED:
            said = None  # the first rank has told the user
        else:
            folder.update(last_error=said)
    if said:
        console.print(said, markup=False, highlight=False, soft_wrap=True)
    return code


def universal(path: str) -> int:
    """Free a run's last checkpoint from the number of processes that wrote it."""
    folder = RunFolder(path)
    with console.status("Rewriting the last checkpoint"), _alone_in(folder):
        from ..trainers.checkpoints import make_universal, step_of

        _hush()
        checkpoint = max(folder.complete_checkpoints(), key=step_of)
        make_universal(checkpoint)
        run = folder.read() or {}
        if run.get("processes"):
            before = [*run.get("processes_before", []), run["processes"]]
            folder.update(processes=None, processes_before=before)
    said = f"done      {checkpoint} can be resumed from by any number of processes"
    console.print(said, highlight=False, soft_wrap=True)
    return 0


def merge(path: str) -> int:
    """Make one model of a run's adapter and its base."""
    folder = RunFolder(path)
    with console.status("Merging"), _alone_in(folder):
        from ..trainers import adapters

        _hush()
        merged = adapters.merge(folder)
        write_card(folder, merged=True)
    console.print(f"written   {merged}", highlight=False, soft_wrap=True)
    return 0


def plan(as_json: bool, num_ranks: int) -> int:
    """Print what the recipe on standard input would do on so many processes."""
    recipe = load_text(sys.stdin.read())
    with console.status("Loading torch, transformers and TRL"):
        from ..planning.offline import go_offline_without_hub

        go_offline_without_hub()
        from ..planning import display
        from ..planning import plan as planning

        _hush()
    with console.status("Checking data") as status:
        found, counted = planning.plan_training(recipe, _counting(status), num_ranks)
    if as_json:
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
    else:
        display.print_plan(found, counted, Terminal())
    return 0


def bench(given: argparse.Namespace) -> int:
    """Measure maps or optimizer steps."""
    from ..bench import shapes

    matrices = shapes.parse(given.shapes)
    with console.status("Loading torch"):
        from ..bench import map_times, report, step_times
        from ..bench.timing import find_device
    warnings.filterwarnings("ignore")
    device = find_device(given.device)
    # A spinner's thread takes its time from what is measured, so it turns slowly.
    with console.status("Measuring", refresh_per_second=2) as status:
        if given.what == "maps":
            results = map_times.run(matrices, device, status.update)
        else:
            results = step_times.run(matrices, device, given.tokens, status.update)
    if given.output:
        report.update_page(results, Path(given.output))
    if given.json:
        sys.stdout.write(json.dumps(results, indent=2) + "\n")
    else:
        Terminal().print(report.terminal(results), highlight=False)
    return 0


def _evaluate(models: list[str], asked: Eval, output: str | None, summary: str | None, cache: str | None) -> None:
    """Measure models beside the checkpoints that they started from."""
    with _busy("Loading lm-eval"):
        import torch

        from ..evaluate import lineage, stage

        _hush()
    gc.collect()
    torch.cuda.empty_cache()  # what training held
    run = RunFolder(models[0])
    if asked.processes is None:
        trained = (run.read() or {}).get("processes") or 1
        asked = asked.model_copy(update={"processes": min(trained, torch.cuda.device_count() or trained)})
    folder = Path(output) if output else stage.output_of(run, asked)
    if summary:
        refuse_foreign_summary(Path(summary))
    rows = lineage.lineages(models, console)
    results = stage.evaluate(rows, asked, folder, cache=Path(cache) if cache else None, console=console)
    stage.print_results(results, folder, console, Terminal())
    if not output:
        write_card(run)
    if summary:
        stage.write_summary(results, Path(summary))


def _busy(doing: str) -> Any:
    """A spinner; a line where there is no terminal to turn one, as in a cluster's logs."""
    if not console.is_terminal:
        word, rest = doing.split(" ", 1)
        console.print(f"{word.lower():<9} {rest}", highlight=False)
    return console.status(doing)


def _counting(status: Status) -> Callable[[int], None]:
    """Show how many rows are counted: a large dataset takes minutes."""
    done = 0

    def on_rows(number: int) -> None:
        nonlocal done
        done += number
        status.update(f"Counting tokens: {done:,} rows")

    return on_rows


@contextmanager
def _alone_in(folder: RunFolder) -> Iterator[None]:
    """Hold the run folder, and note in run.json why a run ended early."""
    folder.lock(as_rank=not folder.holds())  # otherwise the launcher of this rank holds it
    try:
        yield
    except UserError as error:
        folder.update(last_error=str(error))
        raise


def _hush() -> None:
    """Silence what the user can do nothing about. What matters is said in our own words."""
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; see the module's docstring."""
    console.file = sys.stderr  # this one: libraries are hushed by putting another in its place, and rich would follow
    given = _parser().parse_args(arguments)
    rank = int(os.environ.get("RANK", "0")) if given.verb == "train" else 0
    console.quiet = rank > 0
    try:
        match given.verb:
            case "ranks":
                return start_ranks(given.number, given.arguments)
            case "train":
                return train(given.folder, given.timeout)
            case "universal":
                return universal(given.folder)
            case "merge":
                return merge(given.folder)
            case "plan":
                return plan(given.json, given.processes)
            case "bench":
                return bench(given)
        asked = Eval.model_validate_json(given.asked)
        _evaluate(given.models, asked, given.output, given.summary, given.cache)
        return 0
    except UserError as error:
        _complain(error, str(error), rank)
        return 2
    except KeyboardInterrupt as error:
        _complain(error, "stopped" if given.verb == "bench" else "stopped; the same command goes on where it can", rank)
        return 130
    except Exception as error:
        refused = of_the_system(error) if isinstance(error, OSError) else None
        if refused:
            _complain(error, str(refused), rank)
            return 2
        if rank_was_lost(error):
            lost = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0]
            said = f"lost another process ({lost}); its own output says why. The same command goes on"
            _complain(error, said, rank)
            return 1
        if not {"WORLD_SIZE", "TORCHELASTIC_ERROR_FILE"} & os.environ.keys():
            raise  # alone: Python's own words will do
        _complain(error, traceback.format_exc(), rank)
        return 1


def rank_was_lost(error: Exception) -> bool:
    """Whether a collective failed because a process at its other end is gone."""
    return isinstance(error, RuntimeError) and ("gloo/transport" in str(error) or "NCCL" in str(error))


def _complain(error: BaseException, said: str, rank: int) -> None:
    """Tell the user, or whoever started this rank and will tell the user once."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from . import torchrun

        torchrun.leave_word(error)
        if torchrun.OURS in os.environ:
            return
    console.quiet = False
    console.print(f"rank {rank}: {said}" if rank else said, markup=False, highlight=False, soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="soren_align.launch.worker")
    verbs = parser.add_subparsers(dest="verb", required=True)
    several = verbs.add_parser("ranks")
    several.add_argument("number", type=int)
    several.add_argument("arguments", nargs=argparse.REMAINDER)
    training = verbs.add_parser("train")
    training.add_argument("folder")
    training.add_argument("--timeout", type=float, default=1800)
    verbs.add_parser("universal").add_argument("folder")
    verbs.add_parser("merge").add_argument("folder")
    planning = verbs.add_parser("plan")
    planning.add_argument("--processes", type=int, default=1)
    planning.add_argument("--json", action="store_true")
    measure = verbs.add_parser("eval")
    measure.add_argument("models", nargs="+")
    measure.add_argument("--asked", required=True)
    for option in ("--output", "--summary", "--cache"):
        measure.add_argument(option)
    measure = verbs.add_parser("bench")
    measure.add_argument("what", choices=("maps", "step"))
    for option in ("--shapes", "--device", "--output"):
        measure.add_argument(option)
    measure.add_argument("--tokens", type=int)
    measure.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
