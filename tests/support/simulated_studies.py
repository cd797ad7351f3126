"""Studies without models: answers drawn from a plain model with effects of questions, optimizers and seeds.

The answer of candidate k with seed s to question q is right if

    skill[k] + seed[k, s] + easiness[q] + taste[k, q] + luck[k, s, q] > 0

with normal effects. A part of the last three is shared by the questions of a cluster. The starting checkpoint is a
candidate with one run and without an effect of the seed. Graded points, as of TruthfulQA's mc2, are a smooth function
of the same sum. The loss of held-out example i is

    1 - gain[k] + seed[k, s] + taste[k, i] + luck[k, s, i]
"""

from dataclasses import dataclass, field, replace

import numpy as np
from scipy.special import ndtr, ndtri
from soren_align.evaluate.stats.paired import ColumnPoints
from soren_align.study.estimates import Assumed
from soren_align.study.stats import Answers
from soren_align.study.study import HELD_OUT, Candidate, Run

QUICKSTART = {"zoo_mc": np.ones(120, int), "zoo_gen": np.ones(120, int), "preference": np.ones(120, int)}
# fmt: off
MMLU = np.array([
    100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203, 100,
    165, 198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234, 100, 783,
    346, 895, 306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171,
])
# fmt: on
LEADERBOARD = {
    "arc_challenge": np.ones(1172, int),
    "hellaswag": np.random.default_rng(1).multinomial(10042 - 3000, np.full(3000, 1 / 3000)) + 1,
    "mmlu": MMLU,
    "truthfulqa": np.ones(817, int),
    "winogrande": np.ones(1267, int),
    "gsm8k": np.ones(1319, int),
}
"""The sizes of the clusters of each column; 1: independent questions."""
GRADED, STEEPNESS = {"truthfulqa"}, 2.0


@dataclass(frozen=True)
class World:
    """How the answers of a study come about."""

    columns: dict[str, np.ndarray] = field(default_factory=lambda: QUICKSTART)
    names: tuple[str, ...] = ("adamw", "muon", "htmuon", "soren")
    seeds: int = 3
    skill: float = 0.0
    start: float = 0.0
    """The skill of the starting checkpoint. Equal to `skill`: the training changes no score."""
    seed_sd: float = 0.1
    """Of the effect of the seed, on the scale of skills."""
    seeds_shared: float = 0.0
    """The share of its variance that all candidates have in common."""
    taste: float = 0.3
    luck: float = 0.5
    cluster_correlation: float = 0.0
    gains: dict[tuple[str, str], float] = field(default_factory=dict)
    """True differences by (candidate, column), as fractions; of the held-out loss in standard deviations."""
    spreads: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    """The candidates' standard deviations over seeds, relative to `seed_sd`. All have the same true scores."""
    loss_sd: float = 0.01
    """Of the loss over seeds."""
    examples: int = 240
    """Held out."""
    example_sd: float = 0.1
    """Over examples, of the difference of two candidates' losses."""
    start_loss: float = 1.0
    """Of the starting checkpoint. 1: the training changes no loss."""
    seed_kind: str | tuple[str, ...] = "normal"
    """The distribution of the effects of seeds: normal, t3, lognormal, bad (one run in ten is 10 standard deviations of
    the others worse); all with mean 0 and standard deviation 1. A tuple: of each candidate."""
    length_sigma: float = 0.0
    """Of the logarithm of the examples' lengths, by which their losses are weighted."""

    def true_score(self, column, skill=None, spread=None):
        """The expected points of a run with this skill."""
        skill, spread = self.skill if skill is None else skill, self.seed_sd if spread is None else spread
        return float(ndtr(skill / _width(column, spread)))

    def skill_of(self, k, column):
        """The skill at which a candidate's true score is that of `skill` and no effect of the seed, plus its gain."""
        score = self.true_score(column, spread=0.0) + self.gains.get((self.names[k], column), 0.0)
        return ndtri(score) * _width(column, self.spreads[k] * self.seed_sd)

    def true_difference(self, candidate, reference, measure):
        """In the unit of the verdict's differences."""
        gains = [self.gains.get((name, measure), 0.0) for name in (candidate, reference)]
        if measure == "held-out":
            return self.loss_sd * (gains[0] - gains[1]) + (self.start_loss - 1.0 if reference == "base" else 0.0)
        learned = self.true_score(measure, spread=0.0) - self.true_score(measure, self.start, 0.0)
        return 100 * (gains[0] + (learned if reference == "base" else -gains[1]))


def _width(column, spread):
    """The standard deviation of the sum, and of the slope of graded points."""
    return np.sqrt(1 + spread**2 + (1 / STEEPNESS**2 if column in GRADED else 0.0))


