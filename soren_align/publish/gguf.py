"""A trained model as one GGUF file, for llama.cpp, Ollama and the programs built on them.

llama.cpp's own converter and quantizer write the file: they know every architecture, and change
with the format. This module finds them, names what the user needs next to it, and measures what the
rounding leaves of the fine-tune.
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, GenerationConfig

from ..core.errors import UserError, in_one_line
from ..core.extras import install_command, missing
from ..core.files import local_path, read_json, rename_durably, write
from ..core.silence import quiet_libraries
from ..core.text import print_labelled
from ..data.rendering import template_errors
from ..evaluate.run.lineage import lineage, run_of
from ..evaluate.run.models import base_folder
from ..run.folder import RunFolder
from ..run.weights import load_config, load_tokenizer
from ..training.checkpoints import write_errors
from .gguf_answers import answers_text

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
DIRECT = ("F32", "F16", "BF16", "Q8_0")
"""Types that the converter writes; all others are made from F16 by the quantizer."""
REMEDY = (
    "clone llama.cpp (https://github.com/ggml-org/llama.cpp), run"
    f" {install_command('gguf')}, and set LLAMA_CPP to its folder"
)


@dataclass(frozen=True)
class Survival:
    """What a file's weights have of the change from the start to the trained weights."""

    share: float
    """Of the change, along its direction: 1 if rounding favours none."""
    cosine: float
    """Between the change and the one in the file."""
    lowest: float
    """The cosine of the matrix where it is lowest."""
    rounding: float
    """The size of the rounding, as a multiple of the change."""


def export(path: str, kind: str, output: str | None, console: Any) -> None:
    """Write a run's model, or a model folder, as OUTPUT/NAME-KIND.gguf with an Ollama Modelfile.

    kind: a type of llama.cpp's, such as Q8_0 or Q4_K_M. Raises UserError if a tool is missing, if
    the run has no whole model, or if llama.cpp refuses the model.
    """
    kind = kind.upper()
    script = _tool(CONVERTER)
    quantizer = None if kind in DIRECT else _tool(QUANTIZER)
    model, start = _model_and_start(path)
    _refuse_code(model)
    own = Path(os.path.abspath(path)).name
    name = f"{own}-{kind}.gguf"
    folder = Path(output) if output else Path(path) / "gguf"
    remedy = "Free space on this disk, then rerun the command"
    run = run_of(local_path(path))
    # As a push: where no lock can be written, no training can write either.
    locked = RunFolder(run).locked() if run and os.access(run, os.W_OK) else nullcontext()
    with locked, write_errors(folder, remedy), console.status(f"Writing {name}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="part-") as scratch:
            written = Path(scratch) / "model.gguf"
            first = kind.lower() if quantizer is None else "f16"
            _convert(script, model, "--outfile", str(written), "--outtype", first)
            if quantizer is not None:
                whole, written = written, Path(scratch) / name
                _run([quantizer, str(whole), str(written), kind], model)
            rename_durably(written, folder / name)
        write(folder / "Modelfile", _modelfile(name, model))
    print_labelled(console, "written", f"{folder}: {name}, Modelfile", wrap=False)
    print_labelled(console, "kept", _survival_text(folder / name, model, start))
    with console.status("Asking the file"):
        answers = answers_text(folder / name, run, load_tokenizer(str(model)))
    print_labelled(console, "answers", answers)
    print_labelled(
        console,
        "next",
        f"ollama create {own} -f {folder}/Modelfile",
        f"llama-server -m {folder / name}",
        f"vllm serve {model}",
        f"transformers serve {model}",
        wrap=False,
    )


def survival(file: Path, model: Path, start: Path) -> Survival:
    """What the weights in `file` have of the change from `start` to `model`, over all matrices that
    changed.

    Raises UserError if transformers cannot read the file back, or if nothing changed.
    """
    try:
        # transformers' progress bar of reading GGUF has no switch.
        with quiet_libraries(), redirect_stderr(io.StringIO()):
            read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, ImportError, NotImplementedError, KeyError) as error:
        raise UserError(f"transformers cannot read it back: {in_one_line(error)}") from None
    quantized, before, after = read.state_dict(), _places(start), _places(model)
    products = torch.zeros(3, dtype=torch.float64)  # change and file's, change's, file's
    lowest = 1.0
    for name in sorted(after.keys() & before.keys() & quantized.keys()):
        if quantized[name].ndim < 2:
            continue
        old = _weight(name, before)
        change, remaining = _weight(name, after) - old, quantized[name].double() - old
        own = torch.stack(
            [(change * remaining).sum(), change.square().sum(), remaining.square().sum()]
        )
        if own[1] > 0:
            lowest = min(lowest, float(own[0] / (own[1] * own[2]).sqrt()))
            products += own
    if not products[1] > 0:
        raise UserError(f"no matrix of {model} differs from {start}")
    both, change, remaining = products.tolist()
    rounding = ((remaining - 2 * both + change) / change) ** 0.5
    return Survival(both / change, both / (change * remaining) ** 0.5, lowest, rounding)


def _places(folder: Path) -> dict[str, Path]:
    """The file of each weight."""
    places = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            places |= dict.fromkeys(opened.keys(), file)
    return places


def _weight(name: str, places: dict[str, Path]) -> torch.Tensor:
    with safe_open(places[name], "pt") as opened:
        return opened.get_tensor(name).double()


