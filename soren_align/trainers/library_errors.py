"""Errors of libraries (transformers, TRL, PEFT, DeepSpeed) as UserErrors that name the part of the recipe."""

import contextlib
from collections.abc import Iterator

from huggingface_hub import constants

from ..errors import OutOfReach, ResumableError, UserError, machine_failure

MAX_CHARACTERS = 400


@contextlib.contextmanager
def as_user_error(place: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within this context, raise UserError(f"{place}: {message}") in place of a library's error.

    place: the recipe's key, or the model or file that the error is about.
    kinds: the exceptions that are converted; ValueError and OSError if none are named. UserErrors are not changed.
    Raises ResumableError if the machine failed, and OutOfReach for another OSError when the hub is offline.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not isinstance(error, kinds or (ValueError, OSError)):
            raise
        is_offline = isinstance(error, OSError) and constants.HF_HUB_OFFLINE
        message = f"{place}: {' '.join(str(error).split())[:MAX_CHARACTERS]}"
        kind = ResumableError if machine_failure(error) else OutOfReach if is_offline else UserError
        raise kind(message) from error
