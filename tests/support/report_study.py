"""An invented study, of which the report is made: no training, the same numbers each time."""

import math
import random
from dataclasses import replace

from soren_align.study.study import Candidate, Difference, Point, Run, Study

BEST_LR = {"adamw": 0.012, "muon": 0.006, "htmuon": 0.008, "soren": 0.005}
FLOOR = {"adamw": 1.31, "muon": 1.285, "htmuon": 1.29, "soren": 1.262}
COLUMNS = ("zoo_mc", "zoo_gen", "average")


def curve(name, lr, rng, steps=150, evaluations=15):
    """The evaluations of a run: a loss that falls to the optimizer's floor, and what the model forgets meanwhile."""
    floor = FLOOR.get(name, 1.3) + 0.09 * math.log(lr / BEST_LR.get(name, 0.006)) ** 2
    points = []
    for i in range(evaluations + 1):
        done = i / evaluations
        moved = 0.9 * lr**0.5 * done**0.7 * {"adamw": 1.4}.get(name, 1.0)
        points.append(
            Point(step=round(done * steps), tokens=round(done * steps) * 2048,
                  seconds=done * 21 * (1.0 if name == "adamw" else 1.15),
                  metric=floor + (2.9 - floor) * math.exp(-5 * done) + (rng.gauss(0, 0.004) if i else 0),
                  train_loss=floor + (2.9 - floor) * math.exp(-5.2 * done) + rng.gauss(0, 0.02), relative_change=moved,
                  kl_to_start=9 * moved**1.6, retention_loss=2.1 + 3 * moved**2 + (rng.gauss(0, 0.003) if i else 0))
        )  # fmt: skip
    return points


def make_candidate(name, num_trials, seeds, rng):
    trials = []
    for i in range(num_trials):
        lr = math.exp(rng.uniform(math.log(1e-3), math.log(3e-2)))
        parameters = {"optimizer.lr": lr, "optimizer.aux_lr": lr}
        run = Run(name, "search", i, 0, f"search/{name}/{i:02}", parameters, "finished")
        if lr > 0.024:
            trials.append(replace(run, status="diverged", reason=f"the loss was not a number at step {40 + i}"))
            continue
        points = curve(name, lr, rng)
        trials.append(replace(run, metric=points[-1].metric, curve=points, seconds=21.3, peak_memory_bytes=730 << 20))
    finished = [run for run in trials if run.metric is not None]
    selected = min(finished, key=lambda run: run.metric) if finished else None
    verdict = []
    for i, seed in enumerate(seeds if selected else ()):
        points = curve(name, selected.parameters["optimizer.lr"], rng)
        mc, gen = 61 + 40 * (2.9 - points[-1].metric) / 2 + rng.gauss(0, 0.8), 12 + rng.gauss(0, 1)
        verdict.append(
            Run(candidate=name, stage="verdict", number=i, seed=seed, folder=f"verdict/{name}/{seed}",
                parameters=selected.parameters, status="finished", metric=points[-1].metric, curve=points,
                seconds=23.0 + i, peak_memory_bytes=731 << 20,
                scores={"zoo_mc": mc, "zoo_gen": gen, "average": (mc + gen) / 2},
                identity={"starting_weights": "9f" * 32, "batches": f"{seed:064x}",
                          "precision": {"weights": ["float32"], "autocast": "no", "adapter": None}, "processes": 1,
                          "recipe": name})
        )  # fmt: skip
    edge = {"optimizer.lr": "low"} if name == "htmuon" else {}
    space = {"optimizer.lr": {"low": 1e-3, "high": 3e-2}, "optimizer.aux_lr": "=optimizer.lr"}
    number = selected.number if selected else None
    return Candidate(name, {"optimizer.name": name}, space, trials, number, edge, verdict)


def difference(candidate, reference, measure, value, half, **changes):
    answer = "better" if value - half > 0 else "worse" if value + half < 0 else "not distinguishable"
    unit = "loss" if measure == "held-out" else "percent"
    p = math.erfc(abs(value) / half * 1.96 / math.sqrt(2))
    numbers = {"value": value, "low": value - half, "high": value + half, "p": p, "p_holm": min(1.0, 2 * p)}
    return Difference(candidate, reference, measure, unit, **numbers, answer=answer, detectable=half * 1.5, **changes)


def make_study(names=("adamw", "muon", "htmuon", "soren"), num_trials=6, seeds=(101, 102, 103), **changes):
    """A finished study; `changes`: fields of Study."""
    rng = random.Random(0)
    candidates = [make_candidate(name, num_trials, seeds, rng) for name in names]
    differences = []
    for candidate in candidates:
        for reference in ("base", names[0]):
            if reference == candidate.name:
                continue
            for measure in ("held-out", *COLUMNS):
                gain = FLOOR.get(names[0], 1.3) - FLOOR.get(candidate.name, 1.3) if reference != "base" else 1.6
                scale = 1 if measure == "held-out" else 12
                margin = {"margin": 2.0, "retained": gain > 0} if (measure, reference) == ("zoo_mc", "base") else {}
                differences.append(difference(candidate.name, reference, measure, gain * scale,
                                              0.03 * scale * rng.uniform(0.8, 1.2), **margin))  # fmt: skip
    search = {"space": candidates[0].space, "method": "random", "trials": num_trials, "seeds": [0]}
    verdict = {
        "seeds": list(seeds), "reference": names[0], "retention": {"columns": ["zoo_mc"], "margin": 2.0}, "power": 0.8,
    }  # fmt: skip
    fields = {
        "name": "quickstart/compare",
        "file": {"recipe": "quickstart/sft", "set": {"trainer.max_steps": 150},
                 "candidates": {each.name: {"set": each.settings} for each in candidates},
                 "search": search | {"metric": "eval_loss"}, "verdict": verdict,
                 "output_dir": "runs/quickstart/compare"},
        "higher_is_better": False,
        "candidates": candidates,
        "base_scores": {"zoo_mc": 71.5, "zoo_gen": 3.0, "average": 37.25},
        "differences": differences,
        "cautions": ["htmuon: the selected optimizer.lr 0.00112 lies at the low end of its space: run with --yes"],
        "command": "soren-align compare quickstart/compare --jobs 2",
        "versions": {"soren-align": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0", "trl": "1.16.0"},
        "machine": "2 CPU cores",
    }  # fmt: skip
    return Study(**fields | changes)