def _survival_text(file: Path, model: Path, start: Path | None) -> str:
    if start is None:
        return "not measured: the weights that training started from are not known, or not here"
    if problem := missing("gguf"):
        return f"not measured: {problem}"
    try:
        result = survival(file, model, start)
    except UserError as error:  # the file is whole all the same
        return f"not measured: {error}"
    times = f"{result.rounding:,.0f}" if result.rounding >= 10 else f"{result.rounding:.2f}"
    return (
        f"{result.share:.0%} of the fine-tune's change, beside a rounding {times} times"
        f" as large (cosine {result.cosine:.2f}, in the worst matrix {result.lowest:.2f})"
    )


def _tool(name: str) -> str:
    """The path of one of llama.cpp's programs: from $LLAMA_CPP, or on the PATH."""
    root = os.environ.get("LLAMA_CPP")
    places = [Path(root, name), Path(root, "build/bin", name)] if root else []
    place = next((str(place) for place in places if place.is_file()), shutil.which(name))
    if place is None:
        remedy = REMEDY if name == CONVERTER else "build llama.cpp, or choose --quantize Q8_0"
        raise UserError(f"--to gguf needs {name} of llama.cpp, which is not here; {remedy}")
    return place


def _refuse_code(model: Path) -> None:
    """Raise UserError if a model names code of its own: the converter would run it."""
    load_config(str(model))
    for file in model.glob("*config.json"):
        content = read_json(file)
        if isinstance(content, dict) and "auto_map" in content:
            raise UserError(
                f"{file}: names code of the model (auto_map), which llama.cpp's converter would"
                " run; read that code, and convert the model by hand if you trust it"
            )


OWN_TOKENIZER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import convert_hf_to_gguf as converter
import gguf
base = sys.modules.get("conversion.base", converter)
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
write = gguf.SpecialVocab.add_to_gguf
def with_merges(self, *arguments, **options):
    self.merges = self.merges or ["\u0100 \u0100"]
    write(self, *arguments, **options)
gguf.SpecialVocab.add_to_gguf = with_merges
converter.main()
"""
"""llama.cpp's converter for a tokenizer that it does not know: it finds the pre-tokenizer by a hash
of the tokens of a text, which only published models' have. Its runtime needs a merge; that of two
zero bytes makes no token."""


def _convert(script: str, model: Path, *options: str) -> None:
    """Convert a model by llama.cpp's script; one with a tokenizer of its own as GPT-2's is."""
    try:
        _run([sys.executable, script, str(model), *options], model)
    except UserError as error:
        if not _splits_as_gpt2(model):
            raise
        command = [sys.executable, "-c", OWN_TOKENIZER, str(Path(script).parent)]
        try:
            _run([*command, str(model), *options], model)
        except UserError:
            raise error from None  # then the tokenizer was not the reason


def _splits_as_gpt2(model: Path) -> bool:
    """Whether a tokenizer splits texts as GPT-2's, or merges nothing, so that no split matters."""
    if not (model / "tokenizer.json").is_file():
        return False
    content = read_json(model / "tokenizer.json")
    splitter = content.get("pre_tokenizer") or {}
    merges = (content.get("model") or {}).get("merges")
    return splitter.get("type") == "ByteLevel" and (splitter.get("use_regex", True) or not merges)


def _run(command: list[str], model: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, errors="replace"
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise UserError(
            f"{model}: {CONVERTER if command[0] == sys.executable else QUANTIZER} of llama.cpp"
            f" failed: {lines[-1].strip()[:200]}; nothing was written"
            + f"; {REMEDY}"
            * ("ModuleNotFoundError" in lines[-1])
        )


def _model_and_start(path: str) -> tuple[Path, Path | None]:
    """The folder of a whole model, and that of the weights before its training, if it is there."""
    *before, (_, model) = lineage(path)
    start = before[-1][1] if before else None
    run = RunFolder(model.parent)
    if run_of(model) and run.record()["status"] not in ("trained", "finished"):
        raise UserError(f"{run}: {run.why_no_model()}")
    if (base := base_folder(model)) is None:
        return model, start
    if not (run_of(model) and run.is_merged()):
        raise UserError(
            f"{run}: trained an adapter; run `soren-align merge {run}`, then this command again"
        )
    return run.merged, base


def _modelfile(name: str, model: Path) -> str:
    """Ollama's: the model's own chat template for one question, in the words of Go's templates."""
    tokenizer: Any = load_tokenizer(str(model))
    lines = [f"FROM ./{name}"]
    # What the tokenizer puts before every text, so will the programs that read the file; SmolLM2's
    # BOS begins a turn, and no text.
    adds_bos = tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    own_start = tokenizer.bos_token if adds_bos else ""

    def rendered(*turns: tuple[str, str]) -> str:
        with template_errors(f"{model}: the chat template"):
            text = tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in turns],
                tokenize=False,
                add_generation_prompt=True,
            )
        return text.removeprefix(own_start)

    if tokenizer.chat_template:
        text = rendered(("user", "{{ .Prompt }}"))
        with suppress(UserError):  # such as Gemma's, which has no system turn
            system = rendered(("system", "{{ .System }}"), ("user", "{{ .Prompt }}"))
            text = f"{{{{ if .System }}}}{system}{{{{ else }}}}{text}{{{{ end }}}}"
        lines.append(f'TEMPLATE """{text}{{{{ .Response }}}}{tokenizer.eos_token or ""}"""')
    ends = GenerationConfig.from_pretrained(model).eos_token_id
    for end in ends if isinstance(ends, list) else [ends]:
        if end is not None:
            lines.append(f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(end)}"')
    return "\n".join(lines) + "\n"
