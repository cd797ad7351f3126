"""Make the site's page of the commands from their own help.

    python docs/make_commands.py

Without a site: `soren-align COMMAND --help`.
"""

from collections.abc import Iterator
from typing import Any

import typer

from soren_align.cli.app import app

HEAD = """\
# Commands

`docs/make_commands.py` generates this page from the commands' help, which `soren-align COMMAND --help` prints.

- RECIPE is a file, or the name of a recipe that comes with soren-align (`soren-align recipes` lists them).
  [recipe.md](recipe.md) lists all keys.
- `--set section.key=value` changes one key of the recipe. You can repeat `--set`. Values are YAML: `--set
  optimizer.name=muon`, `--set trainer.bf16=true`, `--set run.num_threads=null`. You can also write
  `optimizer.name=muon`, `--optimizer.name muon`, or TRL's name of a key (`--learning_rate 1e-5`). `--model`, `--data`,
  `--output` and `--overwrite` set model.name_or_path, data.train.path, run.output_dir and run.overwrite.
- RUN is a run folder: the `run.output_dir` of a recipe.
- Commands print results to standard output, and progress, notices and errors to standard error.
- The exit code is 0 if a command succeeds, 1 if it fails, and 130 if Ctrl-C, SIGTERM or SIGHUP stops it. After the exit
  codes 1 and 130, rerun the same command to resume. The exit code 2 means an error that you can fix; the error message
  has the remedy.
- `soren-align --install-completion` installs completion for bash, zsh, fish and PowerShell: the Tab key then completes
  commands, options, and the names of recipes, suites and pages.
"""

