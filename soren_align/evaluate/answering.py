"""One model answers all requests, in pieces: by this process or by several, and never the same piece twice.

lm-eval sees a single model on a single rank, so that its few-shot prompts cannot depend on the number of processes (run
by lm-eval on two ranks, most prompts change). What is dealt out here are finished prompts.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import groupby
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM

from ..recipe import UserError
from .backends import Setup, answer, load
from .journal import Journal, digest
from .quiet import quiet

BATCHES_PER_PIECE = 16
"""Of log-likelihoods: enough to sort by length within, few enough to lose little when killed."""


class OutOfMemory(Exception):
    """A batch did not fit."""


class Answering(TemplateLM):
    """lm-eval's model whose answers come from the journal or, piece by piece, from the processes at work."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        setup: Setup,
        journal: Journal,
        *,
        num_processes: int = 1,
        strict: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
    ):
        """model: a folder, or a loaded model for one process. on_progress: gets requests done and in all."""
        super().__init__()
        self.model, self.tokenizer, self.setup, self.journal = model, tokenizer, setup, journal
        self.num_processes, self.strict, self.on_progress = num_processes, strict, on_progress
        self.chat_template_args: dict[str, Any] = {}  # as HFLM has it
        self.num_asked = self.num_kept = self.num_cut = 0
        self._lm: Any = None
        self._pool: ProcessPoolExecutor | None = None

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """lm-eval asks: how likely is each continuation after its context, and is it the likeliest?"""
        return self._answers("loglikelihood", [request.args for request in requests])

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """lm-eval asks: how does each context go on?"""
        return self._answers("generate_until", [request.args for request in requests])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """lm-eval asks: how likely is each text?"""
        return self._answers("loglikelihood_rolling", [request.args for request in requests])

    def close(self) -> None:
        """Let the model, or the processes that hold it, go."""
        self._lm = None
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _answers(self, kind: str, requests: list[tuple]) -> list[Any]:
        """The answers, in order."""
        numbered = pieces(kind, requests, self.setup.batch_size)
        names = [digest([kind, [requests[i] for i in piece]]) for piece in numbered]
        todo = {name: piece for name, piece in zip(names, numbered, strict=True) if name not in self.journal.answers}
        asked = sum(len(piece) for piece in todo.values())
        done = len(requests) - asked
        self.num_kept += done
        self._say(done, len(requests))
        work = [(name, kind, [requests[i] for i in piece]) for name, piece in todo.items()]
        for name, found, num_cut in self._work_on(work):
            if num_cut and self.strict:
                raise UserError(f"{num_cut} prompts do not fit the model's context and would be cut (--strict)")
            self.journal.add(name, found, num_cut)
            self.num_asked += len(found)
            done += len(found)
            self._say(done, len(requests))
        answers: list[Any] = [None] * len(requests)
        for name, piece in zip(names, numbered, strict=True):
            found, num_cut = self.journal.answers[name]
            self.num_cut += num_cut
            for i, given in zip(piece, found, strict=True):
                answers[i] = given
        if self.strict and self.num_cut:
            raise UserError(f"{self.num_cut} prompts do not fit the model's context and were cut (--strict)")
        return answers

    def _say(self, done: int, of: int) -> None:
        if self.on_progress:
            self.on_progress(done, of)

    def _work_on(self, work: list[tuple[str, str, list[tuple]]]) -> Iterator[tuple[str, list[Any], int]]:
        """Each piece with its answers, as they come."""
        if self.num_processes == 1:
            for name, kind, requests in work:
                self._lm = self._lm or _guarded(load, self.model, self.tokenizer, self.setup)
                yield name, *_guarded(answer, self._lm, kind, requests)
            return
        self._pool = self._pool or _pool(self.num_processes, self.model, self.tokenizer, self.setup)
        waiting = {self._pool.submit(_answer, kind, requests): name for name, kind, requests in work}
        try:
            while waiting:
                for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(future), *future.result()
        except BrokenProcessPool as error:
            raise UserError(
                "a process that answered questions was killed (out of memory?); the same command goes on"
            ) from error
        finally:
            for future in waiting:
                future.cancel()

    apply_chat_template = HFLM.apply_chat_template
    tokenizer_name = HFLM.tokenizer_name

    @property
    def eot_token_id(self) -> int:
        """The end of a text."""
        return self.tokenizer.eos_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Not asked for: the tokens are cut where the model is."""
        raise NotImplementedError

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        raise NotImplementedError


def pieces(kind: str, requests: list[tuple], batch_size: int) -> list[list[int]]:
    """The requests' numbers in pieces: long contexts first (a batch too large shows at once), none of them torn.

    They depend on nothing but the requests and the batch size.
    """
    limit = batch_size * (1 if kind == "generate_until" else BATCHES_PER_PIECE)
    order = sorted(range(len(requests)), key=lambda i: (-len(requests[i][0]), requests[i][0], i))
    found: list[list[int]] = []
    for _, same_context in groupby(order, key=lambda i: requests[i][0]):
        alike = list(same_context)
        if not found or len(found[-1]) + len(alike) > limit:
            found.append([])
        found[-1] += alike
    return found


def _guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call in silence; OutOfMemory where the device had too little."""
    try:
        with quiet():
            return function(*arguments)
    except RuntimeError as error:
        if should_reduce_batch_size(error):
            raise OutOfMemory(str(error).splitlines()[0]) from error
        raise


# What follows runs in the processes that answer.

_loading: tuple[Any, Any, Setup]
_lm: Any = None


def _pool(number: int, model: Any, tokenizer: Any, setup: Setup) -> ProcessPoolExecutor:
    # Not fork: a forked CUDA does not work. Not spawn: each process would import torch and lm-eval anew, for 6 s.
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload([__name__])
    numbers = server.SimpleQueue()
    for each in range(number):
        numbers.put(each)
    threads = max(1, torch.get_num_threads() // number)
    return ProcessPoolExecutor(number, server, _begin, (numbers, threads, model, tokenizer, setup))


def _begin(numbers: Any, threads: int, model: Any, tokenizer: Any, setup: Setup) -> None:
    global _loading
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    number = numbers.get()
    if setup.device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    torch.set_num_threads(threads)
    _loading = model, tokenizer, setup


def _leave_with_parent() -> None:
    """A parent that was killed cannot say goodbye, and an orphan would hold its GPU for ever."""
    parent = multiprocessing.parent_process()
    assert parent
    parent.join()
    os._exit(1)


def _answer(kind: str, requests: list[tuple]) -> tuple[list[Any], int]:
    global _lm
    if _lm is None:
        _lm = _guarded(load, *_loading)
    return _guarded(answer, _lm, kind, requests)
