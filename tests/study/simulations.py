"""The tables of simulated studies in research/studies/statistics.md: `python -m tests.study.simulations [STUDIES]`.

Each cell is a kind of study whose optimizers are equal: every "better" or "worse" between them is wrong, and so is an
answer in the wrong direction against the start. 1,000 studies per cell take a quarter of an hour of one core.
`python -m tests.study.simulations unlike [STUDIES]`: optimizers whose seeds spread in unlike shapes, answers of unlike
lengths, and searches whose best values lie between those tried.
"""

import sys
from dataclasses import replace

import numpy as np
from scipy.stats import qmc
from soren_align.evaluate.stats.paired import ColumnPoints
from soren_align.study.config import StudyFile
from soren_align.study.runs import edges, finer_gain, select
from soren_align.study.stats import Answers, verdict
from soren_align.study.study import HELD_OUT, Run
from tests.study.test_verdict import (
    EQUAL,
    LARGE,
    LOSS_ONLY,
    RULES,
    coverage,
    is_false,
    share_better,
    share_with_false_answers,
    studies,
    with_gain,
)
from tests.support.simulated_studies import candidates, draw

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


def unlike_shapes():
    """Yield (name of the cell, world): of all optimizers the same true loss, of their seeds other shapes."""
    quiet = replace(LOSS_ONLY, example_sd=0.002, **FAR)
    for seeds in (3, 5, 8):
        for share, worse in ((0.1, 10), (0.2, 10), (0.1, 3), (0.05, 30)):
            bad = f"bad {share} {worse}"
            # the sound runs of all have the same spread
            wide = float(np.sqrt(1 + share * (1 - share) * worse**2))
            for number, who in ((4, "the reference"), (4, "a candidate"), (2, "the reference")):
                kinds, spreads = ["normal"] * number, [1.0] * number
                i = 0 if who == "the reference" else 1
                kinds[i], spreads[i] = bad, wide
                world = replace(quiet, seeds=seeds, **names(number), seed_kind=tuple(kinds))
                title = f"{seeds} seeds, {number} optimizers, {share:.0%} of {who}'s runs {worse} sd worse"
                yield title, replace(world, spreads=tuple(spreads))
        for kind, spread in (("lognormal", 10), ("lognormal", 1), ("t3", 10)):
            kinds, spreads = (kind, *["normal"] * 3), (spread, 1, 1, 1)
            world = replace(quiet, seeds=seeds, **(names(4) | {"spreads": spreads}), seed_kind=kinds)
            yield f"{seeds} seeds, 4 optimizers, the reference's {kind}, {spread} times wider", world


def collapsing(questions, number, who, rng, seeds=5):
    """A study whose optimizers answer 88% right; of one, a tenth of the runs answers 25%, the others 95%."""
    names_ = tuple(f"o{i}" for i in range(number))
    easiness, answers = rng.random(questions), {}
    start = {"mc": ColumnPoints((rng.random(questions) < 0.25).astype(float), None, "0" * 64)}
    for k, name in enumerate(names_):
        shares = np.where(rng.random(seeds) < 0.1, 0.25, 0.95) if k == who else np.full(seeds, 0.88)
        # half of the luck is the question's: hard ones are hard for all
        each = [(0.5 * (easiness + rng.random(questions)) < np.sqrt(p / 2) if p < 0.5 else
                 0.5 * (easiness + rng.random(questions)) < 1 - np.sqrt((1 - p) / 2)) for p in shares]  # fmt: skip
        answers[name] = [{"mc": ColumnPoints(own.astype(float), None, "0" * 64)} for own in each]
    return candidates(names_, seeds), Answers(answers, {name: [start] * seeds for name in names_})


def searched(curvature, sd, search_seeds, rng, *, skewed=False, number=4, tried=5):
    """A study whose optimizers have equal best losses at learning rates that differ by 0.3 decades (sd), of which the
    search tries `tried` over 1.7 decades: (candidates, answers, those at an edge)."""
    study, found, runs, at_edge = _study(tried), [], {}, set()
    rates = 1.7 * np.sort(qmc.Sobol(1, scramble=True, rng=rng).random(8)[:tried, 0])
    examples = 100
    for candidate in candidates(tuple(f"o{i}" for i in range(number)), 5):
        d = rates - 0.85 - 0.3 * rng.normal()
        losses = curvature * (np.where(d > 0, 2 * d**2 + 3 * d**3, 0.5 * d**2) if skewed else d**2)
        trials = [
            Run(candidate.name, "search", i, s, "", {"optimizer.lr": 10 ** (rates[i] - 3)}, "finished",
                metric=1 + losses[i] + sd * rng.normal())
            for i in range(tried) for s in range(search_seeds)
        ]  # fmt: skip
        selected = select(trials, higher_is_better=False)
        if edges(study, "adamw", trials, selected):
            at_edge.add(candidate.name)
        named = [replace(run, candidate="adamw") for run in trials]
        found.append(replace(candidate, trials=trials, finer=finer_gain(study, named, selected)))
        runs[candidate.name] = [
            {HELD_OUT: ColumnPoints(-(1 + losses[selected] + sd * rng.normal() + 0.02 * rng.normal(size=examples)),
                                    None, "0" * 64)}
            for _ in range(5)
        ]  # fmt: skip
    start = {HELD_OUT: ColumnPoints(-3 + 0.02 * rng.normal(size=examples), None, "0" * 64)}
    return found, Answers(runs, {name: [start] * 5 for name in runs}), at_edge


