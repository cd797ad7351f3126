"""Shapes of the matrices of Mistral-7B's 32 blocks."""

BLOCK = {**{"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)},
         **{"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}}  # fmt: skip
MISTRAL_7B = {f"layers.{i}.{name}": shape for i in range(32) for name, shape in BLOCK.items()}
