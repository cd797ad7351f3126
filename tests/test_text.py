"""Tables and numbers that a person reads: the same in a terminal, Markdown and HTML, and texts that are no code."""

import io

import pytest
from soren_align.core.text import Table, Terminal, count, duration, join_words, mean_std, number, with_prefix


def printed(table, width=80, **options):
    terminal = Terminal(file=io.StringIO(), width=width)
    terminal.print(table.rich(**options))
    return terminal.file.getvalue()


TABLE = Table(["map", "time\nms"], [["sns", "12"], ["a|b", "3\n± 1"]], title="times", groups=frozenset({1}))


def test_a_table_is_the_same_in_a_terminal_and_in_markdown():
    assert printed(TABLE) == "\ntimes\n     time\nmap    ms\nsns    12\na|b     3\n      ± 1\n"
    markdown = "**times**\n\n| map | time<br>ms |\n|---|---:|\n| sns | 12 |\n| a\\|b | 3<br>± 1 |"
    assert TABLE.markdown() == markdown


def test_in_a_narrow_terminal_texts_wrap_and_numbers_do_not():
    table = Table(["model", "score", "note"], [["a/long/name", "12.5 ± 0.1", "x"]], align="lrl")
    lines = printed(table, width=26).splitlines()
    assert "12.5 ± 0.1" in lines[1]
    assert "".join(line.split(" ")[0] for line in lines[1:]) == "a/long/name"


@pytest.mark.parametrize("text", ["<script>x</script>", "[red]", "\x1b[2J", "`code` *bold*", "![p](http://x)"])
def test_texts_of_unknown_origin_are_texts(text):
    table = Table([text], [[text]])
    assert "<script" not in table.markdown()
    assert "\x1b" not in table.markdown() + printed(table)
    assert printed(table).splitlines()[1] == text.replace("\x1b", "\\x1b")
    assert not set(table.markdown()) & {"`", "*"} or "\\`code\\` \\*bold\\*" in table.markdown()
    assert "](" not in table.markdown().replace("\\](", "")


def test_numbers_have_one_form_each():
    assert [number(None), number(float("nan"), ".2f"), number(0.125, ".0%"), number(1234)] == ["-", "-", "12%", "1,234"]
    assert [mean_std(values, 2) for values in ([], [1.0], [1.0, 2.0])] == ["-", "1.00", "1.50 ± 0.71"]
    assert [count(1, "trial"), count(1000, "matrix", "matrices")] == ["1 trial", "1,000 matrices"]
    assert [join_words(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "", "a", "a and b", "a, b and c",
    ]  # fmt: skip
    assert [duration(value) for value in (None, 21.34, 270, 11_520)] == ["-", "21.3 s", "4.5 min", "3.2 h"]
    assert [with_prefix(None, "B"), with_prefix(6.114e9, "B")] == ["unknown", "6.11 GB"]
