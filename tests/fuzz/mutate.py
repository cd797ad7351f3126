"""Mutations of values, trees, texts and bytes. All draw from the `random.Random` that they are handed."""

import random
from copy import deepcopy
from typing import Any

from tests.fuzz.yaml_like import Pairs, Raw, dump

# Words that lead somewhere else than the one who wrote the code thought of.
PATHS = [
    "~nosuchuser/x", "~", "/proc/foo", "/proc/self/environ", "/dev/zero", "/dev/null", "/dev/stdin", "/", ".", "..",
    "x" * 300, "x/" * 3000, "a/b\0c", "../../outside", "@BOX@/outside", "@BOX@/outside/victim.txt", "loop", "fifo",
    "dangling", "folder", "folder.json", "shipped:", "shipped:..", "shipped:/etc", "shipped:recipes/quickstart/base",
    "/etc/shadow", "file:///etc/passwd", "https://x.org/a.json", "//", "a//b/", "C:\\x", "-rf", "--help", "*", "@BOX@",
    "@BOX@/work/run", "run", "out.json", "bad.yaml", "bad.json", "../outside/../outside", "link", "\ud800.json",
]  # fmt: skip
TEXTS = [
    "", " ", "\n", "None", "null", "true", "yes", "0", "-1", "1e9", "nan", "\x1b[31mred\x1b[0m", "\x07\x08\x7f\x9b2J",
    "a\u202eb\u2066", "\ufeff", "\u0000", "é\u0301", "🦓" * 50, "\ud83e", "{{ x }}", "{% for %}", "%s%n", "{0}",
    "${HOME}", "[bold]x[/]", "[/]", "</details><script>", "a|b\nc", "y" * 5000, "soren", "sft", "dpo", "auto", "zero3",
    "fsdp2", "all", "none", "wandb", "steps", "cosine", "q_proj", "all-linear", "(a+)+$", "(.*)*x",
    "!function os.system",
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 7, 64, 2**31, 2**63, 2**64, -(2**70), 10**400, 0.0, -0.0, 0.1, 1e-320, 1e308, -1.5]
NUMBERS += [float("nan"), float("inf"), float("-inf"), True, False, None]
RAWS = [
    "!!int zero", "!!float x", "!!bool maybe", "!!null x", "!!binary x===", "!!timestamp 2001-99-99", "!!set {a, b}",
    "!!omap [a: 1]", "!!python/object:os.system x", "!mine [1, 2]", "!mine {a: 1}", "!!seq {a: 1}", "!!map [1]",
    "!!str 5", "!function os.system", "0x1F", "0o17", "0b11", "1_000", "+.inf", "2001-12-14t21:59:43.10-05:00",
    "2024-01-01", "9" * 5000, "1e" + "9" * 400, "&a [*a]", "&a {x: *a}", "*nowhere", "|\n  text", "> x", "'it''s'",
    '"\\ud800"', '"\\x00"', '"\\u202e"', "[" * 2000, "{a: " * 300, "[" * 60 + "]" * 60, "- - - -", "? a", ": :", "@x",
    "`x`", "%TAG", "---", "...", "<<", "\t", "[" + ", ".join(["1"] * 3000) + "]",
    "{" + ", ".join(f"k{i}: 1" for i in range(2000)) + "}", '"a', "{a: 1, a: 2}",
]  # fmt: skip
BOMB = "[&a [x,x,x,x,x,x,x,x,x]" + "".join(f", &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]" for i in range(8))
RAWS += [BOMB + "]"]
KEYS = [
    "1", "null", "2.5", "true", "[a, b]", "{a: b}", "? [x, y]\n", "~", '"\\x1b[31m"', '""', "<<", "!!int zero",
    "&k key", "*k", "extends", "__class__", "x" * 300, "2024-01-01", ".nan", "é", "-", "'a.b'", '"a\\nb"',
]  # fmt: skip


