"""A YAML document of a known form: read, change by `key=value`, validate, dump, and its JSON
Schema.

The form is a pydantic class whose sections derive from `Section`. All problems are collected, and
reported together, each with its file, line, key, finding and remedy:

    document = parse(read_text(path), str(path), "a suite is a mapping (title, tasks, ...)")
    for setting in document.settings(["tasks.0.metric=acc"]):  # texts as after --set
        document.apply(setting)
    suite = document.validate(Suite)    # None if it is none; the problems are noted
    document.report(("title",), "found '?'; write words")
    document.refuse_problems()          # raises UserError with all of them, in the order of lines

`from_pydantic` is the one translation of pydantic's errors into sentences, for any class, also of
JSON.
"""

import functools
import io
import json
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Tag, ValidationError
from ruamel.yaml import YAML

from .errors import UserError, closest, did_you_mean
from .files import local_path, write
from .shipped import MODELINE
from .text import dotted, join_words
from .yaml import InvalidYamlError, Key, parse_yaml

MAX_PARTS = 10
"""Parts of a key in --set; no section is nested deeper."""
MAX_MEANT = 3
"""Keys of other sections that a message names for an unknown one."""


class Problem(NamedTuple):
    """The key, and the finding with its remedy."""

    key: Key
    message: str
    kind: str = UserError.kind
    """UserError.kind of the class that the problem alone would be raised as."""


