"""Starts two runs for one folder, 0 to 8 seconds apart: one must train its own recipe, the other be refused.

    python -m tests.training.races [PAIRS] [SEED]

Torch takes about 8 seconds to load; in that time the folder used to be free. Two pairs at a time; 50 take 10 minutes.
"""

import random
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from soren_align import recipe
from soren_align.run.folder import RunFolder

STEPS = (2, 3)  # by which the two recipes differ


def start(folder: Path, steps: int) -> subprocess.Popen:
    sets = [f"run.output_dir={folder}", f"trainer.max_steps={steps}"]
    command = [sys.executable, "-m", "soren_align", "sft", "quickstart/sft", "--no-eval"]
    command += [part for text in sets for part in ("--set", text)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def race(folder: Path, seconds: float) -> str:
    """What went wrong; empty if nothing did."""
    first = start(folder, STEPS[0])
    time.sleep(seconds)
    second = start(folder, STEPS[1])
    said = [process.communicate()[1] for process in (first, second)]
    codes = [first.returncode, second.returncode]
    if sorted(codes) != [0, 2]:
        return f"exit codes {codes}: {said}"
    winner = codes.index(0)
    refusal = said[1 - winner].strip()
    is_expected = "another process is training or evaluating this run" in refusal or "finished" in refusal
    if len(refusal.splitlines()) > 1 or not is_expected:
        return f"the refusal says: {refusal}"
    run = RunFolder(folder)
    trained = run.record("training")["training"]["steps"]
    written = recipe.load(str(run.recipe)).trainer["max_steps"]
    if trained != STEPS[winner] or written != STEPS[winner]:
        return f"the recipe of {STEPS[winner]} steps won; {written} are written down and {trained} were trained"
    return ""


def main(pairs: int = 50, seed: int = 0) -> int:
    rng = random.Random(seed)
    apart = [0.0, *(rng.uniform(0, 8) for _ in range(pairs - 1))]
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(2) as pool:
        results = pool.map(lambda i: (apart[i], race(Path(root, str(i)), apart[i])), range(pairs))
        wrong = [f"{seconds:.2f} s apart: {problem}" for seconds, problem in results if problem]
    print(*wrong, f"{pairs} pairs, {len(wrong)} wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