def value(rng: random.Random, like: Any = None) -> Any:
    """A value that may well be wrong; like: what stood there."""
    kind = rng.random()
    if isinstance(like, bool | int | float) and abs(like) < 1e18 and kind < 0.3:
        return rng.choice([like + 1, like * 2, -like, like / 3, str(like), [like], like * 10**12])
    if isinstance(like, str) and kind < 0.3:
        return rng.choice([text(rng, like), like.upper(), like + "x", [like], {"a": like}, like[: len(like) // 2]])
    pool = rng.choices([PATHS, TEXTS, NUMBERS, RAWS, None], (3, 3, 4, 2, 2))[0]
    if pool is not None:
        chosen = rng.choice(pool)
        return Raw(chosen) if pool is RAWS else chosen
    return rng.choice([
        [], [[]], [None], [1, "a", None], Pairs(), Pairs([("a", 1)]), Pairs([(1, 2)]), [Pairs([("path", "x")])],
        Pairs([(Raw(rng.choice(KEYS)), value(rng))]), [value(rng) for _ in range(rng.randrange(4))],
    ])  # fmt: skip


def spots(node: Any) -> list[tuple[list, int]]:
    """Every (container, index) of a tree of Pairs and lists."""
    found = []
    if isinstance(node, list):
        for i, item in enumerate(node):
            found.append((node, i))
            found += spots(item[1] if isinstance(node, Pairs) else item)
    return found


def tree(rng: random.Random, node: Any, times: int | None = None, make: Any = value) -> None:
    """Change a tree of Pairs and lists in place, once or a few times. make: (rng, what stood there) -> a value."""
    for _ in range(times or rng.choice((1, 1, 1, 2, 2, 3, 5))):
        places = spots(node)
        if not places:
            return
        where, i = rng.choice(places)
        here = where[i][1] if isinstance(where, Pairs) else where[i]
        match rng.choices(("value", "delete", "rename", "twice", "swap", "wrap", "add"), (9, 2, 1, 1, 2, 1, 2))[0]:
            case "value":
                _put(where, i, make(rng, here))
            case "delete":
                del where[i]
            case "rename" if isinstance(where, Pairs):
                key = where[i][0]
                new = rng.choice(
                    [Raw(rng.choice(KEYS)), text(rng, str(key)) or "x", str(key) + "s", str(key)[1:] or "y"]
                )
                where[i] = (new, here)
            case "twice":
                where.insert(i, where[i])
            case "swap":
                there, j = rng.choice(places)
                _put(where, i, deepcopy(there[j][1]) if isinstance(there, Pairs) and j < len(there) else value(rng))
            case "wrap":
                _put(where, i, rng.choice([[here], Pairs([("a", here)]), Pairs([(1, here)]), [[here], here]]))
            case "add":
                item = value(rng)
                key = rng.choice([Raw(rng.choice(KEYS)), "limit", "path", "seed"]) if isinstance(where, Pairs) else None
                where.insert(i, (key, item) if isinstance(where, Pairs) else item)


def _put(where: list, i: int, item: Any) -> None:
    if sum(1 for _ in spots(item)) > 400:
        return  # swapped into itself over and over
    where[i] = (where[i][0], item) if isinstance(where, Pairs) else item


def text(rng: random.Random, source: str) -> str:
    """A text, a few of its characters changed."""
    letters = list(source)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(letters) + 1)
        match rng.randrange(5):
            case 0:
                letters.insert(at, rng.choice(TEXTS))
            case 1:
                del letters[at : at + rng.randrange(1, 4)]
            case 2:
                letters[at:at] = letters[max(0, at - 8) : at]
            case 3:
                letters.insert(
                    at, chr(rng.choice([rng.randrange(32), rng.randrange(32, 127), rng.randrange(128, 0x2FFF)]))
                )
            case 4 if letters:
                letters[at % len(letters)] = rng.choice("{}[]:#&*!|>'\"%@`,?-~\n\t ")
    return "".join(letters)


def lines(rng: random.Random, source: str) -> str:
    """A text, a few of its lines changed."""
    rows = source.split("\n")
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(rows))
        match rng.randrange(6):
            case 0:
                del rows[at : at + rng.randrange(1, 5)]
            case 1:
                rows.insert(at, rows[rng.randrange(len(rows))] if rows else "")
            case 2:
                rows[at] = " " * rng.randrange(6) + rows[at].lstrip()
            case 3:
                rows[at] = text(rng, rows[at])
            case 4:
                key = rows[at].partition(":")[0]
                rows[at] = f"{key}: {rng.choice(RAWS)}"
            case 5:
                rows.insert(at, rng.choice(RAWS + KEYS))
        rows = rows or [""]
    return "\n".join(rows)


def content(rng: random.Random, source: bytes) -> bytes:
    """Bytes: cut short, flipped, with others between."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(source) + 1)
        match rng.randrange(7):
            case 0:
                source = source[:at]
            case 1:
                source = source[:at] + bytes([rng.randrange(256)]) + source[at + 1 :]
            case 2:
                source = (source[:at] + rng.choice([b"\xff\xfe", b"\xef\xbb\xbf", b"\0", b"\xc3", b"\xed\xa0\x80"])
                          + source[at:])  # fmt: skip
            case 3:
                source = source[:at] + source[max(0, at - 50) : at] * rng.randrange(1, 20) + source[at:]
            case 4:
                source = source.decode("utf-8", "replace").encode(
                    rng.choice(["utf-16", "utf-32", "cp1252", "cp037"]), "replace"
                )
            case 5:
                source = source.replace(b"\n", rng.choice([b"\r\n", b"\r", b"\n\n", b"\xe2\x80\xa8", b"\x0b"]))
            case 6:
                source = source[:at] + rng.randbytes(rng.randrange(1, 40)) + source[at:]
    return source[:200_000]


def as_yaml(rng: random.Random, node: Any) -> bytes:
    """A mutated tree's text, now and then mutated again as text or bytes."""
    written = dump(node)
    if rng.random() < 0.2:
        written = lines(rng, written)
    encoded = written.encode("utf-8", "surrogatepass")
    return content(rng, encoded) if rng.random() < 0.1 else encoded