class Section(BaseModel):
    """A section of a document: unknown keys are errors, and no value is converted to another
    type.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True
    )

    main_keys: ClassVar[dict[type, str]] = {}
    """The key that a person means who writes a value in the section's place, by the type of the
    value."""
    other_names: ClassVar[dict[str, str]] = {}
    """Other tools' names of keys -> the section's."""
    hints: ClassVar[dict[str, str]] = {}
    """The remedy for a wrong value of a key, where the choices alone are none; the message on a key
    of elsewhere."""

    @classmethod
    def key_elsewhere(cls, name: str) -> list[str]:
        """The keys, dotted, that have this name in any section of the document, which `cls` is the
        form of.
        """
        return _keys_by_name(cls).get(name, [])

    @classmethod
    def meant_by(cls, value: Any) -> dict[str, Any] | None:
        """The section that a person means who writes `value` in its place; None if it is
        unclear.
        """
        main = cls.main_keys.get(int if value is True else type(value))
        if main is None:
            return None
        if value is True:
            if cls.model_fields[main].is_required():
                return None
            value = cls.model_fields[main].default
        for key in reversed(main.split(".")):
            value = {key: value}
        return value


@functools.cache
def _keys_by_name(section: type[Section]) -> dict[str, list[str]]:
    """The keys in a section and in those inside it, dotted, by their own name, also other
    tools'.
    """
    keys = {name: [name] for name in section.model_fields}
    keys |= {other: [name] for other, name in section.other_names.items()}
    for key, field_info in section.model_fields.items():
        sections = [*members(field_info.annotation).values()] or [section_in(field_info.annotation)]
        for part in (section for section in sections if section is not None):
            for name, places in _keys_by_name(part).items():
                inside = [dotted((key, place)) for place in places]
                keys[name] = [*dict.fromkeys([*keys.get(name, []), *inside])]
    return keys


Form = TypeVar("Form", bound=Section)


class Setting(NamedTuple):
    """One `--set`, or an option that stands for a key: its text as it was written, key and
    value.
    """

    text: str
    key: tuple[str, ...]
    value: Any


@dataclass
class Document:
    """The content of a YAML file, the place of each key, and the problems that were noted until
    now.
    """

    content: dict[str, Any]
    lines: dict[Key, str]
    """('optimizer', 'lr') -> 'my.yaml:14', '--set optimizer.lr=1' or '--model'."""
    problems: list[Problem] = field(default_factory=list)
    bad_settings: list[str] = field(default_factory=list)
    """Problems of texts that are no settings."""

    def settings(self, texts: Iterable[str]) -> list[Setting]:
        """'section.key=value' texts, whose values are YAML, as settings; problems of texts that are
        none are noted.
        """
        settings = []
        for text in texts:
            name, equals, value = text.partition("=")
            key = tuple(part.strip() for part in name.split("."))
            if not equals or not all(key) or len(key) > MAX_PARTS:
                self.bad_settings.append(
                    f"--set {text}: has no key and value; write --set section.key=value"
                )
                continue
            try:
                settings.append(Setting(f"--set {text}", key, parse_yaml(value, "")[0]))
                # YAML would make a blank of it: another folder, for example.
                if isinstance(settings[-1].value, str) and "\n" in value.strip():
                    self.bad_settings.append(
                        f"--set {name}: the text has a line break; write it in one line"
                    )
            except InvalidYamlError as error:
                self.bad_settings.append(
                    f"--set {text}: the value is not valid YAML: {error.reason}"
                )
        return settings

    def apply(self, setting: Setting, with_dots: Container[str] = ()) -> None:
        """Write one setting into the content, with the sections around it.

        with_dots: names of sections that have keys with dots, `set: {optimizer.lr: 1}`.
        """
        node: Any = self.content
        key: list[Any] = []
        names = list(setting.key)
        while True:
            part: Any = names[0]
            # A key may contain dots itself ("optimizer.lr" in a study): the longest name that the
            # section has is taken.
            if isinstance(node, list):  # data.train.0.limit: the first of a list
                if not (part.isdecimal() and len(part) < 9 and int(part) < len(node)):
                    wanted = (
                        f"{dotted(key)} is a list of length {len(node)}; write {dotted(key)}.0 for"
                        " its first value"
                    )
                    self.bad_settings.append(f"{setting.text}: {wanted}")
                    return
                part, names = int(part), names[1:]
            else:
                whole = len(names) if key and key[-1] in with_dots else 1
                size = next(
                    (n for n in range(len(names), 0, -1) if ".".join(names[:n]) in node), whole
                )
                part, names = ".".join(names[:size]), names[size:]
            key.append(part)
            if not names:
                node[part] = setting.value
                break
            if isinstance(node, dict) and node.get(part) is None:
                node[part] = {}
            node = node[part]
            if not isinstance(node, dict | list):
                problem = (
                    f"'{dotted(key)}' is not a section, so it has no keys; set '{dotted(key)}'"
                    " itself"
                )
                self.bad_settings.append(f"{setting.text}: {problem}")
                return
        # A section that --set has made has no line in the file: problems inside it name the
        # setting.
        for depth in range(1, len(key)):
            self.lines.setdefault(tuple(key[:depth]), setting.text)
        self.lines[tuple(key)] = setting.text

    def report(self, key: Key, message: str) -> None:
        """Note a problem of a key."""
        self.problems.append(Problem(key, message))

    def validate(self, form: type[Form], **others: Any) -> Form | None:
        """The content as a `form`; None if it is none, whose problems are noted.
        others: keys beside the content.
        """
        try:
            return form.model_validate(self.content | others)
        except ValidationError as error:
            self.problems += from_pydantic(error, form)
        return None

    def refuse_problems(self, *remedy: str) -> None:
        """Raise UserError with all problems in the order of lines, if there are any, and `remedy`
        after them.
        """
        if self.problems or self.bad_settings:
            raise UserError(*sentences(self.problems, self.lines), *self.bad_settings, *remedy)

    def validated(self, form: type[Form], *remedy: str, **others: Any) -> Form:
        """Return the content as a `form`; raise UserError with all problems if it is none."""
        valid = self.validate(form, **others)
        self.refuse_problems(*remedy)
        assert valid is not None
        return valid


def parse(text: str, name: str, remedy: str) -> Document:
    """The document of a YAML text.
    Raises UserError for invalid YAML, and with `remedy` for anything but a mapping.
    """
    content, lines = parse_yaml(text, name)
    if not isinstance(content, dict):
        raise UserError(f"{name}:1 {remedy}")
    return Document(content, lines)


def find(name_or_path: str, known: dict[str, Path], kind: str) -> Path:
    """An existing .yaml file, else the shipped file of that name.
    Raises UserError if it is neither.

    known: the shipped files by name. kind: of file, for messages.
    """
    path = local_path(name_or_path)
    # A file comes before a shipped name: who has a copy in the working directory means the copy.
    if path.is_file():
        # Errors would quote any other file, such as /etc/shadow.
        if path.suffix not in (".yaml", ".yml"):
            raise UserError(f"{name_or_path}: is not a .yaml file; name the .yaml file of a {kind}")
        return path
    if name_or_path in known:
        return known[name_or_path]
    beside = [str(file) for file in path.parent.glob("*.yaml")]
    remedy = "`soren-align recipes` lists the shipped recipes and studies"
    hint = did_you_mean(name_or_path, [*beside, *known], remedy)
    raise UserError(f"{name_or_path}: no such file, nor a shipped {kind}{hint}")


def dump(content: Any) -> str:
    """YAML text of plain data, or of ruamel's commented data."""
    stream = io.StringIO()
    yaml = YAML()
    yaml.width = 100
    yaml.dump(content, stream)
    return stream.getvalue()


