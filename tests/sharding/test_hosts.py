"""A silent host is named, and no host is blamed for the silence of the store or of this rank."""

import itertools
import json
import socket

import pytest
import torch.distributed as dist
from soren_align.core.errors import LostRankError, UserError
from soren_align.launch import torchrun
from soren_align.sharding import hosts
from soren_align.sharding.hosts import Host, Watch, mentioned, watched
from soren_align.sharding.ranks import Ranks
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

A = Host("a", (0, 1), frozenset({"10.0.0.1", "172.17.0.1"}))
B = Host("b", (2,), frozenset({"10.0.0.2", "172.17.0.1"}))
C = Host("c", (3, 5), frozenset({"10.0.0.21"}))


class Clock:
    """Stands in for `time`: sleeping is instantaneous, and a number of sleeps ends the process group."""

    def __init__(self, monkeypatch, beats, on_sleep=lambda: None):
        self.now, self.left, self.on_sleep = 0.0, beats, on_sleep
        monkeypatch.setattr(hosts, "time", self)
        monkeypatch.setattr(dist, "is_initialized", lambda: self.left > 0)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.left -= 1
        self.on_sleep()


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def watch(store, monkeypatch):
    """That of a rank on A. The store is on B."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    watch = Watch([A, B, C], A, store)
    for host in (B, C):
        Watch([A, B, C], host, store)
    return watch


def unexpected(error):
    raise AssertionError(error)


def errors(monkeypatch, watch, num_seconds, alive=(), suspended_seconds=0):
    """The messages of a watch that sees signs of life of `alive` in all these seconds."""

    def beat():
        for host in alive:
            watch._silence[host] = 0.0
        clock.now += suspended_seconds

    clock = Clock(monkeypatch, num_seconds, beat)
    messages = []
    watch.wait_for_silence(lambda error: messages.append(str(error)))
    return messages


CUT = (
    "{} did not answer for 40 s: that host is down or suspended, or the network between it and a is cut. Rerun the same"
)
CUT += " command to resume"


def test_a_silent_host_is_named(watch, monkeypatch):
    store = "b (rank 2)"
    assert errors(monkeypatch, watch, 100, [store, B]) == [CUT.format("c (ranks 3, 5)")]
    assert errors(monkeypatch, watch, 100, [store, B, C]) == []


def test_if_the_store_is_silent_its_host_is_named_and_no_other(watch, monkeypatch):
    assert errors(monkeypatch, watch, 100) == [CUT.format("b (rank 2)")]


def test_a_store_on_no_host_is_named_by_its_address(store, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    message = CUT.format("the store at MASTER_ADDR=10.0.0.9")
    assert errors(monkeypatch, Watch([A, B], A, store), 100) == [message]


def test_a_rank_that_was_suspended_itself_blames_no_host_at_once(watch, monkeypatch):
    assert errors(monkeypatch, watch, 19, suspended_seconds=1000) == []
    assert errors(monkeypatch, watch, 100, suspended_seconds=1000) == [CUT.format("b (rank 2)")]


def test_a_new_sign_of_life_ends_a_silence_and_an_old_one_does_not(watch, store, monkeypatch):
    numbers = itertools.count()

    def beat():
        if next(numbers) == 0:  # after the first look
            watch._silence = dict.fromkeys(watch._silence, 30.0)
            store.set(watch._keys[B], "new")

    Clock(monkeypatch, 2, beat)
    watch.exchange_beats()
    assert watch._silence == {"b (rank 2)": 0.0, B: 0.0, C: 30.0}
    assert store.get(watch._keys[A]).endswith(b" 2")


def test_a_closed_store_is_silent(watch, monkeypatch):
    class Closed:
        def set(self, *_):
            raise dist.DistNetworkError("Broken pipe")

    watch.store = Closed()
    watch._silence = dict.fromkeys(watch._silence, 30.0)
    Clock(monkeypatch, 3)
    watch.exchange_beats()
    assert set(watch._silence.values()) == {30.0}


@pytest.mark.parametrize(("text", "host"), [
    ("Connection closed by peer [10.0.0.2]:10987", B),
    ("Read error [10.0.0.21]:1: Connection reset by peer", C),
    ("remote peer c<4000>", C),
    ("Connection closed by peer [10.0.0.1]:1", None),  # a rank of this host
    ("Connection closed by peer [172.17.0.1]:1", None),  # an address of two hosts
    ("a.b.c", None),
])  # fmt: skip
def test_an_error_is_about_the_host_whose_address_it_has(text, host):
    assert mentioned(text, [A, B, C], A) is host


@pytest.mark.parametrize(
    ("ranks", "text"), [((7,), "n (rank 7)"), ((0, 1, 2), "n (ranks 0 to 2)"), ((0, 2), "n (ranks 0, 2)")]
)
def test_a_host_is_shown_with_its_ranks(ranks, text):
    assert str(Host("n", ranks)) == text


def test_the_error_of_a_closed_connection_names_the_host(monkeypatch, store):
    monkeypatch.setattr(hosts, "find_hosts", lambda ranks: [A, B])
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(store.__class__, "clone", lambda self: self, raising=False)
    error = RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.2]:2: Connection reset by peer. GLHF!")
    with pytest.raises(LostRankError) as raised, watched(Ranks(), unexpected):
        raise error
    assert str(raised.value) == (
        "b (rank 2) closed its connection to a (Read error [10.0.0.2]:2: Connection reset by peer): its processes have "
        "ended; read the output on b for the cause. Rerun the same command to resume"
    )
    with pytest.raises(UserError, match=r"^write this$"), watched(Ranks(), unexpected):
        raise UserError("write this")


def test_one_process_is_one_host_without_a_watch(monkeypatch):
    monkeypatch.setattr(hosts, "Thread", pytest.fail)
    with watched(Ranks(), unexpected):
        pass
    assert [host.name for host in hosts.find_hosts(Ranks())] == [socket.gethostname()]


def test_torchrun_prints_the_message_of_an_error_of_the_user_without_its_traceback(monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    torchrun.record_error(LostRankError("host b is down"))
    failure = ProcessFailure(0, 1, 1, str(file))
    text = torchrun.ChildFailedError("soren_align", {0: failure}).format_msg()
    assert "LostRankError: host b is down\n" in text
    assert "py_callstack" not in json.dumps(failure.message)