def _study(trials):
    space = {"optimizer.lr": {"low": 1e-3, "high": 5e-2}}
    return StudyFile.model_validate({
        "recipe": "quickstart/sft", "candidates": {"adamw": {}}, "output_dir": "x",
        "search": {"space": space, "trials": trials, "seeds": [0], "method": "random"},
        "verdict": {"seeds": [1, 2, 3]},
    })  # fmt: skip


def unlike(count):
    """Print the second table."""
    print("| simulated studies of equal optimizers | any wrong answer | before |")
    print("|---|---|---|")

    def row(title, verdicts, earlier=None):
        def share(each):
            return f"{100 * np.mean(each):.1f}%"

        print(f"| {title} | {share(verdicts)} | {'' if earlier is None else share(earlier)} |", flush=True)

    def any_false(world, differences):
        return any(is_false(world, d) for d in differences)

    for i, (title, world) in enumerate(unlike_shapes()):
        row(title, [any_false(world, each) for each in studies(world, count, RULES_OF_ANY, i)])
    for questions, number, who in ((120, 2, 1), (120, 4, 0), (1000, 2, 1), (1000, 4, 0)):
        rng = np.random.default_rng(questions + number)
        wrong = []
        for _ in range(count):
            found = verdict(RULES_OF_ANY, *collapsing(questions, number, who, rng))
            wrong.append(any(d.answer in ("better", "worse") for d in found if d.reference != "base"))
        row(f"5 seeds, {questions:,} questions, {number} optimizers, 10% of one's runs collapse from 95% to 25%", wrong)
    for examples in (12, 30, 100, 400):
        for sigma in (1.0, 1.5):
            world = replace(LOSS_ONLY, seeds=5, examples=examples, example_sd=0.2, length_sigma=sigma, **FAR)
            rng, wrong, earlier = np.random.default_rng(examples), [], []
            for _ in range(count):
                found, answers = draw(world, rng)
                wrong.append(any_false(world, verdict(RULES, found, answers)))
                for runs in (*answers.runs.values(), *answers.starts.values()):
                    for points in runs:
                        points[HELD_OUT] = replace(points[HELD_OUT], weights=None)
                earlier.append(any_false(world, verdict(RULES, found, answers)))
            row(f"5 seeds, {examples} examples of lognormal({sigma:g}) lengths", wrong, earlier)
    for skewed in (False, True):
        for curvature, sd, seeds in ((0.3, 0.003, 1), (1, 0.03, 3), (2, 0.01, 1), (2, 0.03, 3), (0.5, 0.04, 3)):
            rng, wrong, earlier, edge = np.random.default_rng(int(100 * curvature)), [], [], []
            for _ in range(count):
                found, answers, at_edge = searched(curvature, sd, seeds, rng, skewed=skewed)
                for known, into in ((found, wrong), ([replace(c, finer=0.0) for c in found], earlier)):
                    said = [d for d in verdict(RULES_OF_ANY, known, answers) if d.answer in ("better", "worse")]
                    said = [d for d in said if d.reference != "base"]
                    losers = {d.candidate if d.answer == "worse" else d.reference for d in said}
                    into.append(bool(losers - at_edge))
                    if into is wrong:
                        edge.append(bool(losers & at_edge))
            shape = "skewed" if skewed else "parabolas"
            title = f"5 rates of {shape}, {curvature:g} per decade^2, sd {sd:g}, {seeds} search seeds"
            row(f"{title} (and {100 * np.mean(edge):.0f}% with the loser at an edge, which is said)", wrong, earlier)


RULES_OF_ANY = RULES.model_copy(update={"reference": "o0"})

if __name__ == "__main__" and sys.argv[1:2] == ["unlike"]:
    unlike(int(sys.argv[2]) if len(sys.argv) > 2 else 1000)
elif __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
