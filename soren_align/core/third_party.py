"""Maps and optimizers of other installed packages, by their entry points; docs/library.md has both
examples.

    [project.entry-points."soren_align.maps"]
    cubic = "cubic_muon:CUBIC"                # a soren_align.spectral.SpectralMap, for Soren's `map`
    [project.entry-points."soren_align.optimizers"]
    lion = "cubic_muon.recipe:LionSettings"   # a section: a soren_align.recipe.MatrixOptimizer

A package that cannot be used is left out, with a warning that names it: it must not stop recipes
that do not need it.
"""

import warnings
from collections.abc import Collection, Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

MAPS, OPTIMIZERS = "soren_align.maps", "soren_align.optimizers"


_all = cache(entry_points)  # reads the metadata of all installed packages: 30 ms


def objects(group: str, names: Collection[str], problem: Any) -> Iterator[Any]:
    """The objects of a group's entry points, in the order of their names.

    names: those of this package, which another package cannot take. problem: of an object and its
    entry point's name, what is wrong with it; "" if nothing is.
    """
    taken = set(names)
    # By name and value: the order of installation must not decide which of two packages gets a
    # name.
    for point in sorted(_all().select(group=group), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist else point.value
        try:
            loaded: Any = point.load()
            text = problem(loaded, point.name)
        except Exception as error:  # whatever another package's module raises when it is imported
            loaded, text = None, f"{type(error).__name__}: {error}"
        if not text and point.name in taken:
            text = "the name is taken"
        if text:
            warnings.warn(
                f"{package}: the entry point {point.name} of {group} is not used ({text})",
                stacklevel=2,
            )
            continue
        taken.add(point.name)
        yield loaded
