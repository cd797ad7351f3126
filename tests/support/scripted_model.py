"""A model whose responses are written down: some right, some wrong, the same for lm-eval and for our evaluation."""

import hashlib
from collections.abc import Mapping
from typing import Any

from lm_eval.api.model import LM
from soren_align.evaluate.run.workers import InProcess


class Script:
    """The responses of one model to requests, as a function of their texts."""

    def __init__(self, right: Mapping[str, str], salt: str = ""):
        """right: by a question's text, a response that is right. salt: another one is another model."""
        self.right, self.salt = right, salt

    def share(self, *texts: str) -> float:
        """Return a number in [0, 1) that depends on the texts."""
        return int(hashlib.sha256("\0".join((self.salt, *texts)).encode()).hexdigest()[:12], 16) / 16**12

    def respond(self, kind: str, arguments: tuple) -> Any:
        """Return the log-likelihood of a choice, or a text: right for about half of the questions."""
        if kind == "loglikelihood":
            return -20 * self.share(*arguments), False
        context = arguments[0]
        position, question = max((context.rfind(question), question) for question in self.right)
        assert position >= 0, context
        return self.right[question] if self.share(question) < 0.5 else f"I, who wrote {self.share(context)},"


def workers(script: Script) -> type[InProcess]:
    """Return a class in the place of `InProcess` that responds by the script."""

    class Scripted(InProcess):
        def run(self, chunks):
            for key, kind, requests in chunks:
                yield key, [script.respond(kind, request) for request in requests], 0

    return Scripted


class ScriptedLM(LM):
    """The same model for lm-eval's own simple_evaluate."""

    def __init__(self, script: Script, tokenizer: Any):
        super().__init__()
        self.script, self.tokenizer = script, tokenizer

    def loglikelihood(self, requests):
        return [self.script.respond("loglikelihood", request.args) for request in requests]

    def generate_until(self, requests):
        return [self.script.respond("generate_until", request.args) for request in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    @property
    def tokenizer_name(self) -> str:
        return "scripted"

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        return self.tokenizer.apply_chat_template(
            chat_history, tokenize=False, add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )  # fmt: skip

    def chat_template(self, chat_template=False):
        return self.tokenizer.chat_template
