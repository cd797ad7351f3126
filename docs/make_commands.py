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

`docs/make_commands.py` generates this page from the commands' help, which `soren-align COMMAND --help` prints.

- RECIPE is a file, or the name of a shipped recipe (`soren-align recipes` lists them). [recipe.md](recipe.md) lists all
  keys.
- `--set section.key=value` changes one key of the recipe. You can repeat `--set`. Values are YAML: `--set
  optimizer.name=muon`, `--set trainer.bf16=true`, `--set run.num_threads=null`. You can also write
  `optimizer.name=muon`, `--optimizer.name muon`, or TRL's name of a key (`--learning_rate 1e-5`). `--model`, `--data`,
  `--output` and `--overwrite` set model.name_or_path, data.train.path, run.output_dir and run.overwrite.
- RUN is a run folder: the `run.output_dir` of a recipe.
- Results go to standard output; progress, notices and errors go to standard error.
- Exit codes are 0 (done), 1 (failed), 2 (an error that you can fix; its message names the place and the remedy) and 130
  (stopped by Ctrl-C, SIGTERM or SIGHUP). After 1 and 130, rerun the same command to resume.
- `soren-align --install-completion` completes commands, options, shipped recipes, suites and pages in bash, zsh, fish
  and PowerShell.
"""

NOTES = {
    "sft": """\
To resume an unfinished run, rerun the same command; the result is the same, bit for bit. A finished run is overwritten
only with `--overwrite`. `dpo` works in the same way on preference pairs.

    soren-align sft quickstart/sft --output runs/muon optimizer.name=muon optimizer.lr=1e-3
    soren-align sft --model MODEL --data faq.csv --output runs/faq

The second command needs no recipe. A run without a recipe uses the settings of `configs/start/sft.yaml`, and writes all
of these settings into RUN/recipe.yaml. It holds out a tenth of the examples. If a file has two columns with unknown
names, the first column is read as the instruction and the second column as the answer.
""",
    "compare": """\
Every run of a study has an ordinary run folder. To continue a study that was stopped, rerun the same command; finished
runs are not repeated. Several commands can work on one study at the same time. [comparison.md](comparison.md) describes
the study's file and folder.

    soren-align compare quickstart/compare
    soren-align compare my-study.yaml --jobs 4
""",
    "eval": """\
`eval` evaluates the trained model of a run and the checkpoints that the run was trained from (the base model; for DPO
also the SFT model). If several runs have the same base model, the table has one row for this base model.
[evaluation.md](evaluation.md) explains the options, the statistics and the suites.

    soren-align eval runs/mine
    soren-align eval runs/soren runs/muon --suite open-llm-leaderboard-v1 --output runs/compared
""",
    "pretrain": """\
The examples of `pretrain` are plain texts (a column `text`, or .txt files). The weights are initialized at random with
the seed `model.init_seed`. The result is the validation perplexity: exp of the mean loss over all tokens of
`data.eval`, or over its first `data.eval_tokens` tokens. The run folder, resuming, ZeRO and FSDP2, packing and
streaming work as for `sft`.

    soren-align pretrain quickstart/stdlib
    soren-align pretrain llama-c4/60m-soren --processes 8 --set run.parallel=zero2
""",
    "chat": """\
An adapter is loaded together with its base model. On a terminal, answers are streamed, and the model sees the earlier
turns of the conversation. If the model's context is full, the oldest turns are dropped, with a notice. Every `--prompt`
starts a new conversation. If standard input is not a terminal, all of its text is one question. Standard output
contains only the answers. A model without a chat template continues the text. Control characters in answers are
escaped. With `--compare`, a terminal of at least 100 columns shows both answers side by side.

    soren-align chat runs/mine --compare start
    soren-align chat runs/mine --prompt "Name a bird." --max-new-tokens 30 > answer.txt
""",
    "plan": """\
[plan.md](plan.md) explains the output of `plan`. For the models and datasets of the shipped recipes, `plan` needs no
network.

    soren-align plan mistral-7b/soren --processes 8 --set run.parallel=zero3
""",
    "reshard": "See [distributed.md](distributed.md), Checkpoints.\n",
    "spectrum": """\
`spectrum` prints how far the output of every map is from the exact sigmoid, as a mean over all matrices and steps. With
`--full`, `spectrum` also prints this distance for each matrix, and the share of its small singular values. See
[runs.md](runs.md), Spectra.

    soren-align sft quickstart/sft --set run.log_spectra.steps=[1,100,600] --no-eval
    soren-align spectrum runs/quickstart/sft --matrices '*q_proj*' --output pictures
""",
    "merge": "Use this command on runs with `model.lora`; see [optimizers.md](optimizers.md), LoRA.\n",
    "push": "No other command uploads anything.\n",
    "import": """\
The report lists every key of the file as kept, renamed, dropped (with the reason) or unknown. It begins with the lost
keys that change the training. The recipe is written even if its model and data are not on this machine.

    soren-align import zephyr-7b-sft.yaml my.yaml
""",
    "new": """\
The new recipes run unchanged, on a tiny random model; try them, then edit them for your own data. With `--data`, a
fifth of your questions is held out (at least 20, or 35% of a small file, and at most 100). The suite asks each
held-out question twice: with four choices, and as a question whose answer the model has to write. See
[own-data.md](own-data.md).

    soren-align new mine
    soren-align new mine --data faq.csv --question Question --answer Answer
""",
    "suites copy": """\
Edit the copy to make a suite of your own; see [evaluation.md](evaluation.md).

    soren-align suites copy quickstart mine
""",
    "schema": "An editor uses the schema to complete and check keys; see [recipe.md](recipe.md).\n",
    "docs": """\
`docs` shows the pages of the installed version, and needs no network. In a pipe, the page is printed as Markdown.

    soren-align docs
    soren-align docs recipe | grep -A2 warmup
""",
    "bench maps": "This command wrote the tables of [benchmarks.md](benchmarks.md).\n",
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
