"""`make soak`: faults of every kind on runs of every kind; after each, the same command must end with the same result.

    python -m tests.soak [--seed N] [--state FILE] [--sample]
    python -m tests.soak --seed N --only cache             the kinds whose name has this word
    python -m tests.soak --seed N --one 'SIGHUP:lora:0'    one case again: its notes and its output

Every case follows from (seed, kind, configuration, number); see faults.py. The state file has a line for each case that
is done; with the same seed and the same code, the command continues. Exit status 1 if anything is lost, wrong, unclear,
or hangs.
"""

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import sys
import time
import traceback
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOOD = ("identical", "clear")
NUM_WORKERS = 2
SAMPLE = [
    *("killed at a random write:sft:0", "SIGTERM once:sft:0", "disk filled meanwhile:sft:0"),
    *("checkpoint: one bit of the weights:sft:0", "checkpoint: file truncated, empty, removed:lora:0"),
    *("run.json damaged:sft:0", "killed at a write of eval:sft+eval:0", "2 ranks: SIGKILL of one:ddp:0"),
]
"""About a minute on two quiet cores; tests/soak/test_soak.py."""


def load_libraries(folder: Path) -> None:
    """Import what all commands import: 15 s, and once."""
    from tests.soak import runs

    os.environ.update(runs.environment(folder), HF_HOME=str(folder / "hf"))  # which datasets reads on import
    import importlib

    from tests.support.rank_pool import PRELOADED

    for name in ("soren_align.launch.preloaded", *PRELOADED, "soren_align.cli.app", "tests.support.trainer_jobs"):
        importlib.import_module(name)


def cases(seed: str, sample: bool = False, only: str = "") -> list[str]:
    """Return the names of all cases, KIND:CONFIGURATION:NUMBER, in random order: each part has all kinds."""
    from tests.soak.faults import KINDS

    names = []
    for kind in KINDS:
        first = random.Random(f"{seed}:{kind.name}").randrange(len(kind.configs))
        for number in range(kind.number):
            names.append(f"{kind.name}:{kind.configs[(first + number) % len(kind.configs)]}:{number}")
    random.Random(seed).shuffle(names)
    return SAMPLE if sample else [name for name in names if only in name.rsplit(":", 2)[0]]


