"""The tiers of the tests: how much of a machine a test needs.

The tier of a test is the nearest tier mark on it, its class or its module; else `ranks` if it uses the fixture
rank_pools; else `unit`. After collection every test has exactly one tier mark.
"""

import contextlib
import os
import sys

TIERS = {
    "unit": "runs no language model and starts no process",
    "model": "runs a language model in this process",
    "ranks": "runs on several ranks of a pool that is started once",
    "process": "starts processes: kills, launchers, the demo, the wheel",
}
SAMPLE = "a test of tier ranks or process that `make test` runs too"


def assign_tiers(items):
    """Replace all tier marks of the collected tests by one on each test."""
    tiers = [_tier(item) for item in items]
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, tier in zip(items, tiers, strict=True):
        item.add_marker(tier)


def _tier(item):
    marks = [mark.name for mark in item.iter_markers() if mark.name in TIERS]  # the nearest first
    return marks[0] if marks else "ranks" if "rank_pools" in item.fixturenames else "unit"


class ProcessGuard:
    """Refuses to start Python during a test of tier unit or model."""

    def __init__(self):
        self.tier = None
        sys.addaudithook(self._on_event)  # cannot be removed

    @contextlib.contextmanager
    def during(self, tier):
        """Guard the `with` block, a test of this tier."""
        self.tier = tier
        try:
            yield
        finally:
            self.tier = None

    def _on_event(self, event, arguments):
        if event == "subprocess.Popen" and self.tier in ("unit", "model"):
            program = os.path.basename(os.fsdecode(arguments[0]))
            if program.startswith(("python", "torchrun")):
                raise AssertionError(f"a test of tier {self.tier} starts {program}; mark it pytest.mark.process")
