"""Files are read as plain data or refused, written whole, and printed as text."""

import io
import os
import signal
from threading import Thread

import pytest
from rich.table import Table
from rich.text import Text
from soren_align.core.errors import UserError, printable
from soren_align.core.files import contents, parse_json, read_json, read_text
from soren_align.core.text import Terminal
from soren_align.core.yaml import parse_yaml

YAML = {
    "an alias of what is around it": ("a: &a [*a]", "contains itself by an alias"),
    "a tag on a text": ("b: 1\na: !!int zero", ":2 .*found 'zero'; write the value in quotes"),
    "a tag that makes objects": ("a: !!python/object:os.system [x]", "the tag !!python/object:os.system"),
    "two documents": ("a: 1\n---\nb: 2", ":2 .*another document"),
    "a tab": ("a:\n\tb: 1", ":2 .*indent with spaces instead of tabs"),
    "a NUL": ("a: \0", "not valid YAML"),
}
JSON = {
    "100,000 brackets": ("[" * 100_000, "mine: cannot be read as JSON"),
    "cut short": ('{"a": [1,\n', "mine:2 cannot be read as JSON"),
    "5,000 digits": ("9" * 5000, "mine: cannot be read as JSON"),
}


@pytest.mark.parametrize(("parse", "case"), [*((parse_yaml, c) for c in YAML), *((parse_json, c) for c in JSON)])
def test_what_is_no_yaml_or_json_is_refused_with_its_line(parse, case):
    text, message = (YAML if parse is parse_yaml else JSON)[case]
    with pytest.raises(UserError, match=message):
        parse(text, "mine")


def test_yaml_is_plain_data_and_each_key_has_its_line():
    text = "a: &a {x: 1e-3, y: [no, 0x1F, 1_000, ~, 2001-12-14]}\n1: {<<: *a, x: '2'}\nz: {<<: [{q: 1}, *a], y: .inf}\n"
    data, lines = parse_yaml(text, "mine")
    y = ["no", 31, 1000, None, "2001-12-14"]
    assert data == {"a": {"x": 0.001, "y": y}, "1": {"y": y, "x": "2"}, "z": {"x": 0.001, "y": float("inf"), "q": 1}}
    assert (lines["1", "x"], lines["a", "y", 2]) == ("mine:2", "mine:1")
    assert data["1"]["y"] is not data["a"]["y"]  # a change of one is no change of the other


def test_files_that_cannot_be_read_are_refused(tmp_path):
    for name, content in {"big": b"x" * (1 << 21), "latin": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    for path, message in {
        tmp_path: "is not a regular file", "/dev/zero": "is not a regular file", tmp_path / "nothing": "No such file",
        tmp_path / "big": "larger than", tmp_path / "latin": f"{tmp_path}/latin:1 is not a text file in UTF-8",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_text(path)
    with pytest.raises(UserError, match="not a text file in UTF-8"):
        read_json(tmp_path / "latin")


def test_a_message_never_commands_the_terminal():
    said = str(UserError("found '\x1b[2J\x9b1m\u202egnp\r\x7f\ud800'\tmy.yaml", "next"))
    assert said == "found '\\x1b[2J\\x9b1m\\u202egnp\\x0d\\x7f\\ud800'\tmy.yaml\nnext"
    assert str(UserError(said)) == said  # so that messages may be made of messages
    assert printable("naïve 日本語 🙂") == "naïve 日本語 🙂"


def test_what_is_printed_of_strangers_texts_is_text():
    stream = io.StringIO()
    terminal = Terminal(file=stream, width=80)
    terminal.print("start \x1b[2J [/red] [bold]:smile: [x]")
    table = Table("name\x1b[1m", title="[/]")
    table.add_row("\x9b[/y]")
    terminal.print(table)
    terminal.print(Text("\x1b]52;c;cm0=\x07", "bold"))  # as the title of somebody's suite: sets a clipboard
    shown = stream.getvalue()
    assert shown.startswith("start \\x1b[2J [/red] [bold]:smile: [x]\n")
    assert "name\\x1b[1m" in shown
    assert "\\x9b[/y]" in shown
    assert not {"\x1b", "\x9b"} & set(shown)
    assert " \n" not in shown  # rich pads the cells of a table


def test_hashing_starts_no_thread_after_the_first_file(tmp_path, monkeypatch):
    """A thread that begins when memory is short would leave Thread.start waiting for ever."""
    files = [tmp_path / str(number) for number in range(20)]
    for file in files:
        file.write_text(file.name)
    first = contents(files[:1])
    monkeypatch.setattr(Thread, "start", lambda _: pytest.fail("a thread is started"))
    assert contents(files, settle=True)[:1] == first


@pytest.mark.process
def test_a_fork_of_a_process_that_has_hashed_hashes_with_threads_of_its_own(tmp_path):
    (tmp_path / "a").write_text("a")
    expected = contents([tmp_path / "a"])
    if not (child := os.fork()):
        signal.alarm(60)  # ends it
        is_equal = False
        try:
            is_equal = contents([tmp_path / "a"]) == expected
        finally:
            os._exit(0 if is_equal else 1)
    assert os.waitpid(child, 0)[1] == 0
