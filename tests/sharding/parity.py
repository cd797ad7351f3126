"""`make parity`: how far N ranks are from one process, as a table, and what each of them does and holds.

    python -m tests.sharding.parity [number of ranks ...]        2 and 3 unless said otherwise

Exit status 1 if anything differs by more than the tests allow.
"""

import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from tests.support.parity_configurations import (
    COMMON,
    CONFIGURATIONS,
    CONTROL,
    LARGEST_BYTES,
    TOLERANCE,
    WAYS,
    WITHOUT_CLIP,
    compare,
    reference,
)
from tests.support.rank_pool import RankPool
from tests.support.toy import NUM_STEPS

HEAD = f"""\
Largest difference of any weight from one process after {NUM_STEPS} steps
float32, gloo on CPUs, 2 micro-batches a step, gradients clipped in every step
Python {platform.python_version()}, torch {version("torch")}, deepspeed {version("deepspeed")}
"""
FOOT = f"""\
full rank: no singular value below 1e-4 of the largest; else down to 1e-8
allowed: {TOLERANCE:.0e}; without the clip more than {WITHOUT_CLIP:.0e}
share: numbers of the busiest rank over an even part (DDP: all on every rank)
exchange: most bytes that a rank's buffers held, of 3 buckets of {COMMON.run.bucket_mb} MB or the
largest matrix ({LARGEST_BYTES / 1000:.0f} kB); under DDP the weights themselves are the buffers
"""


def main(numbers_of_ranks):
    """Print the tables; returns the exit status."""
    print(HEAD)
    good = True
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in numbers_of_ranks:
            ranks = RankPool(num_ranks, Path(folder))
            try:
                good &= table(ranks)
            finally:
                ranks.stop()
    print(FOOT)
    print("as the tests demand" if good else "NOT as the tests demand")
    return 0 if good else 1


def table(ranks):
    """One number of ranks; whether all is as it should be."""
    line(f"{ranks.num_ranks} ranks", WAYS)
    good = True
    for configuration in (*CONFIGURATIONS, CONTROL):
        found = {way: compare(ranks, way, configuration) for way in configuration.ways}
        line(configuration.name, [f"{found[way].difference:.1e}" if way in found else "-" for way in WAYS])
        for comparison in found.values():
            if configuration is CONTROL:
                good &= comparison.difference > WITHOUT_CLIP
            else:
                good &= comparison.difference <= TOLERANCE and min(comparison.norms) > 1.2 * configuration.run.clip
                good &= sum(r.num_maps for r in comparison.results) == comparison.num_maps
    common = [compare(ranks, way, COMMON) for way in WAYS]
    num_maps = reference(COMMON.run)[2] // NUM_STEPS
    maps = [[r.num_maps // NUM_STEPS for r in c.results] for c in common]
    line(f"maps a step ({num_maps} matrices)", ["+".join(map(str, numbers)) for numbers in maps])
    line("matrices in pieces", [sum(len(p) > 1 for p in c.pieces) for c in common])
    line("  in unequal pieces", [sum(len(set(p)) > 1 for p in c.pieces) for c in common])
    line("momentum, share", [f"{c.momentum_share:.3f}" for c in common])
    peaks = [max(r.peak_bytes for r in c.results) for c in common]
    bound = 3 * max(COMMON.run.bucket_mb * 2**20, LARGEST_BYTES)
    line(f"exchange, kB (of {bound / 1000:.0f})", [f"{peak / 1000:.0f}" for peak in peaks])
    print(flush=True)
    return good and all(peak <= bound for peak in peaks)


def line(name, cells):
    print(f"{name:<24}" + "".join(f"{cell:>11}" for cell in cells).rstrip(), flush=True)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or [2, 3]))