def value_at(content: Any, key: Key) -> Any:
    """The value at a key of plain data, of any type; None if it is missing."""
    for part in key:
        content = content.get(part) if isinstance(content, dict) else None
    return content


def place(key: Key, lines: dict[Key, str]) -> str:
    """Return 'file:line' of the key, or of the nearest section around it."""
    while key not in lines:
        key = key[:-1]
    return lines[key]


def sentences(problems: Iterable[Problem], lines: dict[Key, str]) -> list[str]:
    """Return the problems with their places and keys, in the order of lines; those of options come
    last.
    """
    placed = []
    for key, message, _ in problems:
        where = place(key, lines)
        number = "" if where.startswith("--") else where.rpartition(":")[2]
        if where.startswith("--") and not where.startswith("--set") and key in lines:
            sentence = f"{where}: {message}"  # the option names the key
        else:
            sentence = f"{where} {dotted(key)}: {message}" if key else f"{where} {message}"
        placed.append((int(number) if number.isdecimal() else 10**9, sentence))
    return [sentence for _, sentence in sorted(placed, key=lambda row: row[0])]


SCHEMA_COMMENT = "Written by `soren-align schema`."
SCHEMA_VERSION = "https://json-schema.org/draft/2020-12/schema"


def schema_text(schema: dict[str, Any]) -> str:
    """The text of a schema's file, from pydantic's schema of a form."""
    return (
        json.dumps({"$schema": SCHEMA_VERSION, "$comment": SCHEMA_COMMENT} | schema, indent=2)
        + "\n"
    )


def write_schema(file: Path, text: str) -> bool:
    """Write a schema's text, over an earlier one of ours.
    Returns False, writing nothing, if the file is another's.
    """
    # By a comment in the schema itself: a user's file of this name is never overwritten.
    if file.is_symlink() or (
        file.exists() and SCHEMA_COMMENT not in file.read_text("utf-8", errors="replace")
    ):
        return False
    write(file, text)
    return True


def with_modeline(text: str, reference: str) -> str:
    """Return a file's text whose first line names the schema `reference`, in the place of an
    earlier such line.
    """
    if text.startswith(MODELINE):
        text = text.partition("\n")[2]
    return f"{MODELINE}{reference}\n{text}"


