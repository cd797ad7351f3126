"""Invented questions of the Open LLM Leaderboard v2's six benchmarks, in the hub's formats, and nltk's file of IFEval.

Each data set is a folder as `hf download --repo-type dataset` leaves it. BBH, MATH and MMLU-Pro are parquet, GPQA and
MuSR csv, IFEval jsonl, as on the hub.
"""

import csv
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lm_eval
import yaml

from tests.support.benchmark_data import _write
from tests.support.benchmark_questions import DOINGS, PEOPLE, REASONS, THINGS, Row, _choices, _clause, _thing

TASKS = Path(lm_eval.__file__).parent / "tasks" / "leaderboard"
MATH = ("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
        "precalculus")  # fmt: skip
ANSWERS = (r"\frac{3}{4}", "12", r"2\sqrt{5}", "x^2+1", "0.5", r"\pi", "-7")
EQUAL = {r"\frac{3}{4}": "0.75", "12": "12", r"2\sqrt{5}": r"\sqrt{20}", "x^2+1": "1+x^2", "0.5": r"\frac{1}{2}",
         r"\pi": r"\pi", "-7": "-7.0"}  # fmt: skip
"""The same answer, written in another way."""
INSTRUCTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "punctuation:no_comma": ({}, "The river is cold"),
    "change_case:english_lowercase": ({}, "the small river flows under the old bridge and into the quiet sea."),
    "length_constraints:number_words": ({"relation": "at least", "num_words": 5}, "One two three four five six."),
    "length_constraints:number_sentences": ({"relation": "at least", "num_sentences": 2}, "It rains. It pours."),
    "keywords:existence": ({"keywords": ["kettle", "river"]}, "The kettle is by the river."),
    "detectable_format:number_bullet_lists": ({"num_bullets": 2}, "* one\n* two"),
    "detectable_format:json_format": ({}, '{"answer": 1}'),
    "startend:quotation": ({}, '"The river is cold."'),
    "detectable_content:postscript": ({"postscript_marker": "P.S."}, "The river.\nP.S. The sea."),
}
"""Of IFEval, by id: the arguments, and a response that follows the instruction."""


def write_v2_datasets(root: Path, num_questions: int = 3, seed: int = 0) -> Path:
    """Write the six below `root`, as <root>/<owner>/<name>, and return `root`. Equal arguments write equal files.

    num_questions: of each subtask, at least 2; every other one has one more, so that means over questions and over
    subtasks differ. GPQA's diamond is a part of main, and main of extended; MuSR's narratives have two questions each.
    """

    def rows(make: Any, name: str, index: int = 0, *arguments: Any) -> list[Row]:
        rng = random.Random(f"{seed}/{name}")
        return [make(rng, *arguments) for _ in range(num_questions + index % 2)]

    bbh = {}
    for index, (name, choices) in enumerate(sorted(_bbh_choices().items())):
        bbh[name] = {"test": rows(_bbh, name, index, choices)}
    _write(root / "SaylorTwift/bbh", bbh)
    math = {}
    for index, subject in enumerate(MATH):
        test = [
            _math(random.Random(f"{seed}/{subject}/easy"), subject, "Level 2"),
            *rows(_math, subject, index, subject),
        ]
        math[subject] = {"train": rows(_math, f"{subject}/train", 0, subject), "test": test}
    _write(root / "DigitalLearningGmbH/MATH-lighteval", math)
    extended = rows(_gpqa, "gpqa", 0) + rows(_gpqa, "gpqa/more", 1)
    gpqa = {"gpqa_diamond": extended[:num_questions], "gpqa_main": extended[:-1], "gpqa_extended": extended}
    _write_csv(root / "Idavidrein/gpqa", {name: {"train": (f"{name}.csv", each)} for name, each in gpqa.items()})
    musr = {"murder_mysteries": 2, "object_placements": 5, "team_allocation": 3}
    files = {
        name: (f"{name}.csv", [row for pair in rows(_musr, name, index, num) for row in pair])
        for index, (name, num) in enumerate(musr.items())
    }
    _write_csv(root / "TAUR-Lab/MuSR", {"default": files})
    pro = {"test": [row for i in range(4) for row in rows(_mmlu_pro, f"mmlu_pro/{i}")], "validation": _five(seed)}
    _write(root / "TIGER-Lab/MMLU-Pro", {"default": pro})
    ifeval = root / "wis-k/instruction-following-eval"
    ifeval.mkdir(parents=True)
    text = "".join(json.dumps(row) + "\n" for row in _ifeval(random.Random(f"{seed}/ifeval"), 3 * num_questions))
    (ifeval / "instruction_following_eval.jsonl").write_text(text, encoding="utf-8")
    _write_front(ifeval, [{"config_name": "default", "data_files": [
        {"split": "train", "path": "instruction_following_eval.jsonl"}]}])  # fmt: skip
    return root


