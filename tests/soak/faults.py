"""The faults: what happens to a run, where, and what the same command must do afterwards."""

import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.soak import commands, runs
from tests.soak.commands import Ended, Place, kill_all
from tests.soak.runs import CONFIGS, ONE_PROCESS, RANKS

VERDICTS = ("identical", "clear", "unclear", "hang", "WRONG", "not hit")
"""identical: the same command ends with the undisturbed result. clear: a sentence that names the place, then, after its
remedy, the undisturbed result. unclear: the same, but with a traceback, or without such a sentence. hang: a command did
not end. WRONG: another result, or one that no command brings about any more."""
CRASHES = {-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE}
MOST_RERUNS = 4
MOST_DRAWS = 4
MS_REMOUNT, MS_BIND, MS_PRIVATE, MNT_DETACH = 32, 4096, 1 << 14 | 1 << 18, 2
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
Remedy = Callable[[], Any]


@dataclass
class Reference:
    """The undisturbed run of a configuration."""

    result: dict[str, Any]
    seconds: float
    events: list[str]
    num_bytes: int = 0
    """Of the run's folder on the disk, at its end."""

    def num_events(self, category: str | None) -> int:
        """Return how many events of a category there are."""
        return len(self.events) if category is None else self.events.count(category)


class NotHit(Exception):
    """The fault came when nothing was left to disturb."""


@dataclass
class Trial:
    """One fault on one run."""

    case: Path
    name: str
    reference: Reference
    rng: random.Random
    ended: list[Ended] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: str = "run"
    kept: list[Path] = field(default_factory=list)
    """The complete checkpoints at the time of the fault that must not be lost."""

    def __post_init__(self):
        self.config = CONFIGS[self.name]
        self.log = self.case.with_name(f"{self.case.name}.log")
        self.log.unlink(missing_ok=True)
        runs.lay_out(self.case, self.config)

    @property
    def run(self) -> Path:
        """The run folder, or the study's."""
        return self.case / self.output

    def command(self, prepare: Callable[[], Any] = lambda: None, **fault: Any) -> Ended:
        """Run the case's command, with a fault or without."""
        load = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))

        def prepare_both() -> None:
            runs.prepare(self.name, self.case)
            prepare()

        ended = commands.run(
            runs.arguments(self.config, self.output), self.case, self.log,
            seconds=60 + runs.DDP_TIMEOUT_SECONDS * 2 + 10 * load * self.reference.seconds,
            environment=runs.environment(self.case), prepare=prepare_both, **{"processes": self.config.ranks, **fault},
        )  # fmt: skip
        self.ended.append(ended)
        self.notes.append(f"exit {','.join(map(str, ended.codes))}")
        return ended

    def draw(self, category: str | None = None) -> Place:
        """Return a random event of the undisturbed run. Raises NotHit if it has none of the category."""
        number = self.reference.num_events(category)
        if not number:
            raise NotHit
        place = Place(category, self.rng.randint(1, number))
        self.notes.append(f"at event {place.ordinal} of {number} of {category or 'all'}")
        return place

    def sealed(self) -> list[Path]:
        """Return the complete checkpoints, the newest last."""
        seals = self.run.glob("checkpoints/checkpoint-*/soren_align.json")
        return sorted((seal.parent for seal in seals), key=lambda path: int(path.name.split("-")[1]))

    def fault(self, place: Place | None, act: Callable[[list[int]], None], **more: Any) -> Ended:
        """Run the command with a fault. Raises NotHit unless it came; notes what was there when it came."""

        def acting(pids: list[int]) -> None:
            self.kept = self.sealed()
            try:
                act(pids)
            except ProcessLookupError:  # a rank has ended before
                raise NotHit from None

        ended = self.command(place=place, fault=acting, **more)
        if not ended.hit:
            raise NotHit
        self.check_kept()
        return ended

    def check_kept(self) -> None:
        """Note a loss if the newest complete checkpoint of the time of the fault has no successor."""
        if self.kept and not self.config.is_study and not (self.run / "model").is_dir():
            newest = self.sealed()[-1:]
            if not newest or int(newest[0].name.split("-")[1]) < int(self.kept[-1].name.split("-")[1]):
                self.notes.append(f"LOST {self.kept[-1].name}")

    def stop_with_checkpoints(self) -> Path:
        """Kill the run after a checkpoint; return the newest. Raises NotHit if there is none."""
        self.fault(Place("metrics.jsonl", self.rng.randint(5, 7)), kill_all)
        if not self.sealed():
            raise NotHit
        return self.sealed()[-1]

    def is_finished(self, last: Ended) -> bool:
        """Whether the run has ended well: by its command, by its first rank, or by the ranks of a killed launcher."""
        if set(last.codes) == {0}:
            return True
        may_have = {0, -signal.SIGKILL} & set(last.codes) and not self.config.is_study
        return bool(may_have and runs.result(self.run, self.config))

    def conclude(self, remedy: Remedy | None = None, names: str = "", ignored: tuple[str, ...] = ()) -> str:
        """Rerun the command to its end; return the verdict.

        remedy: to be applied when the command has refused. names: a pattern that the refusal must match. ignored: keys
        of the result that the fault may change (see runs.differences).
        """
        is_clear = is_unclear = False
        for _ in range(MOST_RERUNS):
            last = self.ended[-1]
            if last.is_hanging:
                return "hang"
            if self.is_finished(last):
                break
            message = _message(last.output)
            fails = 1 in last.codes and "erun the same command" not in last.output
            if 2 in last.codes or (fails and remedy):
                self.notes.append(f"message: {message[-400:]}")
                if remedy is None:
                    return "WRONG"
                is_clear, is_unclear = True, is_unclear or fails or not re.search(names, message)
                self.check_kept()
                remedy()
                remedy = None
            elif fails or CRASHES & set(last.codes):
                self.notes.append(f"no remedy: {message[-300:]}")
                is_unclear = True
            self.command()
        if not self.is_finished(self.ended[-1]):
            self.notes.append("no rerun ended the run")
            return "WRONG"
        traces = [ended.output for ended in self.ended if "Traceback (most recent call last)" in ended.output]
        self.notes += [f"traceback: {_message(trace)[-300:]}" for trace in traces]
        different = runs.differences(self.reference.result, runs.result(self.run, self.config), ignored)
        self.notes += different[:5]
        if different or any(note.startswith("LOST") for note in self.notes):
            return "WRONG"
        return "unclear" if is_unclear or traces else "clear" if is_clear else "identical"


