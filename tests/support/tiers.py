"""The tiers of the tests: how much of a machine a test needs.

The tier of a test is the nearest tier mark on it, its class or its module; else `ranks` if it uses the fixture
rank_pools; else `model` if it uses one of MODEL_FIXTURES; else `unit`. After collection every test has one tier mark.
"""

import contextlib
import multiprocessing.process
import os
import sys

TIERS = {"unit": "runs no language model and starts no process", "model": "runs a language model in this process",
         "ranks": "runs on several ranks of a pool that is started once",
         "process": "starts processes: kills, launchers, the demo, the wheel",
         "slurm": "submits jobs to daemons of Slurm; `make test-slurm` alone runs it",
         "hosts": "trains on two hosts, which are network namespaces: `make test-hosts`"}  # fmt: skip
MODEL_FIXTURES = {"tiny_run", "models", "readers"}
SAMPLE = "a test of tier ranks or process that `make test` runs too"
SLOW = "a test of tier model that `make test` and `make test-cpus` leave to `make test-rest`"
REST = "a test that `make test` leaves to `make test-rest`; `make test-cpus` runs it"


def assign_tiers(items):
    """Replace all tier marks of the collected tests by one on each test."""
    tiers = [_tier(item) for item in items]
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, tier in zip(items, tiers, strict=True):
        item.add_marker(tier)


def _tier(item):
    marks = [mark.name for mark in item.iter_markers() if mark.name in TIERS]  # the nearest first
    if marks:
        return marks[0]
    if "rank_pools" in item.fixturenames:
        return "ranks"
    return "unit" if MODEL_FIXTURES.isdisjoint(item.fixturenames) else "model"


class ProcessGuard:
    """Refuses to start Python during a test of tier unit or model."""

    def __init__(self):
        self.tier = None
        sys.addaudithook(self._on_event)  # cannot be removed
        start = multiprocessing.process.BaseProcess.start

        def guarded_start(process):
            self._refuse(f"the process {process.name}")
            start(process)

        multiprocessing.process.BaseProcess.start = guarded_start

    @contextlib.contextmanager
    def during(self, tier):
        """Guard the `with` block, a test of this tier."""
        self.tier = tier
        try:
            yield
        finally:
            self.tier = None

    def _on_event(self, event, arguments):
        if event == "subprocess.Popen":
            program = os.path.basename(os.fsdecode(arguments[0]))
            # -I: run/weights.py tries a regular expression in a bare interpreter, which loads nothing.
            if program.startswith(("python", "torchrun")) and "-I" not in arguments[1]:
                self._refuse(program)

    def _refuse(self, program):
        assert self.tier not in ("unit", "model"), (
            f"a test of tier {self.tier} starts {program}; mark it with `process`"
        )
