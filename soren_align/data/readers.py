"""Examples of each format in TRL's columns; or, as text, why they cannot be trained on. Pure functions."""

from typing import Any

from .turns import conversation_problem, from_dialogue, list_problem, pair_problem, text_problem, weight_problem

Example = dict[str, Any]


def with_system(example: Example, column: str) -> Example:
    """The example with the text of its column `system` as the first turn of another column."""
    turns, text = example.get(column), example.get("system")
    if not (isinstance(turns, list) and isinstance(text, str) and text):
        return example
    return {**example, column: [{"role": "system", "content": text}, *turns]}


def last_alone(turns: list[Example]) -> list[Example]:
    """The turns with weight 0 for every assistant's turn but the last."""
    earlier = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:-1]]
    return [*earlier, turns[-1]]


def plain_turns(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Valid turns without their null keys, role and content first."""
    first = ("role", "content")
    others = [{key: value for key, value in turn.items() if key not in first and value is not None} for turn in turns]
    return [
        {key: turn[key] for key in first} | dict(sorted(other.items()))
        for turn, other in zip(turns, others, strict=True)
    ]


def _chat(turns: Any, name: str) -> Example | str:
    return conversation_problem(turns, name) or {"messages": plain_turns(turns)}


def messages(example: Example) -> Example | str:
    """A conversation under `messages`."""
    return _chat(example.get("messages"), "messages")


def sharegpt(example: Example) -> Example | str:
    """ShareGPT's conversation."""
    return _chat(example.get("conversations"), "conversations")


def dialogue(example: Example) -> Example | str:
    """A dialogue as text."""
    turns = from_dialogue(example.get("text"), "text")
    return turns if isinstance(turns, str) else _chat(turns, "text")


def _instructed(example: Example) -> list[dict[str, str]] | str:
    """The turns of an Alpaca prompt; or, as text, why they are not valid."""
    texts = {column: example.get(column) or "" for column in ("system", "instruction", "input")}
    for column, text in texts.items():
        problem = text_problem(text, column)
        if problem and (column == "instruction" or text):
            return problem
    # As LLaMA-Factory joins them, which trains Alpaca's files with chat templates.
    request = "\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    system = [{"role": "system", "content": texts["system"]}] if texts["system"] else []
    return [*system, {"role": "user", "content": request}]


def alpaca(example: Example) -> Example | str:
    """Alpaca's instruction, input and output."""
    prompt = _instructed(example)
    if isinstance(prompt, str):
        return prompt
    output = example.get("output")
    return text_problem(output, "output") or {
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": output}],
    }


def alpaca_pair(example: Example) -> Example | str:
    """Alpaca's instruction and input with two answers."""
    prompt = _instructed(example)
    return prompt if isinstance(prompt, str) else joined_pair({**example, "prompt": prompt})


def completion(example: Example) -> Example | str:
    """A prompt and its completion, as turns."""
    for column in ("prompt", "completion"):
        if problem := list_problem(example.get(column), column, "{role, content}"):
            return problem
    problem = conversation_problem(example["prompt"] + example["completion"], "prompt + completion")
    problem = problem or weight_problem(example["completion"], "completion")
    return problem or {column: plain_turns(example[column]) for column in ("prompt", "completion")}


def _plain(example: Example, *columns: str) -> Example | str:
    problems = (text_problem(example.get(column), column) for column in columns)
    return next((p for p in problems if p), None) or {column: example[column] for column in columns}


def plain_text(example: Example) -> Example | str:
    """A text."""
    return _plain(example, "text")


def plain_completion(example: Example) -> Example | str:
    """A prompt and its completion, as texts."""
    return _plain(example, "prompt", "completion")


def plain_pair(example: Example) -> Example | str:
    """A prompt and two answers, as texts."""
    pair = _plain(example, "prompt", "chosen", "rejected")
    return pair if isinstance(pair, str) else pair_problem(pair["chosen"], pair["rejected"]) or pair


def _conversation_pair(chosen: Any, rejected: Any, prefix: str = "") -> Example | str:
    for turns, name in ((chosen, f"{prefix}chosen"), (rejected, f"{prefix}rejected")):
        if problem := conversation_problem(turns, name):
            return problem
        if weighted := next((i for i, turn in enumerate(turns) if "weight" in turn), None):
            return f"{name}[{weighted}] has a weight; of a pair the last turns are trained, and no others: leave it out"
    return pair_problem(chosen, rejected) or {"chosen": plain_turns(chosen), "rejected": plain_turns(rejected)}


def pair(example: Example) -> Example | str:
    """Two whole conversations."""
    return _conversation_pair(example.get("chosen"), example.get("rejected"))


def joined_pair(example: Example) -> Example | str:
    """A prompt and two answers, as turns or texts."""
    prompt = example.get("prompt")
    turns: Any = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    answers: list[Any] = [
        [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        for answer in (example.get("chosen"), example.get("rejected"))
    ]
    for part, name in zip([turns, *answers], ("prompt", "chosen", "rejected"), strict=True):
        if problem := list_problem(part, name, "{role, content}"):
            return problem
    return _conversation_pair(turns + answers[0], turns + answers[1], "prompt + ")


def dialogue_pair(example: Example) -> Example | str:
    """Two dialogues as text."""
    chosen, rejected = (from_dialogue(example.get(column), column) for column in ("chosen", "rejected"))
    if problem := next((part for part in (chosen, rejected) if isinstance(part, str)), None):
        return problem
    return _conversation_pair(chosen, rejected)


def sharegpt_pair(example: Example) -> Example | str:
    """ShareGPT's conversation with two last turns."""
    parts = []
    for column in ("conversations", "chosen", "rejected"):
        value = example.get(column)
        turns = [value] if isinstance(value, dict) else value
        if problem := list_problem(turns, column, "{from, value}"):
            return problem
        parts.append(turns)
    return _conversation_pair(parts[0] + parts[1], parts[0] + parts[2], "conversations + ")