def _message(output: str) -> str:
    """Return what a command has printed but for its progress, whose lines begin with a label of ten columns."""
    progress = re.compile(r"[a-z]* {2,}|optimizer ")
    return " | ".join(line for line in output.splitlines() if line.strip() and not progress.match(line))


def send(number: int, which: str = "all", rng: random.Random | None = None) -> Callable[[list[int]], None]:
    """Return a fault that sends a signal to all processes, or to one of them."""

    def act(pids: list[int]) -> None:
        for pid in pids if which == "all" else [(rng or random).choice(pids)]:
            os.kill(pid, number)

    return act


# -- signals ----------------------------------------------------------------------------------------------------------


def signals(number: int, *, times: int = 1, again: float = 0.0) -> Callable[[Trial], str]:
    """A signal at a random write, repeated within a fifth of a second. again: share of reruns that are killed too."""

    def kind(trial: Trial) -> str:
        def repeat(pids: list[int]) -> None:
            for _ in range(times - 1):
                time.sleep(trial.rng.uniform(0, 0.2))
                os.kill(pids[0], number)

        trial.fault(trial.draw(), send(number), afterwards=repeat)
        if trial.rng.random() < again:
            with contextlib.suppress(NotHit):
                trial.fault(trial.draw(), kill_all)
        return trial.conclude()

    return kind


def stopped(trial: Trial) -> str:
    """SIGSTOP, and SIGCONT two seconds later."""

    def afterwards(pids: list[int]) -> None:
        time.sleep(2)
        os.kill(pids[-1], signal.SIGCONT)

    def act(pids: list[int]) -> None:
        os.kill(pids[-1], signal.SIGSTOP)

    trial.fault(trial.draw(), act, afterwards=afterwards)
    return trial.conclude()


def killed_at_write_of(*categories: str | None) -> Callable[[Trial], str]:
    """SIGKILL at a random write of one of these categories."""

    def kind(trial: Trial) -> str:
        there = [name for name in categories if trial.reference.num_events(name)]
        if not there:
            raise NotHit
        trial.fault(trial.draw(trial.rng.choice(there)), kill_all)
        return trial.conclude()

    return kind


# -- disks and limits -------------------------------------------------------------------------------------------------


