"""TRL's own tests of its SFT and DPO trainers, once with TRL's trainers and once with ours.

    python -m benchmarks.trl_tests TRL_CHECKOUT [--optimizer adamw] [--folder DIR] [-k EXPR] [-n 2]

Prints what fails and a table; exit status 1 if a test passes with TRL's trainers and fails with
ours, for no reason in KNOWN. The checkout gives tests and generators of models and data, the
installed TRL the trainers: what it lacks is not tested. A folder stands in for the hub (--folder
keeps it), with tokenizers trained here; models that have no generator for_causal_lm, such as those
of images, are not tested. Options of pytest go to pytest. Measured: notes/log.md.
"""

import argparse
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

# Reasons of known differences, by optimizer. Soren needs a matrix within the blocks: it refuses
# prompt tuning and LoRA of experts alone, which AdamW trains.
KNOWN = {"soren": "has no weight matrix for a spectral optimizer"}
COMMIT = "0" * 40
NAME = re.compile(r"(?:trl-internal-testing|Qwen)/[\w.-]*\w")  # of a model or a dataset
# TRL's chat templates of published tokenizers: the longest beginning of a name counts.
TEMPLATES = {
    "CohereLabs": "cohere2", "LiquidAI/LFM2": "lfm2", "LiquidAI/LFM2.5": "lfm2_2_5",
    "Qwen/Qwen2.5": "qwen2_5", "Qwen/Qwen3": "qwen3", "meta-llama": "llama3",
    "nvidia": "nemotron_3_nano", "openai/gpt-oss": "gptoss", "zai-org": "glm4moe",
}  # fmt: skip


def cached(name: str) -> Path:
    """Where huggingface_hub looks for the files of a model; here, those of datasets too."""
    return Path(os.environ["HF_HUB_CACHE"], f"models--{name.replace('/', '--')}/snapshots/{COMMIT}")


def make_stand_ins(scripts: Path) -> None:
    """Run the checkout's generators, with a folder in the place of the hub."""
    import tokenizers
    import transformers
    import trl
    from datasets import DatasetDict

    texts = [path.read_text() for path in scripts.glob("generate_*.py")]

    def published(name: str, **options) -> SimpleNamespace:
        start = max(filter(name.startswith, TEMPLATES), key=len, default="")
        template = Path(trl.__file__).parent / f"chat_templates/{TEMPLATES.get(start)}.jinja"
        template = template.read_text() if start else ""
        special = ["<|endoftext|>", *sorted(set(re.findall(r"<\|[^|<>]+\|>", template)))]
        bpe = tokenizers.ByteLevelBPETokenizer()
        bpe.train_from_iterator(texts, 2000, special_tokens=special, show_progress=False)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer)
        tokenizer.pad_token, tokenizer.chat_template = special[0], template or None
        tokenizer.eos_token = "<|im_end|>" if "<|im_end|>" in template else special[0]
        for part in (tokenizer, transformers.GPT2Config()):  # not loaded without some config
            part.save_pretrained(cached(name))
        # Generators name padding tokens of the published vocabularies.
        return SimpleNamespace(vocab=range(200_000), tokenizer=tokenizer)

    def save_model(model, of: SimpleNamespace, _, prefix: str, *suffix: str) -> None:
        model.resize_token_embeddings(len(of.tokenizer))  # logits of 200,000 tokens take minutes
        model.config.pad_token_id = of.tokenizer.pad_token_id
        model.config.eos_token_id = of.tokenizer.eos_token_id
        name = "-".join([f"trl-internal-testing/{prefix}", type(model).__name__, *suffix])
        for part in (model, of.tokenizer):
            part.save_pretrained(cached(name))

    def save_dataset(splits: DatasetDict, name: str, config_name: str) -> None:
        for split, examples in splits.items():
            examples.to_parquet(cached(name) / config_name / f"{split}.parquet")

    sys.path.insert(0, str(scripts))
    DatasetDict.push_to_hub = save_dataset
    for name in ("zen", "toolcall", "harmony"):
        generator = importlib.import_module(f"generate_{name}_dataset")
        generator.main(0.1, True, f"trl-internal-testing/{name}")
    transformers.AutoTokenizer.from_pretrained = published
    transformers.GenerationConfig.from_pretrained = lambda *_, **options: None
    common = importlib.import_module("generate_tiny_models._common")
    common.push_to_hub = save_model
    for check in ("check_transformers_version", "check_dtype_pattern", "print_config_diff"):
        setattr(common, check, lambda *_: None)  # compares with the published model
    for path in sorted(Path(common.__file__).parent.glob("for_causal_lm/[!_p]*.py")):  # no PEFT
        runpy.run_module(f"generate_tiny_models.for_causal_lm.{path.stem}")
    for model in Path(os.environ["HF_HUB_CACHE"]).iterdir():
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)


