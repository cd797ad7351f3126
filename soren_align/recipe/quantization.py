"""The quantization of the frozen weights under an adapter: the recipe's, and the record in an adapter's folder.

An adapter belongs to the quantized weights that it was trained on. So its folder records them, and whatever loads the
adapter later (DPO, evaluation, merge) quantizes the base in the same way.
"""

import importlib.util
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from .. import shipped
from ..errors import UserError
from ..files import read_json
from .lora import is_adapter
from .references import is_local
from .sections import Quantize, Recipe

QUANTIZATION_RECORD = "base_quantization.json"
"""The file in the folder of an adapter that was trained on quantized weights."""
Dtype = Literal["float32", "bfloat16", "float16"]


class Quantization(BaseModel):
    """How frozen weights are quantized."""

    model_config = ConfigDict(strict=True, frozen=True)

    quantize: Quantize
    """`4bit`: NF4 with double quantization; `8bit`: LLM.int8; both by bitsandbytes."""
    dtype: Dtype
    """Of the weights before they are quantized, and of those that are not: embeddings, head, norms, biases."""
    compute_dtype: Dtype
    """Of the matrix products with 4-bit weights. LLM.int8 has its own: int8, of activations in float16."""


def quantization(recipe: Recipe) -> Quantization | None:
    """The quantization of the weights that a run loads; None if it loads them as they are. recipe: resolved."""
    if recipe.model.quantize is None:
        return None
    return Quantization(quantize=recipe.model.quantize, dtype=recipe.model.dtype, compute_dtype=compute_dtype(recipe))


def inherit_quantization(recipe: Recipe) -> Recipe:
    """The recipe with the quantization that its starting adapter was trained on written out."""
    recorded = recorded_quantization(recipe.model.name_or_path)
    if recorded is None:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"quantize": recorded.quantize})})


def compute_dtype(recipe: Recipe) -> Dtype:
    """The dtype of the matrix products of the passes."""
    if recipe.trainer.get("fp16"):
        return "float16"
    return "float32" if recipe.trainer.get("bf16") is False else "bfloat16"  # null: TRL takes bfloat16


def recorded_quantization(adapter: str | Path) -> Quantization | None:
    """The quantization that an adapter was trained on; None if its folder records none.

    Raises UserError for a record of another form.
    """
    file = shipped.resolve(str(adapter)) / QUANTIZATION_RECORD
    if not file.is_file():
        return None
    try:
        return Quantization.model_validate(read_json(file))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"{file}: {where or 'it'}: {first['msg'][0].lower()}{first['msg'][1:]}") from None


def quantization_problems(model: str, section: dict[str, Any], parallel: Any) -> list[tuple[str, str]]:
    """(key of `model`, message) of each conflict of `model.quantize`.

    model: folder or hub name. section: the raw `model`; parallel: `run.parallel`.
    """
    quantize, exists = section.get("quantize"), not is_local(model) or shipped.resolve(model).is_dir()
    try:
        recorded = recorded_quantization(model)
    except UserError as error:
        return [("name_or_path", str(error))]
    if quantize not in get_args(Quantize) and recorded is None:
        return []
    problems = []
    if exists and not is_adapter(model) and not isinstance(section.get("lora"), dict):
        message = "quantized weights cannot be trained; add `lora: {r: 16}` for an adapter on them, or leave it out"
        problems.append(("quantize", message))
    if recorded and quantize and quantize != recorded.quantize:
        message = f"found {quantize!r}, but {model} was trained on {recorded.quantize} weights; leave it out"
        problems.append(("quantize", message))
    if (name := str(parallel or "ddp")) != "ddp":
        message = f"a quantized base is trained under ddp only; run.parallel is {name}"
        problems.append(("quantize" if quantize else "name_or_path", message))
    return problems


def refuse_unloadable(adapter: str | Path) -> None:
    """Raise UserError if an adapter was trained on quantized weights and bitsandbytes is missing. Imports no torch."""
    if (recorded := recorded_quantization(adapter)) is not None:
        refuse_unquantizable(recorded.quantize, str(adapter))


def refuse_unquantizable(quantize: str | None, place: str = "model.quantize") -> None:
    """Raise UserError if weights are to be quantized and bitsandbytes is missing.

    Called before weights are loaded: a machine without bitsandbytes can import, check and plan such a recipe.
    """
    if quantize and importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"{place}: needs bitsandbytes, which is not installed: pip install 'soren-align[quantize]'")
