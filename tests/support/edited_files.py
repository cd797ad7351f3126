"""Files that a test changes."""

import json
from contextlib import contextmanager


@contextmanager
def edited(file):
    """The object in a JSON file; with the changes that are made to it, it is written back."""
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


def edit(file, **keys):
    """Set keys of the object in a JSON file."""
    with edited(file) as content:
        content.update(keys)


def replace(file, old, new):
    """Write `new` for the first `old` in a text file, which has it."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
