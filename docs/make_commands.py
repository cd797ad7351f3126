"""Write docs/commands.md from the commands' own help.

    python docs/make_commands.py

tests/test_docs.py compares the page with what `page` returns.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from soren_align.cli.app import app

PAGE = Path(__file__).with_name("commands.md")
HEAD = """\
# Commands

Generated from the commands' help by `docs/make_commands.py`; `soren-align COMMAND --help` prints the same.

- RECIPE is a file, or the name of a shipped recipe (`soren-align recipes`). [recipe.md](recipe.md) has all keys.
- `--set section.key=value` changes one key of the recipe and may be repeated. Values are YAML: `--set
  optimizer.name=muon`, `--set trainer.bf16=true`, `--set run.num_threads=null`. `optimizer.name=muon`,
  `--optimizer.name muon` and TRL's names (`--learning_rate 1e-5`) mean the same. `--model`, `--data`, `--output` and
  `--overwrite` are short for model.name_or_path, data.train.path, run.output_dir and run.overwrite.
- RUN is a run folder: the `run.output_dir` of a recipe.
- Results go to standard output; progress, notices and errors go to standard error.
- Exit codes: 0 done, 1 failed, 2 an error that the user can fix (its message names the place and the remedy), 130
  stopped by Ctrl-C, SIGTERM or SIGHUP. After 1 and 130, rerun the same command to resume.
- `soren-align --install-completion` completes commands, options, shipped recipes, suites and pages in bash, zsh, fish
  and PowerShell.
"""

NOTES = {
    "sft": """\
The same command resumes an unfinished run, bit for bit; a finished run is never overwritten. `dpo` does the same for
preference pairs.

    soren-align sft quickstart/sft --output runs/muon optimizer.name=muon optimizer.lr=1e-3
    soren-align sft --model MODEL --data faq.csv --output runs/faq

The second line needs no recipe: it takes the settings of `configs/start/sft.yaml`, and writes all of them into
RUN/recipe.yaml. A tenth of the examples is held out. Of a file with two columns of other names the first one is read as
the instruction and the second one as the answer.
""",
    "compare": """\
Every run is an ordinary run folder. The same command continues a study after any kill, and several commands share one;
a finished run is never repeated. The study's file and folder are described in [comparison.md](comparison.md).

    soren-align compare quickstart/compare
    soren-align compare my-study.yaml --jobs 4
""",
    "eval": """\
A run is evaluated beside the checkpoints it was trained from; runs with the same base share its row. The options'
meaning, the statistics and the suites are in [evaluation.md](evaluation.md).

    soren-align eval runs/mine
    soren-align eval runs/soren runs/muon --suite open-llm-leaderboard-v1 --output runs/compared
""",
    "pretrain": """\
Examples are plain texts (a column `text`, or .txt files); `model.init_seed` draws the starting weights. The result is
the validation perplexity: exp of the mean loss of all tokens of `data.eval`, or of its first `data.eval_tokens`. All
else is as for sft: the run folder, resuming, ZeRO and FSDP2, packing, streaming.

    soren-align pretrain quickstart/stdlib
    soren-align pretrain llama-c4/60m-soren --processes 8 --set run.parallel=zero2
""",
    "chat": """\
A run answers with its model, an adapter on its base. On a terminal the answer is streamed and the conversation goes
into the next question; its oldest turns are dropped, with a notice, when the context is full. Every `--prompt` is a
conversation of its own, and without a terminal all of standard input is one question. Answers alone go to standard
output. A model without a chat template completes the text. Control characters in answers are escaped.

    soren-align chat runs/mine --compare start
    soren-align chat runs/mine --prompt "Name a bird." --max-new-tokens 30 > answer.txt
""",
    "plan": """\
Prints: examples used and dropped, one example with its trained tokens marked, steps, the size of all updates, totals of
memory and hours, the evaluation and its questions in the training data. With `--full` also learning rates by step,
which parameters each optimizer updates and by how much, memory by component beside AdamW's, operations, and the files
that will be written. It works offline for the models and datasets of the shipped recipes.

    soren-align plan mistral-7b/soren --processes 8 --set run.parallel=zero3
""",
    "reshard": "See [distributed.md](distributed.md), Checkpoints.\n",
    "spectrum": """\
Prints how far the output of every map is from the exact sigmoid, over all matrices and steps; with `--full` for each,
with the share of small singular values of the momentum. See [runs.md](runs.md), Spectra.

    soren-align sft quickstart/sft --set run.log_spectra.steps=[1,100,600] --no-eval
    soren-align spectrum runs/quickstart/sft --matrices '*q_proj*' --output pictures
""",
    "merge": "For runs with `model.lora`; see [optimizers.md](optimizers.md), LoRA.\n",
    "push": "Nothing is ever uploaded without this command.\n",
    "import": """\
Every key of the file is reported as kept, renamed, dropped (with the reason) or unknown; keys whose loss changes the
training come first. The recipe is written even if its model and data are not on this machine.

    soren-align import zephyr-7b-sft.yaml my.yaml
""",
    "new": """\
The folder for your own data: its recipes run as they are, on a tiny random model, and are then edited. With `--data` a
fifth of your questions (100 at most) is held out: each becomes a question with four choices, and one whose answer
the model has to write. See [own-data.md](own-data.md).

    soren-align new mine
    soren-align new mine --data faq.csv --question Question --answer Answer
""",
    "suites copy": """\
For a suite of your own, with other questions: see [evaluation.md](evaluation.md).

    soren-align suites copy quickstart mine
""",
    "schema": "For completion and checks in an editor; see [recipe.md](recipe.md).\n",
    "docs": """\
For people and coding agents: the pages of this version, without a network. In a pipe they are printed as they are.

    soren-align docs
    soren-align docs recipe | grep -A2 warmup
""",
    "bench maps": "The tables of [benchmarks.md](benchmarks.md) were written by this command.\n",
}
"""What the help has no room for, by command."""


def page() -> str:
    """The text of docs/commands.md."""
    return "\n".join([HEAD, *(_section(path, command) for path, command in commands())])


def commands() -> Iterator[tuple[str, Any]]:
    """("soren-align bench maps", its command) of every command that does something, in the order of the help."""
    yield from _below("soren-align", typer.main.get_command(app))


def _below(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    children = getattr(command, "commands", {})
    if not children or command.invoke_without_command:
        yield path, command
    for name, child in children.items():
        yield from _below(f"{path} {name}", child)


def _section(path: str, command: Any) -> str:
    parameters = [p for p in command.params if not p.hidden]
    arguments = [p for p in parameters if p.param_type_name == "argument"]
    usage = " ".join(
        [path, *(_usage(a) for a in arguments), *(["[OPTIONS]"] if len(arguments) < len(parameters) else [])]
    )
    lines = [f"## `{path}`", "", *command.help.splitlines(), "", f"    {usage}", ""]
    if parameters:
        lines += ["| | |", "|---|---|", *(f"| `{_spelling(p)}` | {_meaning(p)} |" for p in parameters), ""]
    if note := NOTES.get(path.removeprefix("soren-align ")):
        lines.append(note)
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    return _spelling(argument) if argument.required else f"[{_spelling(argument)}]"


def _spelling(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    if parameter.param_type_name == "argument":
        return name
    return ", ".join(parameter.opts) + ("" if parameter.is_flag else f" {name}")


def _meaning(parameter: Any) -> str:
    meaning = (parameter.help or "").replace("|", "\\|")
    if parameter.default not in (None, False) and "Default" not in meaning:
        meaning += f" Default: {parameter.default}."
    return meaning


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
