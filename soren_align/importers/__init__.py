"""Conversion of TRL's, the alignment handbook's, Axolotl's and LLaMA-Factory's YAML to recipes."""

from .importer import import_file

__all__ = ["import_file"]