def members(annotation: Any) -> dict[str, Any]:
    """The sections of a tagged union (`Annotated[A, Tag("a")] | ...`) by tag; empty for any other
    annotation.

    A member `list[A]` counts as A; the union may stand beside None.
    """
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    parts = get_args(annotation)
    if len(parts) == 2 and parts[1] is type(None):
        return members(parts[0]) if get_origin(parts[0]) is Annotated else {}
    sections = {}
    for part in parts:
        tag = next((m.tag for m in getattr(part, "__metadata__", ()) if isinstance(m, Tag)), None)
        if tag is not None and (section := section_in(part)):  # a member may be a text
            sections[tag] = section
    return sections


def section_in(annotation: Any) -> type[Section] | None:
    """The first section within an annotation such as `Lora | None` or `list[TrainSplit]`; None if
    there is none.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((section for part in get_args(annotation) if (section := section_in(part))), None)


def tag_of(value: Any, union: Mapping[str, type[Section]]) -> str:
    """The tag of the member that `value` (a dict or a section) is, by its `name`.

    The first member's for a missing or unknown name: its check then reports the name, and all other
    mistakes with it.
    """
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return name if isinstance(name, str) and name in union else next(iter(union))


_REMEDIES = {
    "int_type": "write a whole number",
    "float_type": "write a number",
    "string_type": "write a text",
    "bool_type": "write true or false",
    "list_type": "write a list",
    "greater_than": "write a number above {gt:g}",
    "greater_than_equal": "write a number of at least {ge:g}",
    "less_than": "write a number below {lt:g}",
    "less_than_equal": "write a number of at most {le:g}",
    "finite_number": "write a finite number",
    "string_too_short": "write a text that is not empty",
    "too_long": "write a list of {max_length} values",
}
"""The remedy by the type of pydantic's error."""


def from_pydantic(error: ValidationError, form: type[Section] = Section) -> list[Problem]:
    """The key and the message of each mistake.

    form: the class that was validated; with it messages name the keys, sections and members of
    unions that are meant.
    """
    problems = []
    mistakes: list[Any] = error.errors(include_url=False)
    # Locate each mistake by a walk down the form: only the section that the key stands in knows its
    # choices, its similar keys and the members of its union.
    for one in mistakes:
        if one["type"] == "default_factory_not_called":  # of a default that is made of another key
            continue
        # The key and its section: in pydantic's location the tag of a union follows its key.
        key: list[str | int] = []
        section = parent = form
        union: dict[str, type[Section]] = {}
        annotation, tag, choices = None, "", union
        for i, part in enumerate(one["loc"]):
            if part in choices:
                tag, union = str(part), choices
                section, choices = choices[tag], {}
            elif part != "[key]":  # pydantic's mark of a key that is none of the literal ones
                key.append(part)
                parent = section
                annotation = (
                    section.model_fields[part].annotation if part in section.model_fields else None
                )
                choices = members(annotation)
                inner = section_in(annotation)
                if inner and not choices and i + 1 < len(one["loc"]):
                    section, union, tag = inner, {}, ""
        problems.append(_Mistake(one, tuple(key), parent, annotation, union, tag, form))
    # One mistake, one message: without "is required" for a key that is there misspelt, and without
    # "unknown key" where the name that decides about the keys is wrong itself.
    misspelt = {(*p.key[:-1], p.similar()) for p in problems if p.kind == "extra_forbidden"}
    unnamed = {p.key[:-1] for p in problems if p.union and p.key[-1:] == ("name",)}
    return [
        Problem(p.key, p.message())
        for p in problems
        if not (p.kind == "missing" and p.key in misspelt)
        and not (p.kind == "extra_forbidden" and p.owners() and p.key[:-1] in unnamed)
    ]


