"""The maps of this package are finite for every finite matrix, and check_map holds a map to what it states."""

import pytest
import torch
from soren_align.spectral import MAPS
from soren_align.spectral.maps import SpectralMap
from soren_align.spectral.matrices import all_finite, from_wide, to_wide
from soren_align.testing import check_map


def test_the_maps_of_this_package_are_finite():
    assert all(spectral_map.is_finite for spectral_map in MAPS.values())


def test_check_map_refuses_a_map_that_is_not_as_finite_as_it_states():
    def cubed(x, precision, max_norm):
        wide = to_wide(x, x.dtype)
        return from_wide((wide @ wide.mT @ wide).masked_fill(~all_finite(wide), torch.nan), x), 0

    cube = SpectralMap(
        name="cube", label="cube", source="here", target=lambda sigma: sigma**3, function=cubed, is_finite=True
    )
    with pytest.raises(AssertionError, match=r"a finite matrix of size 1e\+20 \(full rank\) has an output that is not"):
        check_map(cube)