def code_hash() -> str:
    """Return the hash of the code under test: results of another do not count."""
    digest = hashlib.sha256()
    for file in sorted([*(ROOT / "soren_align").rglob("*.py"), ROOT / "tests/soak/runs.py"]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


class State:
    """What is done, as a file of JSON lines: references, and cases with their verdicts."""

    def __init__(self, file: Path, seed: str):
        self.file, self.seed, self.code = file, seed, code_hash()
        file.parent.mkdir(parents=True, exist_ok=True)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of this seed and this code; a line that a kill left truncated is not one."""
        found = []
        for text in self.file.read_text().splitlines() if self.file.is_file() else []:
            with contextlib.suppress(ValueError):
                found.append(json.loads(text))
        return [line for line in found if (line["seed"], line["code"]) == (self.seed, self.code)]

    def add(self, **line: Any) -> None:
        """Append a line, in one write."""
        text = json.dumps({"seed": self.seed, "code": self.code, **line}) + "\n"
        with self.file.open("ab", buffering=0) as stream:
            stream.write(text.encode())


def make_reference(name: str, folder: Path):
    """Run a configuration undisturbed; return its Reference. Raises RuntimeError if it fails.

    On a machine with other work a rank may not answer in time: the second failure counts.
    """
    from tests.soak import faults, runs

    for _ in range(2):
        trial = faults.Trial(folder / f"reference-{name}", name, faults.Reference({}, 60.0, []), random.Random(0))
        ended = trial.command(record=True)
        result = runs.result(trial.run, trial.config)
        if ended.code == 0:
            break
    if ended.code or not result:
        raise RuntimeError(f"the undisturbed run of {name} failed:\n{ended.output[-3000:]}")
    num_bytes = sum(path.stat().st_blocks * 512 for path in trial.case.rglob("*"))
    shutil.rmtree(trial.case)
    return faults.Reference(result, ended.seconds, ended.events, num_bytes)


def attempt(name: str, seed: str, folder: Path, reference: Any, has_mounts: bool) -> dict[str, Any]:
    """Try a case until its fault hits; return its line."""
    from tests.soak import faults

    kind_name, config = name.rsplit(":", 2)[:2]
    kind = next(kind for kind in faults.KINDS if kind.name == kind_name)
    case, began = folder / re.sub(r"\W+", "-", name), time.monotonic()
    line: dict[str, Any] = {"case": name, "kind": kind_name, "config": config}
    if kind.needs_disk and not has_mounts:
        return line | {"verdict": "not run", "notes": ["mounting a tmpfs is not permitted here"]}
    verdict, notes, draws = "not hit", [], 0
    while verdict == "not hit" and draws < faults.MOST_DRAWS:
        trial = faults.Trial(case, config, reference, random.Random(f"{seed}:{name}:{draws}"))
        draws += 1
        with contextlib.suppress(faults.NotHit):
            verdict = kind.procedure(trial)
        notes = trial.notes
    seconds = round(time.monotonic() - began, 1)
    if verdict in GOOD:
        shutil.rmtree(case, ignore_errors=True)
        case.with_name(f"{case.name}.log").unlink(missing_ok=True)
    return line | {"verdict": verdict, "draws": draws, "seconds": seconds, "notes": notes}


def work(names: list[str], taken: Any, state: State, folder: Path, references: dict, has_mounts: bool) -> None:
    """Do what no other worker has taken."""
    from tests.soak import commands

    commands.die_with_parent()
    commands.adopt_orphans()
    while True:
        with taken.get_lock():
            index = taken.value
            taken.value += 1
        if index >= len(names):
            return
        name = names[index]
        try:
            if name in references:
                line = {"reference": name, **vars(make_reference(name, folder))}
            else:
                line = attempt(name, state.seed, folder, references[name.rsplit(":", 2)[1]], has_mounts)
        except Exception:  # a defect of the soak itself, and no verdict
            line = {"case": name, "defect": traceback.format_exc()}
        state.add(**line)
        print(f"{line.get('verdict', 'reference' if 'reference' in line else 'DEFECT'):10}{name}", flush=True)


def in_workers(names: list[str], *rest: Any) -> None:
    """Do all of these names in NUM_WORKERS forked workers."""
    context = multiprocessing.get_context("fork")
    taken = context.Value("i", 0)
    workers = [context.Process(target=work, args=(names, taken, *rest)) for _ in range(min(NUM_WORKERS, len(names)))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def table(lines: list[dict[str, Any]], seed: str) -> str:
    """Return the Markdown table of what was done."""
    from soren_align.run.provenance import provenance
    from tests.soak.faults import KINDS, VERDICTS

    done = [line for line in lines if line.get("verdict", "not run") != "not run"]
    record = provenance()
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("python", "torch", "transformers", "trl"))
    text = f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}; {versions}; commit "
    text += f"{str(record['commit'])[:12]}; seed {seed}.\n\n| fault | n | {' | '.join(VERDICTS)} |\n|{'---|' * 8}\n"
    for name in [*(kind.name for kind in KINDS), "all"]:
        verdicts = Counter(line["verdict"] for line in done if name in ("all", line["kind"]))
        if verdicts:
            cells = [str(verdicts[verdict] or "") for verdict in VERDICTS]
            bold = "**" if name == "all" else ""
            text += f"| {bold}{name}{bold} | {verdicts.total()} | {' | '.join(cells)} |\n"
    configs = Counter(line["config"] for line in done)
    text += f"\nFaults by kind of run: {', '.join(f'{name} {number}' for name, number in configs.most_common())}.\n"
    hit = sum(line["verdict"] != "not hit" for line in done)
    draws = sum(line.get("draws", 0) for line in done)
    text += f"Of {draws} faults {hit} hit a run between its first step and its end; the others were repeated.\n"
    not_run = {line["case"]: line["notes"][0] for line in lines if line.get("verdict") == "not run"}
    return text + "".join(f"{len(not_run)} were not run: {note}.\n" for note in set(not_run.values()))


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description="Faults on runs of every kind.")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--state", type=Path)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--one", metavar="CASE")
    options = parser.parse_args()
    state = State(options.state or ROOT / "runs/soak" / f"{options.seed}.jsonl", options.seed)

    from tests.soak import faults

    folder = state.file.with_suffix("")
    folder.mkdir(exist_ok=True)
    has_mounts = faults.separate_mounts()
    load_libraries(folder)
    names = [options.one] if options.one else cases(options.seed, options.sample, options.only)
    finished = {line["reference"] for line in state.lines() if "reference" in line}
    needed = dict.fromkeys(name.rsplit(":", 2)[1] for name in names)
    in_workers([name for name in needed if name not in finished], state, folder, needed, has_mounts)
    references = {line["reference"]: faults.Reference(**{f.name: line[f.name] for f in fields(faults.Reference)})
                  for line in state.lines() if "reference" in line}  # fmt: skip
    if missing := needed.keys() - references.keys():
        print(*(line["defect"] for line in state.lines() if "defect" in line), f"no reference: {missing}", sep="\n")
        return 1
    if options.one:
        line = attempt(options.one, options.seed, folder, references[options.one.rsplit(":", 2)[1]], has_mounts)
        print(json.dumps(line, indent=1))
        return 0 if line["verdict"] in GOOD else 1
    done = {line["case"] for line in state.lines() if "verdict" in line}
    in_workers([name for name in names if name not in done], state, folder, references, has_mounts)
    # Of a case that met a defect of the soak, and was repeated, the last line counts.
    lines = list({line["case"]: line for line in state.lines() if line.get("case") in names}.values())
    bad = [line for line in lines if line.get("verdict") not in (*GOOD, "not hit", "not run")]
    for line in bad:
        print(f"\n{line.get('verdict', 'DEFECT')}  --one '{line['case']}'")
        print(*(f"    {note}" for note in line.get("notes", [line.get("defect")])), sep="\n")
    print("\n" + table(lines, options.seed))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