def separate_mounts() -> bool:
    """Let this process and its children mount what no other process sees; whether that is allowed."""
    user, group = os.getuid(), os.getgid()
    if commands.LIBC.unshare(CLONE_NEWNS if user == 0 else CLONE_NEWNS | CLONE_NEWUSER):
        return False
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    return not commands.LIBC.mount(None, b"/", None, ctypes.c_ulong(MS_PRIVATE), None)


@contextlib.contextmanager
def small_disk(trial: Trial, size: int):
    """A disk of this many bytes in the place of the case's folder; yields a function that gives it more."""
    target = os.fsencode(trial.case)

    def mount(size: int, flags: int = 0) -> None:
        options = f"size={size}".encode()
        if commands.LIBC.mount(b"tmpfs", target, b"tmpfs", ctypes.c_ulong(flags), options):
            raise OSError(ctypes.get_errno(), "mount")

    mount(size)
    try:
        runs.write_inputs(trial.case, trial.config)
        yield lambda: mount(1 << 28, MS_REMOUNT)
    finally:
        commands.wait_for_strays([], time.monotonic() + 5)
        commands.LIBC.umount2(target, MNT_DETACH)


FULL = r"No space left|bytes free|free, and|full|space"


def disk_filled(trial: Trial) -> str:
    """A disk that another program fills while the run trains."""
    room = trial.rng.choice([0, 0, trial.rng.randint(1, 100_000)])
    with small_disk(trial, 1 << 27):
        filler = trial.case / "filler"

        def fill(pids: list[int]) -> None:
            # A study goes on, and may fill it meanwhile.
            with filler.open("wb") as stream, contextlib.suppress(OSError):
                free = shutil.disk_usage(trial.case).free
                os.posix_fallocate(stream.fileno(), 0, max(1, free - room))

        when = study_has(trial, "search/*/0*/metrics.jsonl") if trial.config.is_study else None
        trial.notes.append(f"{room:,} bytes are left")
        ended = trial.fault(None if when else trial.draw(), fill, when=when)
        if ended.code == 0 and not when:
            raise NotHit
        return trial.conclude(filler.unlink, FULL)


# -- damage to what has been written ----------------------------------------------------------------------------------


def flip_bit(file: Path, rng: random.Random) -> str:
    """Flip one random bit; return where."""
    content = bytearray(file.read_bytes())
    place, bit = rng.randrange(len(content)), rng.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place:,} of {file.name}"


def zeros(file: Path, rng: random.Random) -> str:
    """Write 512 zeros at a random place, as a page that a power cut has lost; return where."""
    content = file.read_bytes()
    place = rng.randrange(len(content))
    end = min(place + 512, len(content))
    file.write_bytes(content[:place] + bytes(end - place) + content[end:])
    return f"zeros from {place:,} of {file.name} on"


def truncate(file: Path, rng: random.Random) -> str:
    """Cut a file at a random byte; return where."""
    size = rng.randrange(file.stat().st_size)
    os.truncate(file, size)
    return f"{file.name} cut at {size:,}"


def emptied(file: Path, rng: random.Random) -> str:
    """Make a file empty."""
    file.write_bytes(b"")
    return f"{file.name} empty"


def removed(file: Path, rng: random.Random) -> str:
    """Remove a file."""
    file.unlink()
    return f"{file.name} removed"


def is_weights(file: Path) -> bool:
    """Whether a checkpoint's file has weights."""
    return file.name.endswith(("model.safetensors", ".distcp")) or "model_states" in file.name


def is_optimizer(file: Path) -> bool:
    """Whether a checkpoint's file has the optimizer's state."""
    return "optim" in str(file.relative_to(file.parents[2]))


def damaged_checkpoint(*damages: Callable[[Path, random.Random], str], of: Callable[[Path], bool] | str = "any"):
    """Damage to a file of the newest checkpoint; the remedy: restore the file, or remove the checkpoint."""

    def kind(trial: Trial) -> str:
        checkpoint = trial.stop_with_checkpoints()
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
        if of == "any":
            chosen = files
        elif isinstance(of, str):
            chosen = [path for path in files if path.name == of]
        else:
            chosen = [path for path in files if of(path)]
        file = trial.rng.choice(chosen)
        backup = trial.case / "backup"
        shutil.copytree(checkpoint, backup)
        trial.notes.append(trial.rng.choice(damages)(file, trial.rng))
        trial.kept = trial.kept[:-1]

        def restore() -> None:
            shutil.rmtree(checkpoint, ignore_errors=True)
            if not is_removed:
                shutil.copytree(backup, checkpoint)

        is_removed = trial.rng.random() < 0.5
        return trial.conclude(restore, checkpoint.name)

    return kind


