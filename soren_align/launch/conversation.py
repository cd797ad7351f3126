"""`soren-align chat`: questions from a terminal, from options or from a pipe, answered by one model or two."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.table import Column, Table

from ..core.errors import UserError, printable
from ..core.silence import quiet_libraries
from ..core.text import Terminal, loading, print_labelled, stderr_console
from ..recipe import load_resolved
from ..run.folder import RunFolder
from .environment import set_environment
from .evaluation import refuse_missing

if TYPE_CHECKING:
    from .chat import Conversation

EMPTY = "(empty answer)"
MIN_COLUMNS_WIDTH = 100
"""Of a terminal on which two answers stand side by side."""
START = "start"
"""`--compare start`: the checkpoint that the run was trained from."""
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ChatOptions:
    """The options of the command."""

    compare: str | None = None
    """A second model, or START."""
    prompts: tuple[str, ...] = ()
    """Each is the only question of its own conversation."""
    system: str | None = None
    max_new_tokens: int = 512
    temperature: float = 0.0
    dtype: str | None = None


def chat(model: str, options: ChatOptions) -> None:
    """Answer options.prompts, or else all of standard input as one question; on a terminal, converse.

    Answers go to standard output. Raises UserError before torch is imported if a model is missing.
    """
    for name in (model, *([options.compare] if options.compare not in (None, START) else [])):
        refuse_missing(name)
    if options.dtype not in (None, *DTYPES):
        raise UserError(f"--dtype: found {options.dtype!r}; write {', '.join(DTYPES)}")
    prompts = options.prompts
    interactive = not prompts and sys.stdin.isatty()
    if not prompts and not interactive:
        prompts = (sys.stdin.read().strip(),)
    if not all(prompts):
        raise UserError("chat: the question is empty; write --prompt TEXT, or pipe a text into the command")
    run = RunFolder(model)
    is_run = run.read() is not None and run.recipe.is_file()
    set_environment(load_resolved(run.recipe) if is_run else None)
    console = stderr_console()
    with loading(console, "Loading torch and transformers"):
        from . import chat as _  # noqa: F401 (before the libraries are silenced)
    with quiet_libraries():
        conversations = _start(model, options, console)
        if interactive:
            _converse(conversations, console)
        for number, prompt in enumerate(prompts):
            if len(prompts) > 1:
                _write("\n" * bool(number) + f"> {prompt}\n")
            for conversation in conversations:
                conversation.turns = []
            _answer(conversations, prompt, console)


def _start(model: str, options: ChatOptions, console: Console) -> "list[Conversation]":
    """Load the models, and return a conversation with each."""
    import torch

    from ..evaluate.run.lineage import lineage
    from .chat import ChatModel, Conversation

    rows = lineage(model)
    if options.compare == START:
        if len(rows) < 2:
            raise UserError(f"--compare {START}: no checkpoint that {model} was trained from is on this machine")
        rows = rows[:-3:-1]
    else:
        rows = [rows[-1], *([lineage(options.compare)[-1]] if options.compare else [])]
    if len(rows) == 2 and rows[0][0] == rows[1][0]:
        rows = [(str(path), path) for _, path in rows]
    torch.seed()  # torch's own seed is the same in every process: the same "random" answer every time
    models = []
    for name, path in rows:
        with console.status(f"Loading {name}"):
            each = ChatModel(name, path, options.dtype)
        models.append(each)
        template = "its chat template" if each.has_template else "no chat template: it completes plain text"
        text = f"{each.name}: {path}, {each.precision}, context of {each.context:,} tokens, {template}"
        print_labelled(console, "model", printable(text))
    return [Conversation(each, options.system, options.max_new_tokens, options.temperature) for each in models]


def _converse(conversations: "list[Conversation]", console: Console) -> None:
    """Ask for questions until Ctrl-D or Ctrl-C; Ctrl-C during an answer only stops that answer."""
    with suppress(ImportError):
        import readline  # noqa: F401 (input() then has a history, and the arrow keys work)
    print_labelled(console, "keys", "Ctrl-C stops an answer; Ctrl-D, or Ctrl-C at the prompt, ends")
    for question in _questions():
        try:
            _answer(conversations, question, console)
        except UserError as error:
            print_labelled(console, "error", str(error))
        except KeyboardInterrupt:
            _write("\n")


def _questions() -> Iterator[str]:
    while True:
        try:
            question = input("\n> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write("\n")
            return
        if question:
            yield question


def _answer(conversations: "list[Conversation]", question: str, console: Console) -> None:
    """Print the answers: two of them side by side on a wide terminal, else one after the other."""
    terminal = Terminal()
    if len(conversations) > 1 and sys.stdout.isatty() and terminal.width >= MIN_COLUMNS_WIDTH:
        answer_side_by_side(conversations, question, terminal)
        return
    for conversation in conversations:
        if len(conversations) > 1:
            _write(f"\n{conversation.model.name}:\n")
        on_text = _without_blank_lines(_write) if sys.stdout.isatty() else _write
        answer = conversation.ask(question, on_text, lambda text: print_labelled(console, "notice", printable(text)))
        _write("\n")
        if not answer.strip():
            console.print(EMPTY)


def answer_side_by_side(conversations: "list[Conversation]", question: str, terminal: Terminal) -> None:
    """Stream the answers into a column each, one after the other."""
    texts, notices = ["" for _ in conversations], list[str]()

    def table() -> Table:
        names = [Column(printable(c.model.name), ratio=1, overflow="fold") for c in conversations]
        columns = Table(*names, box=None, expand=True, padding=(0, 2, 0, 0), header_style="bold")
        columns.add_row(*texts)
        return columns

    try:
        with Live(table(), console=terminal, refresh_per_second=8) as live:
            for i, conversation in enumerate(conversations):

                def add(text: str, i: int = i) -> None:
                    texts[i] += text
                    live.update(table())

                if not conversation.ask(question, _without_blank_lines(add), notices.append).strip():
                    add(EMPTY)
    finally:
        for notice in notices:
            print_labelled(terminal, "notice", printable(notice))


def _without_blank_lines(write: Callable[[str], object]) -> Callable[[str], None]:
    """Return `write` for an answer, with one empty line in place of several: untrained models make hundreds."""
    num_breaks = 0

    def write_few(text: str) -> None:
        nonlocal num_breaks
        few = []
        for character in text:
            num_breaks = num_breaks + 1 if character == "\n" else 0
            few += [character] if num_breaks <= 2 else []
        write("".join(few))

    return write_few


def _write(text: str) -> None:
    """Write text of any origin to standard output, where it cannot control the terminal."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()
