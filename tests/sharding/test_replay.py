"""A captured step can be replayed without its ranks: the same owners, the same collectives, the weights of one process.

captures/ has a file for each machine and number of ranks: `soren-align doctor --processes N --capture FILE`. After an
intended change of layouts or plans, CAPTURES=write replaces each by its replay.
"""

import json
import os
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from soren_align import sharding
from soren_align.sharding import capture, ddp
from soren_align.sharding.collectives import broadcast
from tests.support.parity_configurations import TOLERANCE
from tests.support.replay import captured, first_difference, replay

FILES = sorted((Path(__file__).parent / "captures").glob("*.json"))
CONTENTS = {file.stem: json.loads(file.read_text()) for file in FILES}
CASES = [(name, way) for name, content in CONTENTS.items() for way in capture.WAYS if way in content]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_replay_equals_the_run_that_was_captured(name, way):
    content = CONTENTS[name]
    replayed, difference = replay(content, way)
    if os.environ.get("CAPTURES") == "write":
        content[way] = replayed
        FILES[[*CONTENTS].index(name)].write_text(json.dumps(content) + "\n")
    assert first_difference(content, way, replayed) is None
    assert difference <= TOLERANCE


@pytest.mark.parametrize("way", capture.WAYS)
def test_an_exchanged_owner_is_noticed(way):
    content = deepcopy(CONTENTS["gloo-3"])
    replayed, _ = replay(content, way)
    by_name = {entry[0]: entry for entry in content[way][1][0]["plan"]}
    one, other = by_name["3.weight"], by_name["2.weight"]
    one[1], other[1] = other[1], one[1]
    place = f"{way}, rank 1, call 1 of step(), owner of 3.weight"
    assert first_difference(content, way, replayed) == f"{place}: expected rank {one[1]}, found rank {other[1]}"


@pytest.mark.parametrize("way", capture.WAYS)
def test_a_changed_order_of_collectives_is_noticed(way):
    content = deepcopy(CONTENTS["gloo-3"])
    replayed, _ = replay(content, way)
    lines = content[way][2][0]["collectives"]
    lines[2], lines[3] = lines[3], lines[2]
    place = f"{way}, rank 2, call 1 of step(), number 3 of collectives: "
    assert first_difference(content, way, replayed) == f"{place}expected {lines[2]}, found {lines[3]}"


def test_another_order_on_one_rank_is_a_sentence_and_no_deadlock(monkeypatch):
    """With NCCL all ranks would wait for one another, without a message."""

    def missing(tensor, source, group):
        if dist.get_rank(group) == 1 and tensor.shape == (48, 97):
            return SimpleNamespace(wait=lambda: None)
        return broadcast(tensor, source, group)

    monkeypatch.setattr(ddp, "broadcast", missing)
    place = "DDP, rank 1, call 1 of step(), number 5 of collectives"
    with pytest.raises(AssertionError, match=re.escape(f"{place}: expected broadcast [48, 97] from rank 2")):
        replay(CONTENTS["gloo-3"], "DDP")


@pytest.mark.parametrize("way", capture.WAYS)
def test_a_step_of_ranks_is_captured_and_replayed(ranks, way):
    records = json.loads(json.dumps(ranks.run(captured, way)))
    shipped = CONTENTS[f"gloo-{ranks.num_ranks}"]
    assert first_difference(shipped, way, records) is None
    content = {**shipped, way: records}
    assert first_difference(content, way, replay(content, way)[0]) is None


def test_all_collectives_of_a_step_are_recorded():
    """Each is started in collectives.py; those of ranks.py are between steps."""
    calls = re.compile(r"dist\.(all_|broadcast|reduce|gather|scatter|send|recv|barrier)\w*\(")
    files = Path(sharding.__file__).parent.glob("*.py")
    assert {file.name for file in files if calls.search(file.read_text())} == {"collectives.py", "ranks.py"}
