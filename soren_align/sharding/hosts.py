"""Watch the other hosts of a run: name the one that was lost, and end this rank.

TCP does not report a host without power, or a cut cable: a collective would wait for
`trainer.ddp_timeout`, half an hour. Here every rank writes a sign of life of its host into the
store of the process group, and reads those of the others. Runs of one host need none of this: the
launcher there notices the end of every rank.
"""

import fcntl
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Thread
from typing import Any

import torch.distributed as dist

from ..core.errors import LostRankError, known_failure
from .ranks import Ranks

BEAT_SECONDS = 5.0
"""Between two signs of life of a rank's host."""
SILENCE_SECONDS = 40.0
"""Without a sign of life, after which a host counts as lost: with the end of the ranks less than a
minute."""
TICK_SECONDS = 1.0
"""Between two looks at the silence of the others. One look adds at most two ticks: of a rank that
was suspended itself, the others' silence is unknown."""
_SIOCGIFADDR = 0x8915
"""Linux's request for the IPv4 address of a network interface (netdevice(7))."""


@dataclass(frozen=True)
class Host:
    """A machine, or a container on it, with some of the ranks."""

    name: str
    ranks: tuple[int, ...]
    addresses: frozenset[str] = frozenset()

    def __str__(self) -> str:
        first, last = self.ranks[0], self.ranks[-1]
        if first == last:
            return f"{self.name} (rank {first})"
        if len(self.ranks) == last - first + 1:
            return f"{self.name} (ranks {first} to {last})"
        return f"{self.name} (ranks {', '.join(map(str, self.ranks))})"


@contextmanager
def watched(ranks: Ranks, end: Callable[[LostRankError], Any]) -> Iterator[None]:
    """Within the block, name the host in the error of a closed connection, and call `end` if a host
    is silent.

    Collective. end: called in another thread, since this one waits in C++; it ends the process. The
    watch ends with the process group.
    """
    hosts = find_hosts(ranks)
    own = next(host for host in hosts if ranks.rank in host.ranks)
    if len(hosts) > 1:
        store: Any = dist.distributed_c10d._get_default_store()  # clone() is not in torch's types
        watch = Watch(hosts, own, store.clone())
        ranks.barrier()  # every host has its first sign of life in the store
        Thread(target=watch.exchange_beats, daemon=True).start()
        Thread(target=watch.wait_for_silence, args=(end,), daemon=True).start()
    try:
        yield
    except Exception as error:
        failure = known_failure(error)
        if isinstance(failure, LostRankError) and (host := mentioned(str(failure), hosts, own)):
            reason = match[1] if (match := re.search(r"\((.+)\)", str(failure))) else failure
            raise LostRankError(
                f"{host} closed its connection to {own.name} ({reason}): its processes have ended; read the output on "
                f"{host.name} for the cause. Rerun the same command to resume"
            ) from error
        raise


def find_hosts(ranks: Ranks) -> list[Host]:
    """Return the hosts of all ranks, in the order of their first ranks. Collective."""
    # torchrun or Slurm numbers hosts that have the same name, as containers may.
    number = os.environ.get("GROUP_RANK") or os.environ.get("SLURM_NODEID") or ""
    hosts: dict[tuple[str, str], tuple[list[int], frozenset[str]]] = {}
    own = set()  # this host's IPv4 addresses
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with suppress(OSError):  # an interface without an address
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
                own.add(socket.inet_ntoa(answer[20:24]))
    here = (socket.gethostname(), number, frozenset(own - {"127.0.0.1"}))
    for rank, (name, group, addresses) in enumerate(ranks.gather(here)):
        hosts.setdefault((name, group), ([], addresses))[0].append(rank)
    return [
        Host(name, tuple(members), addresses) for (name, _), (members, addresses) in hosts.items()
    ]


def mentioned(text: str, hosts: Sequence[Host], own: Host) -> Host | None:
    """Return the host, not this rank's own, with a name or an address in the text that no other
    host has.
    """
    matches = [
        host
        for host in hosts
        if any(
            re.search(rf"(?<![\w.:]){re.escape(word)}(?![\w.])", text)
            for word in {host.name, *host.addresses}
        )
    ]
    return matches[0] if len(matches) == 1 and matches[0] is not own else None


class Watch:
    """The signs of life of all hosts, by a store and a connection to it that nothing else uses."""

    def __init__(self, hosts: Sequence[Host], own: Host, store: dist.Store):
        self.own, self.store = own, store
        address = os.environ.get("MASTER_ADDR", "")
        self.others = [host for host in hosts if host is not own]
        self._keys = {host: f"soren_align/hosts/{host.ranks[0]}" for host in hosts}
        with suppress(OSError):
            address += f" {socket.gethostbyname(address)}"
        # Without the store nothing is known of the others: it comes first.
        self._store = str(
            mentioned(address, hosts, own)
            or f"the store at MASTER_ADDR={os.environ.get('MASTER_ADDR')}"
        )
        self._silence: dict[Host | str, float] = dict.fromkeys([self._store, *self.others], 0.0)
        """Seconds since the last sign of life of a host, and since the store's last answer."""
        store.set(self._keys[own], "0")

    def exchange_beats(self) -> None:
        """Until the process group ends, write this host's signs of life and read those of the
        others.
        """
        before = [b""] * len(self.others)
        for number in count(1):
            if not dist.is_initialized():
                return
            with suppress(RuntimeError):  # the store has ended with its process: it answers no more
                self.store.set(self._keys[self.own], f"{os.getpid()} {number}")
                beats = self.store.multi_get([self._keys[host] for host in self.others])
                self._silence[self._store] = 0.0
                for host, old, beat in zip(self.others, before, beats, strict=True):
                    if beat != old:
                        self._silence[host] = 0.0
                before = beats
            time.sleep(BEAT_SECONDS)

    def wait_for_silence(self, end: Callable[[LostRankError], Any]) -> None:
        """Until the process group ends, look for a host that is silent, and call `end` with its
        error.
        """
        while dist.is_initialized():
            last = time.monotonic()
            time.sleep(TICK_SECONDS)
            seconds = min(time.monotonic() - last, 2 * TICK_SECONDS)
            for host in self._silence:
                self._silence[host] += seconds
            if lost := [
                name for name, silence in self._silence.items() if silence > SILENCE_SECONDS
            ]:
                end(
                    LostRankError(
                        f"{lost[0]} did not answer for {SILENCE_SECONDS:g} s: that host is down or suspended, or the "
                        f"network between it and {self.own.name} is cut. Rerun the same command to resume"
                    )
                )
                return
