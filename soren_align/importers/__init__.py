"""Recipes of other tools, as recipes of ours: TRL's, the alignment handbook's and Axolotl's YAML."""

from .importer import import_file

__all__ = ["import_file"]
