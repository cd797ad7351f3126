"""The measured matrices: those of a model's blocks, or a list of shapes.
Nothing here imports torch.
"""

import re
from dataclasses import dataclass

from soren_align.core.errors import UserError, did_you_mean

Shape = tuple[int, int]


@dataclass(frozen=True)
class Matrices:
    """Matrices of a spectral optimizer: `per_layer` counts each shape in one of `num_layers` equal
    layers.
    """

    name: str
    num_layers: int
    per_layer: dict[Shape, int]

    @property
    def layer_size(self) -> int:
        """Parameters in one layer."""
        return sum(count * m * n for (m, n), count in self.per_layer.items())

    @property
    def num_parameters(self) -> int:
        """Parameters in all layers."""
        return self.num_layers * self.layer_size


# Weights are [out, in]; source: each model's config.json. In the order q, k, v, o; gate, up; down.
MODELS = {
    "llama-60m": Matrices("llama-60m", 8, {(512, 512): 4, (1376, 512): 2, (512, 1376): 1}),
    "qwen2.5-3b": Matrices(
        "qwen2.5-3b", 36, {(2048, 2048): 2, (256, 2048): 2, (11008, 2048): 2, (2048, 11008): 1}
    ),
    "mistral-7b": Matrices(
        "mistral-7b", 32, {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}
    ),
}


def parse(text: str) -> Matrices:
    """Return the matrices of `text`: a model's name, or "MxN,MxN,...".

    Raises UserError for another text.
    """
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    per_layer: dict[Shape, int] = {}
    for part in text.lower().split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", part)
        if match is None:
            hint = did_you_mean(part.strip(), MODELS, f"write {' or '.join(MODELS)}")
            raise UserError(
                f"--shapes: found '{part.strip()}'{hint}, or shapes such as 512x1376,512x512"
            )
        shape = (int(match[1]), int(match[2]))
        per_layer[shape] = per_layer.get(shape, 0) + 1
    return Matrices(text.replace(" ", "").lower(), 1, per_layer)
