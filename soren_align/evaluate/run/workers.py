"""Processes that hold the model: this process, or a pool of workers with one GPU each."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils.memory import should_reduce_batch_size

from ...core.errors import ResumableError, UserError, as_user_error
from ...core.signals import end_with_parent
from ...core.silence import silence
from .backends import BackendSettings, load_lm, run_requests

Chunk = tuple[str, str, list[tuple]]
"""(key in the cache, kind of request, requests)."""


class OutOfMemory(Exception):
    """A batch did not fit the device's memory."""


class Workers(Protocol):
    """What runs the requests to a model."""

    def run(self, chunks: list[Chunk]) -> Iterator[tuple[str, list[Any], int]]:
        """Yield (key, responses, number of truncated prompts) of each chunk."""
        ...

    def close(self) -> None:
        """Release the model."""


class InProcess:
    """Runs requests in this process. The model is loaded at the first request."""

    def __init__(self, folder: Path, tokenizer: Any, settings: BackendSettings):
        self.folder, self.tokenizer, self.settings = folder, tokenizer, settings
        self.lm: Any = None

    def run(self, chunks: list[Chunk]) -> Iterator[tuple[str, list[Any], int]]:
        """Yield (key, responses, number of truncated prompts) of each chunk, in order."""
        # At the first request: if all responses are cached, no weights are read.
        if chunks and self.lm is None:
            try:
                self.lm = guarded(load_lm, self.folder, self.tokenizer, self.settings)
            except OutOfMemory as error:  # a smaller batch would not help
                raise UserError(
                    f"{self.folder}: the model itself does not fit the device's memory: {error};"
                    " free memory, or write eval.dtype: bfloat16"
                ) from error
        for key, kind, requests in chunks:
            yield key, *guarded(run_requests, self.lm, kind, requests)

    def close(self) -> None:
        """Release the model and its memory."""
        if self.lm is None:  # nothing was asked, or all answers were cached
            return
        llm: Any = getattr(self.lm, "model", None)
        if hasattr(llm, "llm_engine"):  # vLLM's engine may be a process of its own
            # Not every version of vLLM has the first one; the second is of its engine "V1".
            (getattr(llm, "shutdown", None) or llm.llm_engine.engine_core.shutdown)()
        self.lm = None
        # A vLLM engine, whose memory is 90% of the GPU, is part of cycles: the next one would not
        # find room.
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


class WorkerPool:
    """Runs requests in several processes.
    Each loads the model at its first request; chunks go to the first free one."""

    def __init__(self, num_processes: int, folder: Path, tokenizer: Any, settings: BackendSettings):
        # Not fork: a forked CUDA does not work. Not spawn: each process would import torch and
        # lm-eval again, for 6 s.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload([__name__])
        indices = server.SimpleQueue()
        for index in range(num_processes):
            indices.put(index)
        # Shared out: processes with all threads each would compete for the cores.
        num_threads = max(1, torch.get_num_threads() // num_processes)
        arguments = (indices, num_threads, folder, tokenizer, settings)
        self.pool = ProcessPoolExecutor(num_processes, server, _init_worker, arguments)

    def run(self, chunks: list[Chunk]) -> Iterator[tuple[str, list[Any], int]]:
        """Yield (key, responses, number of truncated prompts) of each chunk, as they complete."""
        futures = [self.pool.submit(_run_in_worker, chunk) for chunk in chunks]
        try:
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool as error:
            raise ResumableError(
                "a worker process was killed, perhaps because memory ran out; rerun the same"
                " command, which continues after the cached requests"
            ) from error
        finally:
            # An error in one chunk ends the column: chunks that are not begun are not computed in
            # vain.
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """End the processes."""
        self.pool.shutdown(cancel_futures=True)


def guarded(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function with silenced libraries.
    Raises OutOfMemory if the device's memory does not suffice.
    """
    # values in its files that are read only now
    with as_user_error("the model cannot be evaluated", Exception):
        try:
            with silence():
                return function(*arguments)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            message = str(error).splitlines()[0]
    # Outside of `except`: the error's traceback holds the batch and the model.
    raise OutOfMemory(message)


# The functions below run in the processes of a WorkerPool.

_worker: InProcess


def _init_worker(
    indices: Any, num_threads: int, folder: Path, tokenizer: Any, settings: BackendSettings
) -> None:
    global _worker
    end_with_parent()  # workers without a parent would occupy their GPUs
    # An executor does not number its workers: each takes the index of a GPU from the queue.
    index = indices.get()
    if settings.device.startswith("cuda"):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
    torch.set_num_threads(num_threads)
    _worker = InProcess(folder, tokenizer, settings)


def _run_in_worker(chunk: Chunk) -> tuple[str, list[Any], int]:
    return next(_worker.run([chunk]))
