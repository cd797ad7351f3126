"""Axolotl's numbers of evaluations and of checkpoints per epoch, as fractions of all steps, which is how Axolotl reads
them too."""

from typing import Any

from .key_tables import Note, number

STEPS = {"evals_per_epoch": "eval", "saves_per_epoch": "save"}
_DIGITS = 10**6


def convert(key: str, name: str, value: Any, flat: dict[str, Any], recipe: dict[str, dict[str, Any]]) -> Note | None:
    """Write `eval_steps` or `save_steps` into the recipe and return the note on the key; None for any other key.

    None also for one per epoch, which has a word, and for evaluations without held-out examples.
    """
    kind, per_epoch = STEPS.get(name), number(value)
    if kind is None or (kind == "eval" and "eval" not in recipe["data"]):
        return None
    epochs = number(next((flat[k] for k in ("num_epochs", "num_train_epochs") if flat.get(k) is not None), 1))
    if value in (None, False, 0):
        return Note(key, "dropped", "off in the source too")
    is_number = all(isinstance(n, int | float) and not isinstance(n, bool) for n in (per_epoch, epochs))
    if per_epoch == 1 or not is_number or not 1 < per_epoch * epochs <= _DIGITS:
        return None
    if flat.get(f"{kind}_steps") is not None:
        return Note(key, "dropped", f"{kind}_steps is set")
    # Rounded down: transformers rounds the product with the number of steps up, and 0.166667 of 600 would be 101.
    fraction = int(_DIGITS / (per_epoch * epochs)) / _DIGITS
    recipe["trainer"] |= {f"{kind}_strategy": "steps", f"{kind}_steps": fraction}
    return Note(key, "renamed", f"trainer.{kind}_steps: {fraction:g} of all steps")