@dataclass(frozen=True)
class _Mistake:
    """One of pydantic's errors, with the section that its key stands in."""

    error: Any
    key: Key
    """The place of the value, without the tags of unions."""
    section: type[Section]
    """The section that the key stands in."""
    annotation: Any
    """The key's; None for an unknown key, and for an index of a list."""
    union: dict[str, type[Section]]
    """The members of the union that this section belongs to, by tag; empty for other sections."""
    tag: str
    """The section's own tag in `union`."""
    form: type[Section]
    """The whole document's."""

    @property
    def kind(self) -> str:
        return self.error["type"]

    def owners(self) -> list[str]:
        """The members of the union that have the key."""
        return [tag for tag, member in self.union.items() if self.key[-1] in member.model_fields]

    def similar(self) -> str | None:
        """The known key that an unknown one is close to."""
        words = {key: key for key in self.section.model_fields} | self.section.other_names
        word = closest(self.key[-1], words)
        return words[word] if word else None

    def message(self) -> str:
        """Return the finding and the remedy, as one sentence."""
        key, value = self.key, self.error.get("input")
        hint = self.section.hints.get(str(key[-1])) if key else None
        match self.kind:
            case "extra_forbidden" if hint:
                return hint
            case "extra_forbidden" if owners := self.owners():
                # The tag is the value of `name`, or describes a section without one, such as "a
                # split".
                member = "" if " " in self.tag else "name: "
                return (
                    f"unknown key for {self.tag}; remove this key, or write"
                    f" {member}{join_words(owners, 'or')}"
                )
            case "extra_forbidden":
                # A key of another section under its own name is more likely than a misspelt one of
                # this section.
                meant, similar = self.form.key_elsewhere(str(key[-1])), self.similar()
                if key[-1] in self.section.other_names or not 0 < len(meant) <= MAX_MEANT:
                    meant = [similar] if similar else []
                if meant:
                    return f"unknown key; did you mean {join_words([*map(repr, meant)], 'or')}?"
                return (
                    f"unknown key; write one of these keys: {', '.join(self.section.model_fields)}"
                )
            case "missing":
                return "is required; add this key"
            case "value_error":
                return str(self.error["ctx"]["error"])
            case "literal_error":
                choices = (
                    self.error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
                )
                if key[-1] == "name" and self.union:
                    choices = list(self.union)
                return (
                    f"found {value!r}; write "
                    f"{join_words(choices, 'or')}{hint or did_you_mean(value, choices)}"
                )
            case "model_type" if hint and isinstance(value, list):
                return f"found a list; {hint}"
            case "model_type" | "dict_type":
                is_section = key and self.section.model_fields  # and no JSON's object
                return (
                    f"found {value!r}; "
                    f"{self._section_remedy(value) if is_section else 'write a mapping'}"
                )
            case "too_short":
                least = self.error["ctx"]["min_length"]
                remedy = (
                    f"write a list of {'at least one value' if least == 1 else f'{least} values'}"
                )
            case kind if kind in _REMEDIES:
                remedy = _REMEDIES[kind].format(**self.error.get("ctx", {}))
            case _:
                remedy = self.error["msg"][:1].lower() + self.error["msg"][1:]
        nothing = " (for no value, write null)" if value == "None" else ""
        return f"found {value!r}; {remedy}{nothing}"

    def _section_remedy(self, value: Any) -> str:
        """The section with the value at its main key, as it is written in a document."""
        last = self.key[-1]
        if value is False and type(None) in get_args(self.annotation):
            return f"remove this key, or write {last}: null"
        sections = members(self.annotation).values() or [
            section_in(self.annotation) or self.section
        ]
        content = next((meant for section in sections if (meant := section.meant_by(value))), None)
        if content is None:
            return f"write a section: indented keys below this key, or {dotted(self.key)}.KEY=VALUE"
        # In one line of YAML, without the outer braces of a key: `train: {path: chat.jsonl}`.
        yaml, stream = YAML(typ="safe", pure=True), io.StringIO()
        yaml.default_flow_style, yaml.width = True, 1000
        yaml.dump(content if isinstance(last, int) else {last: content}, stream)
        text = stream.getvalue().strip()
        return f"write {text if isinstance(last, int) else text[1:-1]}"
