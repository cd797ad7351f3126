"""The tables of simulated studies in research/studies/statistics.md: `python -m tests.study.simulations [STUDIES]`.

Each cell is a kind of study whose optimizers are equal: every "better" or "worse" between them is wrong, and so is an
answer in the wrong direction against the start. 1,000 studies per cell take a quarter of an hour of one core.
"""

import sys
from dataclasses import replace

import numpy as np
from soren_align.study.study import HELD_OUT
from tests.study.test_verdict import (
    EQUAL,
    LARGE,
    LOSS_ONLY,
    RULES,
    coverage,
    share_better,
    share_with_false_answers,
    studies,
    with_gain,
)

FAR = {"start": -0.8, "skill": 0.8, "start_loss": 3.0}
"""All candidates are much better than the start, as after a training that works."""


def names(number):
    return {"names": tuple(f"o{i}" for i in range(number)), "spreads": (1.0,) * number}


def cells():
    """Yield (regime, name of the cell, world, rules)."""
    for seeds in (3, 5):
        base, columns = replace(LOSS_ONLY, seeds=seeds), replace(EQUAL, seeds=seeds)
        for start, changes in (("no learning", {}), ("far from the start", FAR)):
            yield "equal spreads, normal", f"{seeds} seeds, {start}", replace(columns, **changes), RULES
        for examples, sd in ((100, 0.2), (240, 0.1), (240, 0.3), (1000, 0.05), (1000, 0.2)):
            world = replace(base, examples=examples, example_sd=sd, **FAR)
            yield "held-out examples", f"{seeds} seeds, {examples} examples, {sd} over examples", world, RULES
        for kind in ("t3", "lognormal", "bad"):
            world = replace(base, seed_kind=kind, **FAR)
            yield "other distributions, far from the start", f"{seeds} seeds, {kind}", world, RULES
            quiet = replace(world, example_sd=0.002)
            yield "other distributions, far from the start", f"{seeds} seeds, {kind}, seeds alone", quiet, RULES
        for shared in (0.5, 0.9):
            yield "correlated seeds", f"{seeds} seeds, {shared:.0%} shared", replace(base, seeds_shared=shared), RULES
            quiet = replace(base, seeds_shared=shared, example_sd=0.002)
            yield "correlated seeds", f"{seeds} seeds, {shared:.0%} shared, seeds alone", quiet, RULES
        for spreads in ((1, 1, 1, 3), (3, 1, 1, 1), (1, 1, 1, 10), (10, 1, 1, 1), (1, 1, 1, 30), (30, 1, 1, 1)):
            world = replace(base, spreads=spreads, example_sd=0.002)
            yield "unequal spreads", f"{seeds} seeds, {spreads}, seeds alone", world, RULES
        yield "unequal spreads", f"{seeds} seeds, (1, 3, 10, 30)", replace(base, spreads=(1, 3, 10, 30)), RULES
        yield "unequal spreads", f"{seeds} seeds, (3, 1, 1, 1), columns", replace(columns, spreads=(3, 1, 1, 1)), RULES
        for number in (2, 8):
            world = replace(base, example_sd=0.002, **names(number))
            for reference, title in (("o0", ""), ("all", ", all pairs")):
                rules = RULES.model_copy(update={"reference": reference})
                yield "2 and 8 candidates", f"{seeds} seeds, {number}{title}", world, rules
        # A mean that few runs decide, against the start itself: no method can tell it from so few seeds.
        for kind in ("lognormal", "bad"):
            world = replace(base, seed_kind=kind, example_sd=0.002)
            yield "skewed seeds, no learning (outside of the claim)", f"{seeds} seeds, {kind}", world, RULES


def main(count, count_of_worst, num_worst=10):
    results = []
    for i, (regime, cell, world, rules) in enumerate(cells()):
        results.append([regime, cell, world, rules, *share(world, rules, count, seed=i)])
    inside = [each for each in results if "outside" not in each[0]]
    for each in sorted(inside, key=lambda each: -each[4])[:num_worst] if count_of_worst > count else ():
        each[4:] = share(each[2], each[3], count_of_worst, seed=10_000)
    print("| simulated studies | studies | any wrong answer | coverage, held-out |\n|---|---|---|---|")
    for regime in dict.fromkeys(each[0] for each in results):
        own = [each for each in results if each[0] == regime]
        total = sum(each[5] for each in own)
        pooled = sum(each[4] * each[5] for each in own) / total
        print(f"| **{regime}** | {total:,} | **{100 * pooled:.1f}%** | |")
        for _, cell, _, _, wrong, number, covered in own:
            print(f"| {cell} | {number:,} | {100 * wrong:.1f}% | {100 * covered:.1f}% |")
            limit = 0.05 + 4 * np.sqrt(0.05 * 0.95 / number)
            if "outside" not in regime and wrong > limit:
                print(f"MISSED: {cell}: {wrong:.3f} > {limit:.3f}", file=sys.stderr)
    print("\n| five seeds: difference | minimum detectable effect | found at 1 | at 1.5 |\n|---|---|---|---|")
    for title, world, column, number in (
        ("held-out loss", replace(LOSS_ONLY, seeds=5), HELD_OUT, count),
        ("held-out loss, 28 tests", replace(EQUAL, seeds=5), HELD_OUT, count // 4),
        ("zoo_mc, 120 questions", replace(EQUAL, seeds=5), "zoo_mc", count // 4),
        ("MMLU, 57 subjects", replace(LARGE, seeds=5), "mmlu", count // 25),
    ):
        for to_base in (True, False):
            shares = []
            for factor in (1.0, 1.5):
                found = studies(with_gain(world, column, to_base, factor), number, seed=1)
                shares.append(f"{share_better(found, column, 'base' if to_base else 'adamw'):.0%}")
            effect = with_gain(world, column, to_base, 1.0).gains["soren", column]
            effect = f"{effect:.1f} standard deviations" if column == HELD_OUT else f"{100 * effect:.1f} points"
            reference = "the start" if to_base else "AdamW"
            print(f"| {title}, to {reference} | {effect} | {' | '.join(shares)} |", flush=True)


def share(world, rules, count, seed):
    """(share with a wrong answer, number of studies, coverage of the held-out loss)"""
    found = studies(world, count, rules, seed)
    return share_with_false_answers(world, found), count, coverage(world, found, [HELD_OUT])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
