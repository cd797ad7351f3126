"""The columns and roles of another tool's dataset, as a recipe's `columns` and `roles`."""

from typing import Any

KNOWN_KEYS = {"role": ("role", "from"), "content": ("content", "value"), "weight": ("weight", "train")}
KNOWN_ROLES = {"user": ("user", "human"), "assistant": ("assistant", "gpt"), "system": ("system",)}
KNOWN_ROLES |= {"tool": ("tool", "observation", "function", "ipython"), "tool_call": ("tool_call", "function_call")}
_REASONING = ("reasoning_content", "reasoning", "thinking")
ALPACA_PROMPT = "instruction and input are the user's turn of the chat template; in the source, of Alpaca's own prompt"
OWN_PROMPT = "instruction and input are the user's turn of the chat template; in the source, of its own format"
PAIR = ("prompt", "chosen", "rejected")
_ALPACA = {"instruction": "instruction", "input": "input", "output": "output", "system": "system"}
FIELDS = ("field", "field_messages", "field_chosen", "field_rejected", "field_prompt", "message_field_role")
FIELDS += ("message_field_content", "message_property_mappings", "roles", "field_tools", "message_field_training")
FIELDS += ("field_thinking", "template_thinking_key")


def axolotl_names(entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str, bool]]]:
    """(a split's `columns` and `roles`, where they are needed; explanation and change of each key they come from)."""
    kind, mappings = entry.get("type"), _mappings(entry)
    keys = {
        "role": mappings.get("role") or entry.get("message_field_role") or "role",
        "content": mappings.get("content") or entry.get("message_field_content") or "content",
        "weight": entry.get("message_field_training") or "train",
    }
    columns: dict[str, Any] = {}
    if isinstance(kind, dict) and _is_of_pairs(kind):
        columns = {ours: kind.get(f"field_{ours}") or ours for ours in PAIR}
    elif isinstance(kind, dict):
        theirs = {
            ours: kind.get(f"field_{ours}") or (ours if ours in ("instruction", "output") else None) for ours in _ALPACA
        }
        columns = {ours: name for ours, name in theirs.items() if name}
    elif kind == "alpaca_chat.load_qa":
        columns = {"instruction": "question", "output": "answer"}
    elif kind == "completion" or entry.get("field"):
        columns = {"text": entry.get("field") or "text"}
    elif "field_chosen" in entry or "field_rejected" in entry:
        columns = {
            "chosen": entry.get("field_chosen") or "chosen",
            "rejected": entry.get("field_rejected") or "rejected",
        }
        if "field_prompt" in entry:
            columns["prompt"] = entry["field_prompt"]
        elif "field_messages" in entry:  # the turns before the two answers
            columns["conversations"] = entry["field_messages"]
    elif entry.get("field_messages") not in (None, "messages", "conversations"):
        columns = {"messages": entry["field_messages"]}
    if entry.get("field_tools") not in (None, "tools"):
        columns = {"messages": entry.get("field_messages") or "messages", **columns, "tools": entry["field_tools"]}
    names = split_names(columns, keys, _roles(entry.get("roles")))
    where = "the recipe's columns are recognised" if not names else "data.train." + " and data.train.".join(names)
    return names, _explained(entry, where)


def _explained(entry: dict[str, Any], where: str) -> dict[str, tuple[str, bool]]:
    """Explanation and change of each key about columns and roles. where: the recipe's keys for those that are read."""
    explained = {key: (where, False) for key in FIELDS if key in entry}
    mappings = _mappings(entry)
    if renamed := {key: name for key, name in mappings.items() if key not in ("role", "content") and key != name}:
        explained["message_property_mappings"] = (f"{renamed}: of these, only role and content are renamed", True)
    for key in ("field_thinking", "template_thinking_key"):
        if entry.get(key) not in (None, *_REASONING):
            explained[key] = (f"{entry[key]}: reasoning is read as {', '.join(_REASONING)}", True)
    unknown = (
        {role for role in entry["roles"] if role not in KNOWN_ROLES} if isinstance(entry.get("roles"), dict) else ()
    )
    if unknown:
        explained["roles"] = (f"{', '.join(sorted(map(str, unknown)))}: no role of a recipe", True)
    kind = entry.get("type")
    if "names" in entry:  # of LLaMA-Factory, which puts Alpaca's columns into a chat template too
        explained["type"] = (where, False)
    elif isinstance(kind, dict):
        parts = PAIR if _is_of_pairs(kind) else _ALPACA
        as_here = {f"field_{part}" for part in parts} | {f"{part}_format" for part in PAIR if _is_plain(kind, part)}
        unread = [str(key) for key, value in kind.items() if value and key not in as_here]
        text = where if _is_of_pairs(kind) else OWN_PROMPT
        not_read = f"; not read: {', '.join(unread)}" * bool(unread)
        explained["type"] = (text + not_read, bool(unread) or not _is_of_pairs(kind))
    elif str(kind).startswith("alpaca"):
        explained["type"] = (ALPACA_PROMPT, True)
    return explained


def _is_of_pairs(kind: dict[Any, Any]) -> bool:
    """Whether a `type` describes Axolotl's own pairs, which are plain texts, as `prompt` and two answers are here."""
    keys = {f"field_{part}" for part in PAIR} | {f"{part}_format" for part in PAIR}
    return not keys.isdisjoint(kind)


def _is_plain(kind: dict[Any, Any], part: str) -> bool:
    """Whether a format of a pair's part is the text of the column and nothing else."""
    return kind.get(f"{part}_format") in ("{" + part + "}", "{" + str(kind.get(f"field_{part}")) + "}")


def _mappings(entry: dict[str, Any]) -> dict[str, Any]:
    mappings = entry.get("message_property_mappings")
    return mappings if isinstance(mappings, dict) else {}


def split_names(columns: dict[str, Any], keys: dict[str, Any], roles: dict[str, str]) -> dict[str, Any]:
    """`columns` and `roles` of a recipe's split, as far as they are needed.

    columns: our column -> the dataset's. keys: role and content -> the dataset's keys. roles: the dataset's role ->
    ours.
    """
    columns = {ours: str(name) for ours, name in columns.items()}
    # In other columns than these, recognition would choose by the names that are there.
    if (
        all(ours == name for ours, name in columns.items())
        and "conversations" not in columns
        and "prompt" not in columns
    ):
        columns = {}
    columns |= {key: str(name) for key, name in keys.items() if name not in KNOWN_KEYS[key]}
    roles = {name: role for name, role in roles.items() if name not in KNOWN_ROLES[role]}
    return {key: value for key, value in {"columns": columns, "roles": roles}.items() if value}


def _roles(aliases: Any) -> dict[str, str]:
    """The dataset's role -> ours, from Axolotl's {ours: [theirs]}."""
    if not isinstance(aliases, dict):
        return {}
    lists = {
        role: names if isinstance(names, list) else [names] for role, names in aliases.items() if role in KNOWN_ROLES
    }
    return {str(name): role for role, names in lists.items() for name in names}
