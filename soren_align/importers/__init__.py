"""Conversion of TRL's, the alignment handbook's, Axolotl's and LLaMA-Factory's YAML to recipes.

`engine` converts the keys by the tables of keys.toml, `datasets` those about data; `importer` reads
the file and writes the recipe and the table of keys. Keys that few use are not converted: the table
lists them with their values as "set these yourself".
"""

from .importer import import_file