def write_nltk_data(root: Path) -> Path:
    """Write a tokenizers/punkt_tab that knows a few abbreviations, for IFEval's count of sentences; returns `root`."""
    folder = root / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name, text in {"collocations.tab": "", "sent_starters.txt": "the\n", "abbrev_types.txt": "dr\np.s\n",
                       "ortho_context.tab": "river\t32\n"}.items():  # fmt: skip
        (folder / name).write_text(text, encoding="utf-8")
    return root


def followed(doc: Row) -> str:
    """Return a response to a question of IFEval that follows its first instruction."""
    return INSTRUCTIONS[doc["instruction_id_list"][0]][1]


def _bbh_choices() -> dict[str, list[str]]:
    """BBH's subtasks, with the choices that lm-eval's files list."""
    files = [yaml.safe_load(file.read_text()) for file in sorted((TASKS / "bbh_mc").glob("*.yaml"))]
    return {file["dataset_name"]: file["doc_to_choice"] for file in files if "dataset_name" in file}


def _bbh(rng: random.Random, choices: list[str]) -> Row:
    return {"input": f"If {_clause(rng)}, what follows when {rng.choice(REASONS)}?", "target": rng.choice(choices)}


def _math(rng: random.Random, subject: str, level: str = "Level 5") -> Row:
    answer = rng.choice(ANSWERS)
    return {"problem": f"{rng.choice(PEOPLE)} counts {rng.randrange(90)} {rng.choice(THINGS)}s. Find $n$.",
            "level": level, "type": subject.title(),
            "solution": f"We see that {_clause(rng)}, so $n = \\boxed{{{answer}}}$."}  # fmt: skip


def _gpqa(rng: random.Random) -> Row:
    right, *wrong = _choices(rng, 4, lambda rng: f" a {_thing(rng)} [title] {rng.randrange(99)}")
    row = {"Record ID": f"rec{rng.getrandbits(40):010x}", "Question": f"Why {rng.choice(DOINGS)} a {_thing(rng)}?",
           "Correct Answer": right, "Subdomain": "Physics (general)", "Canary String": "Invented"}  # fmt: skip
    return row | {f"Incorrect Answer {number}": each for number, each in enumerate(wrong, 1)}


def _musr(rng: random.Random, num_choices: int) -> tuple[Row, Row]:
    """Two questions about one story."""
    story = ". ".join(_clause(rng) for _ in range(4))
    choices = rng.sample(PEOPLE, num_choices)

    def question() -> Row:
        index = rng.randrange(num_choices)
        return {"narrative": story, "question": f"Who lost the {_thing(rng)}?", "choices": repr(choices),
                "answer_index": index, "answer_choice": choices[index]}  # fmt: skip

    return question(), question()


def _mmlu_pro(rng: random.Random) -> Row:
    """Mostly ten options; now and then fewer."""
    options = _choices(rng, rng.choice((10, 10, 5, 3)))
    index = rng.randrange(len(options))
    return {"question_id": rng.randrange(12_000), "question": f"Often {_clause(rng)}. Why?", "options": options,
            "answer": "ABCDEFGHIJ"[index], "answer_index": index, "cot_content": "",
            "category": rng.choice(("law", "physics", "health")), "src": "invented"}  # fmt: skip


def _five(seed: int) -> list[Row]:
    """The examples of MMLU-Pro, all of which are shown."""
    rng = random.Random(f"{seed}/validation")
    return [_mmlu_pro(rng) for _ in range(5)]


def _ifeval(rng: random.Random, num_questions: int) -> Iterable[Row]:
    """Questions with one to three instructions."""
    for key in range(num_questions):
        names = rng.sample(sorted(INSTRUCTIONS), 1 + key % 3)
        prompt = f"Write about a {_thing(rng)}. Instructions: {', '.join(names)}."
        yield {"key": 1000 + key, "prompt": prompt, "instruction_id_list": names,
               "kwargs": [INSTRUCTIONS[name][0] for name in names]}  # fmt: skip


def _write_csv(folder: Path, configs: dict[str, dict[str, tuple[str, list[Row]]]]) -> None:
    """configs: by name and split, the file and its rows."""
    folder.mkdir(parents=True)
    for splits in configs.values():
        for name, rows in splits.values():
            with (folder / name).open("w", encoding="utf-8", newline="") as stream:
                writer = csv.DictWriter(stream, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
    _write_front(folder, [
        {"config_name": config, "data_files": [{"split": split, "path": name} for split, (name, _) in splits.items()]}
        for config, splits in configs.items()
    ])  # fmt: skip


def _write_front(folder: Path, configs: list[dict[str, Any]]) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\nInvented, for tests.\n")