NOTES = {
    "sft": """\
To resume an unfinished run, rerun the same command. A resumed run has the same result as an uninterrupted run, bit for
bit. A finished run is overwritten only with `--overwrite`. The command `dpo` has the same options, and trains on
preference pairs.

    soren-align sft quickstart/sft --output runs/muon optimizer.name=muon optimizer.lr=1e-3
    soren-align sft --model MODEL --data faq.csv --output runs/faq

The second command needs no recipe. Without a recipe, `sft` uses the settings of `configs/start/sft.yaml`, and writes
these settings into RUN/recipe.yaml. A tenth of the examples is held out, and their loss before and after training is
printed at the end. For scores, use `new --data`. `--question` and `--answer` name the columns of the file. Without
these options, the columns are `question` and `answer`, or the only two columns of the file.
""",
    "compare": """\
A study searches good settings of each optimizer, and then trains each optimizer with several seeds. Each run of a study
has its own run folder. To continue a study that was stopped, rerun the same command. Finished runs are not repeated.
Several `compare` commands can work on one study at the same time. [comparison.md](comparison.md) describes the file and
the folder of a study.

    soren-align compare quickstart/compare
    soren-align compare my-study.yaml --jobs 4
""",
    "eval": """\
If you name a run, `eval` evaluates the trained model and the checkpoints from which the run was trained: the base
model, and for DPO also the SFT model. If several runs have the same base model, the base model has only one row in the
table. [evaluation.md](evaluation.md) explains the options, the statistics and the suites.

    soren-align eval runs/mine
    soren-align eval runs/soren runs/muon --suite open-llm-leaderboard-v1 --output runs/compared
""",
    "pretrain": """\
The training examples are plain texts: a column `text`, or .txt files. The weights are random, with the seed
`model.init_seed`. The result is the validation perplexity, which is the exponential of the mean loss of all tokens of
`data.eval` (or of its first `data.eval_tokens` tokens). Run folder, resuming, ZeRO, FSDP2, packing and streaming are
the same as for `sft`.

    soren-align pretrain quickstart/stdlib
    soren-align pretrain llama-c4/60m-soren --processes 8 --set run.parallel=zero2
""",
    "stats": """\
[stats.md](stats.md) lists the formats, the refusals and the output.

    soren-align stats base/ tuned/
    soren-align stats gpt.csv llama.csv --score correct --cluster topic
""",
    "chat": """\
If you name an adapter, its base model is loaded too. In a terminal, you can ask several questions in one conversation.
If the conversation becomes longer than the model's context, the oldest turns are dropped, and a notice is printed. Each
`--prompt` starts a new conversation. If standard input is not a terminal, the whole input is one question. Standard
output has only the answers, without blank lines around them. A model without a chat template continues your text. With
`--compare`, a terminal of at least 100 columns shows the two answers side by side.

    soren-align chat runs/mine --compare start
    soren-align chat runs/mine --prompt "Name a bird." --max-new-tokens 30 > answer.txt
""",
    "plan": """\
[plan.md](plan.md) explains the output of `plan`. Its last line is the command that starts the training. `plan` needs no
network for models and data in files and folders, and for the models and datasets of the recipes that come with
soren-align.

    soren-align plan mistral-7b/soren --processes 8 --set run.parallel=zero3
    soren-align plan Qwen/Qwen2.5-3B --set optimizer.name=muon

With a model in the place of a recipe, `plan` shows how the model would be trained
([models.md](models.md#a-model-before-its-data)). If a problem would stop every training of this model, the exit code
is 2.
""",
    "lr": "[learning-rates.md](learning-rates.md) has the table of the tools, and the assumptions.\n",
    "reshard": "[distributed.md](distributed.md) describes this command in its section about checkpoints.\n",
    "spectrum": """\
A map is the function that an optimizer applies to the singular values of a momentum. `spectrum` prints how much the
output of every map differs from the output of the exact sigmoid, as a mean over all matrices and steps. With `--full`,
`spectrum` also prints this difference for each matrix, and the share of small singular values of the matrix. See
[runs.md](runs.md#spectra).

    soren-align sft quickstart/sft --set run.log_spectra.steps=[1,100,600] --no-eval
    soren-align spectrum runs/quickstart/sft --matrices '*q_proj*'
""",
    "merge": "Use this command on runs with `model.lora`; see [optimizers.md](optimizers.md#lora-and-qlora).\n",
    "push": "No other command uploads anything.\n",
    "import": """\
For every key of the file, the command reports whether the recipe keeps it, renames it, drops it (with the reason) or
does not know it. Dropped keys that change the training come first. The command writes the recipe even if the model and
the data are not on this machine.

    soren-align import zephyr-7b-sft.yaml my.yaml
""",
    "new": """\
The new recipes train a tiny model with random weights. Try them first, and edit them afterwards. With `--data`, some of
your questions are held out: 20 questions of a file with 57 to 100 questions, 35% of a smaller file, and 20% of a larger
file (at most 100 questions). The suite has each held-out question twice: as a multiple-choice question with four
choices, and as a question whose answer the model must write. See [own-data.md](own-data.md).

    soren-align new mine
    soren-align new mine --data faq.csv --question Question --answer Answer
""",
    "suites copy": """\
Edit the copy to make a suite of your own; see [evaluation.md](evaluation.md).

    soren-align suites copy quickstart mine
""",
    "schema": "An editor uses the schemas of recipes and studies to check keys; see [recipe.md](recipe.md).\n",
    "docs": """\
`docs` shows the pages of the installed version, and needs no network. In a pipe, the page is printed as Markdown.

    soren-align docs
    soren-align docs recipe | grep -A2 warmup
""",
}
"""What the help has no room for, by command."""


def page() -> str:
    """The text of docs/commands.md."""
    return "\n".join([HEAD, *(_section(path, command) for path, command in commands())])


def commands() -> Iterator[tuple[str, Any]]:
    """("soren-align suites copy", its command) of every command that does something, in the order of
    the help.
    """
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
        [
            path,
            *(_usage(a) for a in arguments),
            *(["[OPTIONS]"] if len(arguments) < len(parameters) else []),
        ]
    )
    lines = [f"## `{path}`", "", *command.help.splitlines(), "", f"    {usage}", ""]
    if parameters:
        lines += [
            "| | |",
            "|---|---|",
            *(f"| `{_spelling(p)}` | {_meaning(p)} |" for p in parameters),
            "",
        ]
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
    print(page())
