"""What is printed of a mistake: errors that the user can fix, and text that a stranger wrote."""

import difflib
import errno
import os
import re
from collections.abc import Iterable

MAX_PROBLEMS = 20
"""So many problems are printed, and the number of the others."""
MAX_CHARACTERS = 1000
"""Of one printed problem; the longest of our own, a list of TRL's choices, has about 600."""

# What moves the cursor, recolours, clears or reorders a terminal's text: control characters other than newline and tab,
# and Unicode's line separators and bidirectional marks. Halves of surrogate pairs cannot be encoded at all.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: object, max_characters: int | None = None) -> str:
    """The text of str(text) with characters that command a terminal escaped, such as \\x1b; newlines and tabs stay.

    max_characters: a longer text loses its middle.
    """
    escaped = _COMMANDS.sub(lambda found: _escape(ord(found[0])), str(text))
    if max_characters is None or len(escaped) <= max_characters:
        return escaped
    half = (max_characters - 5) // 2
    return f"{escaped[:half]} ... {escaped[-half:]}"


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


class UserError(ValueError):
    """Something that the user can fix. Printed line by line, without a traceback; the exit code is 2.

    problems: as given, whatever their number. As text, the error is safe to print and bounded: control characters are
    escaped, a long line loses its middle, and of many lines all but the last are counted.
    """

    def __init__(self, *problems: str):
        self.problems = problems
        lines = [printable(line, MAX_CHARACTERS) for problem in problems for line in problem.split("\n")]
        if len(lines) > MAX_PROBLEMS + 1:  # the last line stays: where there are many, it is the remedy
            lines[MAX_PROBLEMS - 1 : -1] = [f"... and {len(lines) - MAX_PROBLEMS} more"]
        super().__init__("\n".join(lines))


class OutOfReach(UserError):
    """Something is not here, and the Hugging Face hub cannot be asked."""


def of_the_system(error: OSError) -> UserError | None:
    """What the operating system refused, as a sentence that names the file; None for what is no matter of files."""
    # gcc, ninja: a traceback says who wants it.
    is_program = error.errno == errno.ENOENT and isinstance(error.filename, str) and os.sep not in error.filename
    if (error.filename is None or is_program) and error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    said = f"{where}{error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        said += ". Make room there, or choose a folder on another disk; then rerun the command"
    return UserError(said)


def closest(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most similar to `word`; None if the similarity of all (difflib's, 0 to 1) is below `cutoff`."""
    return next(iter(difflib.get_close_matches(str(word), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(word: object, known: Iterable[str], otherwise: str = "") -> str:
    """The remedy "; did you mean 'lr'?" for the closest known word.

    otherwise: the remedy where no word is similar; empty for none.
    """
    meant = closest(word, known)
    if meant is not None:
        return f"; did you mean '{meant}'?"
    return f"; {otherwise}" if otherwise else ""