def damaged_record(name: str):
    """Damage to a file of the run that is not a checkpoint's; the remedy: restore it."""

    def kind(trial: Trial) -> str:
        damages = [truncate, emptied, removed]
        trial.fault(trial.draw(), kill_all)
        file = trial.run / name
        if not file.is_file() or not file.stat().st_size:
            raise NotHit
        content = file.read_bytes()
        record = json.loads((trial.run / "run.json").read_text())
        trial.notes.append(trial.rng.choice(damages)(file, trial.rng))
        # Measurements are restored by a resumed training, from its checkpoint; after it no command reads them again.
        is_trained = record["status"] not in ("training", "diverged")
        ignored = ("metrics",) if name == "metrics.jsonl" and is_trained else ()

        def restore() -> None:
            file.write_bytes(content)

        return trial.conclude(restore, f"{re.escape(name)}|run folder|another recipe|run of", ignored)

    return kind


def changed_data(trial: Trial) -> str:
    """The training data has other letters, none of a key, or the file is gone; the remedy: restore it."""
    trial.stop_with_checkpoints()
    named = [text.split("=data/")[1] for text in trial.config.overrides if "train.path=data/" in text]
    (name,) = named or ["chat.jsonl"]
    file = trial.case / "data" / name
    content = file.read_text()
    if trial.rng.random() < 0.3:
        file.unlink()
        trial.notes.append(f"{name} gone")
    else:
        place = trial.rng.randrange(len(content) // 2)
        file.write_text(content[:place] + content[place:].translate(str.maketrans("bfkw", "fbwk")))  # the same size
        trial.notes.append(f"{name}: b and f, k and w exchanged from {place:,} on")
    return trial.conclude(lambda: file.write_text(content) and None, "data|belongs to another run")


def damaged_cache(is_new: bool):
    """Damage to a file of the caches, which the rerun reads: a run anew, or one that was killed; there is no remedy to
    apply, because an entry is made again."""

    def kind(trial: Trial) -> str:
        if is_new:
            trial.command()
            shutil.rmtree(trial.run)
        else:
            trial.fault(trial.draw(), kill_all)
        files = sorted(path for path in (trial.case / "cache").rglob("*") if path.is_file() and path.stat().st_size)
        file = trial.rng.choice(files)
        damage = trial.rng.choice([flip_bit, zeros, truncate, emptied, removed])
        trial.notes.append(f"{file.relative_to(trial.case)}: {damage(file, trial.rng)}")
        trial.command()
        return trial.conclude()

    return kind


# -- ranks ------------------------------------------------------------------------------------------------------------


def signal_to_ranks(number: int, which: str, category: str | None = None) -> Callable[[Trial], str]:
    """A signal to one rank or to both, while the first one waits at a random write, of a category."""

    def kind(trial: Trial) -> str:
        trial.fault(trial.draw(category), send(number, which, trial.rng))
        return trial.conclude()

    return kind


def other_host(what: str):
    """The second rank has other data, another tokenizer or another version, as a host with its own copies; the remedy:
    give it the first one's.
    """

    def kind(trial: Trial) -> str:
        file = None
        if what == "other data":
            file = trial.case / "data/chat.jsonl"
        if what == "another tokenizer":  # of a start that each host has: one that a run makes lies in the run folder
            trial.command()
            shutil.move(trial.run / "model", trial.case / "start")
            overrides = (*trial.config.overrides, "model.name_or_path=start", "model.init_seed=null")
            trial.config = replace(trial.config, overrides=overrides)
            shutil.rmtree(trial.run)
            trial.command()
            trial.reference = replace(trial.reference, result=runs.result(trial.run, trial.config))
            shutil.rmtree(trial.run)
            file = trial.case / "start/tokenizer.json"
        if file is not None:
            # Two words exchanged: as many examples and tokens.
            text = file.read_text().replace("nest", "\0").replace("cave", "nest").replace("\0", "cave")
            (trial.case / "other").write_text(text)

        def prepare() -> None:
            if os.environ["RANK"] == "0":
                return
            if file is None:
                from soren_align.training import reference  # loaded by now, with the soak's caches

                reference.LIBRARIES["trl"] = "9.9.9"
                return
            commands.LIBC.unshare(CLONE_NEWNS)  # what is mounted from here on is this process's
            paths = os.fsencode(trial.case / "other"), os.fsencode(file)
            if commands.LIBC.mount(*paths, None, ctypes.c_ulong(MS_BIND), None):
                raise OSError(ctypes.get_errno(), "mount")

        trial.command(prepare)
        if trial.ended[-1].codes != [2, 2] or (trial.run / "metrics.jsonl").exists():
            return "WRONG"
        return trial.conclude(lambda: None, f"rank 1 on .* has .*{what}")

    return kind


# -- several processes of one command ---------------------------------------------------------------------------------


def has_lines(trial: Trial, pattern: str, number: int) -> Callable[[], bool]:
    """Return whether a file of the run has so many lines, as a condition."""

    def condition() -> bool:
        for file in trial.run.glob(pattern):
            with contextlib.suppress(OSError):
                if file.read_text().count("\n") >= number:
                    return True
        return False

    return condition


def study_has(trial: Trial, pattern: str) -> Callable[[], bool]:
    """Return a condition: a run of the study, of those that match, has taken some steps."""
    return has_lines(trial, pattern, trial.rng.randint(3, 9))


def below(program: str, pids: list[int]) -> list[int]:
    """Return the processes below a command that run this program. Raises NotHit if there are none."""
    found = [pid for pid in commands.descendants(pids[0]) if program in commands.command_line(pid)]
    if not found:
        raise NotHit
    return found


def signal_to_process(number: int, program: str | None) -> Callable[[Trial], str]:
    """A signal to one of the ranks that torchrun started, or to the launcher."""

    def kind(trial: Trial) -> str:
        def act(pids: list[int]) -> None:
            os.kill(trial.rng.choice(below(program, pids)) if program else pids[0], number)

        if trial.fault(None, act, when=has_lines(trial, "metrics.jsonl", trial.rng.randint(6, 20))).code == 0:
            raise NotHit
        return trial.conclude()

    return kind


STAGES = ("search/*/0*/metrics.jsonl", "verdict/*/*/metrics.jsonl")


def compare_killed(number: int, program: str | None) -> Callable[[Trial], str]:
    """A signal to the command, to its fork server, or to a run."""

    def kind(trial: Trial) -> str:
        def act(pids: list[int]) -> None:
            target = pids[0]
            if program:
                servers, above = below("forkserver", pids), commands.parents()
                are_runs = program == "run"  # forked from the server, which the command has started
                targets = [pid for pid in servers if (above.get(pid) in servers) is are_runs]
                if not targets:
                    raise NotHit
                target = targets[0]
            os.kill(target, number)

        trial.fault(None, act, when=study_has(trial, trial.rng.choice(STAGES)))
        return trial.conclude()

    return kind


@dataclass(frozen=True)
class Kind:
    """A row of the table."""

    name: str
    number: int
    configs: tuple[str, ...]
    procedure: Callable[[Trial], str]
    needs_disk: bool = False


ONE, TWO = tuple(ONE_PROCESS), tuple(RANKS)
CACHED = ("sft", "sft+eval", "dpo", "dpo+reference", "pretrain", "zero2")
KINDS = [
    Kind("SIGKILL, 40% again while resuming", 10, ONE, signals(signal.SIGKILL, again=0.4)),
    Kind("SIGTERM once", 8, ONE, signals(signal.SIGTERM)),
    Kind("SIGTERM twice", 6, ONE, signals(signal.SIGTERM, times=2)),
    Kind("SIGINT once", 8, ONE, signals(signal.SIGINT)),
    Kind("SIGINT twice", 5, ONE, signals(signal.SIGINT, times=2)),
    Kind("SIGHUP", 4, ONE, signals(signal.SIGHUP)),
    Kind("SIGSTOP 2 s", 5, ONE, stopped),
    Kind("killed at a random write", 20, ONE, killed_at_write_of(None)),
    Kind("killed at a write of checkpoints", 5, ONE, killed_at_write_of("checkpoints")),
    Kind("killed at a write of eval", 6, ("sft+eval",), killed_at_write_of("eval", "cache")),
    Kind("killed at a write of metrics.jsonl", 4, ONE, killed_at_write_of("metrics.jsonl")),
    Kind("killed at a write of run.json", 6, ONE, killed_at_write_of("run.json")),
    Kind("killed at a write of model.part, model", 8, ONE, killed_at_write_of("model.part", "model")),
    Kind("killed at a write of logits, samples, spectra", 6, ("extras",),
         killed_at_write_of("start_logits.safetensors", "samples.jsonl", "spectra.jsonl")),
    Kind("disk filled meanwhile", 10, ONE, disk_filled, needs_disk=True),
    Kind("checkpoint: file truncated, empty, removed", 8, ONE, damaged_checkpoint(truncate, emptied, removed)),
    Kind("checkpoint: seal damaged", 6, ONE,
         damaged_checkpoint(truncate, flip_bit, emptied, removed, of="soren_align.json")),
    Kind("checkpoint: one bit of the weights", 6, ONE, damaged_checkpoint(flip_bit, of=is_weights)),
    Kind("checkpoint: one bit of the optimizer", 5, ONE, damaged_checkpoint(flip_bit, of=is_optimizer)),
    Kind("checkpoint: one bit of any file", 10, ONE, damaged_checkpoint(flip_bit)),
    Kind("run.json damaged", 10, ONE, damaged_record("run.json")),
    Kind("metrics.jsonl damaged", 6, ONE, damaged_record("metrics.jsonl")),
    Kind("cache damaged, then a new run", 25, CACHED, damaged_cache(is_new=True)),
    Kind("cache damaged, then resumed", 25, CACHED, damaged_cache(is_new=False)),
    Kind("data changed or gone", 5, ONE, changed_data),
    Kind("streamed data changed or gone", 4, ("stream",), changed_data),
    Kind("2 ranks: SIGKILL of one", 8, TWO, signal_to_ranks(signal.SIGKILL, "one")),
    Kind("2 ranks: SIGKILL of both", 4, TWO, signal_to_ranks(signal.SIGKILL, "all")),
    Kind("2 ranks, async_save: SIGKILL of one", 12, ("fsdp2-async",), signal_to_ranks(signal.SIGKILL, "one", "checkpoints")),
    Kind("2 ranks, async_save: SIGKILL of both", 8, ("fsdp2-async",), signal_to_ranks(signal.SIGKILL, "all", "checkpoints")),
    Kind("2 ranks: SIGTERM of one", 4, TWO, signal_to_ranks(signal.SIGTERM, "one")),
    Kind("2 ranks: SIGINT of one", 4, TWO, signal_to_ranks(signal.SIGINT, "one")),
    Kind("2 ranks: SIGSTOP of one, 2 s", 2, TWO, stopped),
    Kind("2 ranks: SIGSTOP of one for good", 4, TWO, signal_to_ranks(signal.SIGSTOP, "one")),
    Kind("2 ranks: other data on one", 4, TWO, other_host("other data"), needs_disk=True),
    Kind("2 ranks: another tokenizer on one", 4, TWO, other_host("another tokenizer"), needs_disk=True),
    Kind("2 ranks: another version on one", 4, TWO, other_host("trl 9.9.9"), needs_disk=True),
    Kind("2 ranks: disk filled meanwhile", 6, TWO, disk_filled, needs_disk=True),
    Kind("2 ranks: shard truncated, empty, removed", 6, TWO,
         damaged_checkpoint(truncate, emptied, removed, of=is_optimizer)),
    Kind("2 ranks: one bit of a shard", 8, TWO, damaged_checkpoint(flip_bit, of=is_optimizer)),
    Kind("--processes 2: a rank killed", 2, ("processes",), signal_to_process(signal.SIGKILL, "launch.worker")),
    Kind("--processes 2: a rank stopped", 1, ("processes",), signal_to_process(signal.SIGSTOP, "launch.worker")),
    Kind("--processes 2: launcher killed", 1, ("processes",), signal_to_process(signal.SIGKILL, None)),
    Kind("--processes 2: SIGTERM", 1, ("processes",), signal_to_process(signal.SIGTERM, None)),
    Kind("compare: command killed", 2, ("compare",), compare_killed(signal.SIGKILL, None)),
    Kind("compare: SIGTERM", 1, ("compare",), compare_killed(signal.SIGTERM, None)),
    Kind("compare: one run killed", 2, ("compare",), compare_killed(signal.SIGKILL, "run")),
    Kind("compare: fork server killed", 1, ("compare",), compare_killed(signal.SIGKILL, "server")),
    Kind("compare: disk filled meanwhile", 2, ("compare",), disk_filled, needs_disk=True),
]  # fmt: skip
