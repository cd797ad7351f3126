"""Samples during training: the answers of the model to a few prompts.

They do not change the training: no random number is drawn, and the modules' modes are restored.
tests/training/test_samples.py compares the weights bit for bit with those of a training without
samples.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import GenerationConfig, TrainerCallback

from ...core.errors import UserError
from ...core.files import append, parse_json, read_text, resolve_path
from ...core.text import print_labelled
from ...data import template_errors, text_ids
from ...recipe import Samples
from ...run.folder import read_metrics
from ...sharding.ranks import Ranks

MAX_PROMPTS = 100
"""Each is answered alone at every evaluation, so that padding changes no answer."""
NUM_SHOWN = 3
"""Answers that are printed at a time."""
MAX_SHOWN = 300
"""Characters of a printed prompt, and of a printed answer."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as in the recipe, a text or turns; its tokens, and the most tokens of an answer."""

    content: str | list[dict[str, Any]]
    ids: list[int]
    max_new_tokens: int

    @property
    def text(self) -> str:
        """The text, or that of the last turn."""
        return (
            self.content if isinstance(self.content, str) else str(self.content[-1].get("content"))
        )


def read_prompts(
    samples: Samples, tokenizer: Any, has_turns: bool, num_positions: int | None
) -> tuple[Prompt, ...]:
    """Return the prompts of `run.samples` with their tokens.

    has_turns: of the data: a text is then a user's message, rendered by the chat template;
    otherwise it is tokenized as it is. num_positions: of the model, which an answer does not
    exceed. Raises UserError for a file that cannot be read, and for a prompt that leaves no
    position.
    """
    place = "run.samples.prompts"
    contents = (
        list(_contents(samples.prompts)) if isinstance(samples.prompts, str) else samples.prompts
    )
    if not 0 < len(contents) <= MAX_PROMPTS:
        raise UserError(f"{place}: found {len(contents)} prompts; write 1 to {MAX_PROMPTS} prompts")
    prompts = []
    for number, content in enumerate(contents, 1):
        is_text = isinstance(content, str)
        if not (has_turns or is_text):
            raise UserError(
                f"{place}: prompt {number} has messages, but the training data are plain texts; "
                "write a text"
            )
        prompt = [{"role": "user", "content": content}] if has_turns and is_text else content
        ids = prompt_ids(prompt, tokenizer, f"{place}: the chat template fails on prompt {number}")
        room = samples.max_new_tokens if num_positions is None else num_positions - len(ids)
        if room < 1:
            raise UserError(
                f"{place}: prompt {number} has {len(ids)} tokens, but the model has only "
                f"{num_positions} positions; write a shorter prompt"
            )
        prompts.append(Prompt(content, ids, min(samples.max_new_tokens, room)))
    return tuple(prompts)


def prompt_ids(prompt: str | list[dict[str, Any]], tokenizer: Any, subject: str) -> list[int]:
    """Return the tokens of a text, or of turns with the beginning of an answer.
    subject: see `template_errors`.
    """
    if isinstance(prompt, str):
        return text_ids(prompt, tokenizer)
    with template_errors(subject):
        return list(
            tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )


def _contents(path: str) -> Iterator[str | list[dict[str, Any]]]:
    """Yield the prompts of a .txt or .jsonl file."""
    file = resolve_path(path)
    lines = enumerate(read_text(file).splitlines(), 1)
    for number, line in ((number, line.strip()) for number, line in lines if line.strip()):
        if file.suffix == ".txt":
            yield line
            continue
        record = parse_json(line, f"{path}:{number}")
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not prompt or not isinstance(prompt, str | list):
            raise UserError(
                f'{path}:{number} has no prompt; write {{"prompt": ...}} with a text or a list of '
                "messages"
            )
        yield prompt


class SampleWriter(TrainerCallback):
    """Appends an answer to every prompt to `file`, and prints the first ones: at the start and at
    each evaluation.

    The first rank, which must hold all weights, writes; on the others this waits for it, since a
    collective has a timeout.
    """

    def __init__(
        self,
        prompts: tuple[Prompt, ...],
        tokenizer: Any,
        file: Path,
        console: Console,
        ranks: Ranks = Ranks(),
    ):
        self.prompts, self.tokenizer, self.file, self.console = prompts, tokenizer, file, console
        self.ranks = ranks
        self.last_step: int | None = None
        """Whose samples are written."""
        self._printed: dict[int, str] = {}
        """The last printed answer by the number of its prompt: one that has not changed is not
        printed again."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Sample from the starting checkpoint; a resumed run has done so, and at the evaluation of
        its checkpoint.
        """
        if state.global_step == 0:
            self.sample(model, 0)
        elif self.file.is_file():
            self.last_step = max((line["step"] for line in read_metrics(self.file)), default=None)

    def on_evaluate(self, args, state, control, model=None, **kwargs):
        """Sample from the model that was evaluated."""
        if state.global_step != self.last_step:  # of eval_on_start
            self.sample(model, state.global_step)

    def sample(self, model: Any, step: int, **marks: str) -> None:
        """Write and print the answers of the model after `step` steps. Collective.

        marks: further keys of their lines.
        """
        self.last_step, lines = step, []
        # The others wait: the next collective would time out while this rank generates.
        with self.ranks.main_process_first():
            if not self.ranks.is_first:
                return
            with evaluating(model):
                for number, prompt in enumerate(self.prompts):
                    completion, finish_reason = self._answer(model, prompt)
                    record = {"step": step, "prompt": prompt.content, "completion": completion}
                    record |= {"finish_reason": finish_reason, **marks}
                    lines.append(json.dumps(record, ensure_ascii=False) + "\n")
                    end = "" if finish_reason == "stop" else " ..."
                    answer = f"{_shown(prompt.text)} -> {_shown(completion)}{end}"
                    if number < NUM_SHOWN and self._printed.get(number) != answer:
                        self._printed[number] = answer
                        print_labelled(self.console, "sample", answer)
            append(self.file, "".join(lines))

    def _answer(self, model: Any, prompt: Prompt) -> tuple[str, str]:
        """Return (text, "stop" or "length") of the greedy continuation."""
        # Greedy: a sample that drew a random number would change the training.
        own = getattr(model.generation_config, "eos_token_id", None)
        ends = {self.tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])} - {None}
        config = GenerationConfig(
            do_sample=False,
            # An argument of this call: TRL has switched the cache off in the model's config, which
            # stays.
            use_cache=True,
            max_new_tokens=prompt.max_new_tokens,
            eos_token_id=sorted(ends) or None,
            pad_token_id=self.tokenizer.pad_token_id or 0,
        )
        tokens = torch.tensor([prompt.ids], device=next(model.parameters()).device)
        output = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
        new = output[0, len(prompt.ids) :].tolist()
        is_stopped = bool(new) and new[-1] in ends
        text = self.tokenizer.decode(new[:-1] if is_stopped else new, skip_special_tokens=True)
        return text, "stop" if is_stopped else "length"


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode within the block; every module's own mode and the random
    states are restored.
    """
    # Each module's own mode: parts of a model may be in evaluation mode while it trains.
    modes = [(module, module.training) for module in model.modules()]
    states = random.getstate(), np.random.get_state()
    model.eval()
    # Without this argument the states of all visible GPUs would be saved, on each of them, with a
    # warning.
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(gpus), torch.no_grad():
            yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        random.setstate(states[0])
        np.random.set_state(states[1])


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]} ..."
