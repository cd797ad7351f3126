"""Shapes of the matrices in the blocks of Mistral-7B and Qwen2.5-3B."""

BLOCK = {**{"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)},
         **{"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}}  # fmt: skip
MISTRAL_7B = {f"layers.{i}.{name}": shape for i in range(32) for name, shape in BLOCK.items()}
_QWEN_BLOCK = {**{"q": (2048, 2048), "k": (256, 2048), "v": (256, 2048), "o": (2048, 2048)},
               **{"gate": (11008, 2048), "up": (11008, 2048), "down": (2048, 11008)}}  # fmt: skip
QWEN_3B = {f"layers.{i}.{name}": shape for i in range(36) for name, shape in _QWEN_BLOCK.items()}