def draw(world, rng):
    """One study: its candidates and their answers."""
    answers, base = {name: [{} for _ in range(world.seeds)] for name in world.names}, {}
    easy_sd = np.sqrt(1 - world.taste**2 - world.luck**2)
    for column, sizes in world.columns.items():
        clusters = None if sizes.max() == 1 else np.repeat(np.arange(len(sizes)), sizes)

        def effect(sd, sizes=sizes, clustered=clusters is not None):
            each = rng.standard_normal(sizes.sum(), dtype=np.float32)
            if clustered and world.cluster_correlation:
                shared = np.repeat(rng.standard_normal(len(sizes), dtype=np.float32), sizes)
                each = np.sqrt(1 - world.cluster_correlation) * each + np.sqrt(world.cluster_correlation) * shared
            return np.float32(sd) * each

        def answered(latent, clusters=clusters, column=column):
            each = ndtr(STEEPNESS * latent) if column in GRADED else latent > 0
            return ColumnPoints(each.astype(float), clusters, "0" * 64)

        easiness = effect(easy_sd)
        base[column] = answered(world.start + easiness + effect(world.taste) + effect(world.luck))
        seeds = world.seed_sd * seed_effects(world, rng)
        for k, name in enumerate(world.names):
            known = world.skill_of(k, column) + easiness + effect(world.taste)
            for s in range(world.seeds):
                answers[name][s][column] = answered(known + seeds[k, s] + effect(world.luck))

    def losses(mean, taste):
        luck = rng.normal(size=world.examples) * world.example_sd / 4
        if weights is None:
            return ColumnPoints(-(mean + taste + luck), None, "0" * 64)
        # as `read_held_out` scales them
        each, middle = -(mean + taste + luck), -(mean + np.average(taste + luck, weights=weights))
        return ColumnPoints(middle + (each - middle) * weights / weights.mean(), None, "0" * 64, weights)

    def taste():
        return rng.normal(size=world.examples) * world.example_sd / np.sqrt(2)

    weights = rng.lognormal(sigma=world.length_sigma, size=world.examples) if world.length_sigma else None
    base[HELD_OUT] = losses(world.start_loss, taste())
    seeds = world.loss_sd * seed_effects(world, rng)
    for k, name in enumerate(world.names):
        mean, own = 1.0 - world.loss_sd * world.gains.get((name, HELD_OUT), 0.0), taste()
        for s in range(world.seeds):
            answers[name][s][HELD_OUT] = losses(mean + seeds[k, s], own)
    starts = {name: [base] * world.seeds for name in world.names}
    return candidates(world.names, world.seeds), Answers(answers, starts)


def seed_effects(world, rng):
    """[candidates, seeds]: of mean 0; the standard deviations are those of `spreads`."""

    def effects(kind, *size):
        if kind == "t3":
            return rng.standard_t(3, size) / np.sqrt(3)
        if kind == "lognormal":
            return (rng.lognormal(size=size) - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)
        if kind.startswith("bad"):  # "bad 0.2 10": their share, and by how many standard deviations of the others
            share, worse = map(float, kind.split()[1:] or (0.1, 10))
            x = rng.normal(size=size) + worse * (rng.random(size) < share) - share * worse
            return x / np.sqrt(1 + share * (1 - share) * worse**2)
        return rng.normal(size=size)

    kinds = world.seed_kind
    if isinstance(kinds, tuple):
        own = np.array([effects(kind, world.seeds) for kind in kinds[: len(world.names)]])
        return np.array(world.spreads)[: len(own), None] * own
    own = np.sqrt(1 - world.seeds_shared) * effects(kinds, len(world.names), world.seeds)
    shared = np.sqrt(world.seeds_shared) * effects(kinds, world.seeds)
    return np.array(world.spreads)[: len(world.names), None] * (shared + own)


def candidates(names, seeds):
    """Candidates whose final runs are all finished."""
    return [
        Candidate(name, {}, {}, [], 0, {}, [Run(name, "verdict", s, 101 + s, "", {}, "finished") for s in range(seeds)])
        for name in names
    ]


def measured(world, column, rng, num_studies=20):
    """The assumptions of a plan as they are in this world, from many studies without gains."""
    world = replace(world, gains={}, columns={column: world.columns[column]})
    shares, scores, correlations = [], [], []
    for _ in range(num_studies):
        _, answers = draw(world, rng)
        runs = np.array([[points[column].each for points in answers.runs[name]] for name in world.names])
        base = answers.starts[world.names[0]][0]
        differ = lambda a, b: np.abs(a - b).mean()  # noqa: E731
        shares.append([differ(runs, base[column].each), differ(runs[1:], runs[:1]), differ(runs[:, 1:], runs[:, :1])])
        scores.append(runs.mean(axis=2).var(axis=1, ddof=1).mean())
        correlations.append(correlation(runs[1, 0] - runs[0, 0], world.columns[column]))
    by_training, by_optimizer, by_seed = np.mean(shares, axis=0)
    return Assumed(
        changed_by_training=by_training,
        changed_by_optimizer=by_optimizer,
        changed_by_seed=by_seed,
        seed_sd=100 * np.sqrt(np.mean(scores)),
        loss_sd=world.loss_sd,
        example_sd=world.example_sd,
        cluster_correlation=max(float(np.mean(correlations)), 0.0),
    )


def correlation(each, sizes):
    """Of two questions of one cluster, for differences of mean 0."""
    if sizes.max() == 1:
        return 0.0
    sums = np.add.reduceat(each, np.cumsum(sizes) - sizes)
    return ((sums**2).sum() - (each**2).sum()) / (sizes * (sizes - 1)).sum() / (each**2).mean()