def pytest_configure() -> None:
    """As a plugin: what the tests import is local, ours, or no more in TRL."""
    import datasets
    import trl
    from trl import import_utils
    from trl.trainer import dpo_trainer, sft_trainer

    def load(name: str, config: str, load=datasets.load_dataset, **options):
        return load(str(cached(name) / config), **options)

    def absent(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        # The tests' own modules call is_..._available.
        return lambda *_, **options: name[:3] != "is_" and pytest.skip(f"not run: {name}")

    if settings := os.environ["OPTIMIZER"]:
        from soren_align.training import trainer

        trl.SFTTrainer = partial(trainer.SorenSFTTrainer, optimizer_settings=settings)
        trl.DPOTrainer = partial(trainer.SorenDPOTrainer, optimizer_settings=settings)
    datasets.load_dataset = load
    for module in (import_utils, dpo_trainer, sft_trainer):
        module.__getattr__ = absent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """As a plugin: skip what names something else, or needs a GPU or gigabytes."""
    for item in items:
        # Without decorators, which name the models of all cases.
        text = inspect.getsource(item.function).partition("def ")[2] + item.name
        lacks = [name for name in NAME.findall(text) if not cached(name).exists()]
        if lacks or re.search("Slow|liger|quantization", item.nodeid):
            item.add_marker(pytest.mark.skip(f"not run: {lacks}"))


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """How each test ended, and why."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        ends = {end.tag: end.get("message", "").partition("\n")[0] for end in case}
        outcome, reason = next(iter(ends.items()), ("passes", ""))
        outcome = {"failure": "fails", "error": "fails"}.get(outcome, outcome)
        outcome = "not run" if reason.startswith("not run") else outcome
        results[f"{case.get('classname')}::{case.get('name')}"] = (outcome, reason)
    return results


def main() -> int:
    """Run both and print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trl_tests")
    parser.add_argument("checkout", type=os.path.abspath, help="of TRL, with its tests")
    parser.add_argument("--optimizer", default="adamw", help="of our trainers; default: adamw")
    parser.add_argument("--folder", type=Path, help="keep stand-ins and results here")
    options, for_pytest = parser.parse_known_args()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.trl_tests", *for_pytest]
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", options.checkout]
    command += [f"{options.checkout}/tests/test_{method}_trainer.py" for method in ("sft", "dpo")]
    results, numbers, unknown = [], Counter({("passes", "fails"): 0}), False
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        # Before the libraries are imported, which read these then.
        os.environ |= {"HF_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub")}
        os.environ |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
        if not (folder / "hub").exists():
            make_stand_ins(Path(options.checkout, "scripts"))
        for optimizer in ("", options.optimizer):
            xml, os.environ["OPTIMIZER"] = folder / f"{optimizer or 'trl'}.xml", optimizer
            # Not in the checkout, whose `trl` would be imported.
            subprocess.run([*command, f"--junitxml={xml}"], cwd=folder)
            results.append(outcomes(xml))
    for test, (plain, reason) in results[0].items():
        ours, our_reason = results[1][test]
        numbers[plain, ours] += 1
        if "fails" in (plain, ours):
            print(f"{test}: {plain} with TRL's, {ours} with ours: {our_reason or reason}")
        if (plain, ours) == ("passes", "fails"):
            unknown |= not re.search(KNOWN.get(options.optimizer, "(?!)"), our_reason)
    print("| with TRL's trainer | with ours | tests |\n|---|---|---|")
    print(*(f"| {one} | {two} | {n} |" for (one, two), n in sorted(numbers.items())), sep="\n")
    return int(unknown)


if __name__ == "__main__":
    sys.exit(main())
