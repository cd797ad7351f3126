"""A map's record holds for its function."""

import pytest
from soren_align.spectral import MAPS, SOREN_MAPS
from soren_align.testing import check_map
from tests.support.command import imported

EVERY_MAP = pytest.mark.parametrize("spectral_map", MAPS.values(), ids=MAPS.keys())


@pytest.mark.process
def test_the_registry_needs_no_torch():
    assert not imported("import soren_align.spectral.maps", ["torch"])


def test_soren_chooses_among_its_maps_and_the_other_optimizers_have_one_each():
    assert {name for name, spectral_map in MAPS.items() if spectral_map.optimizer == "soren"} == set(SOREN_MAPS)
    assert {spectral_map.optimizer for spectral_map in MAPS.values()} >= {"soren", "muon", "htmuon"}


@EVERY_MAP
def test_the_map_is_what_its_record_states(spectral_map):
    check_map(spectral_map)


@EVERY_MAP
def test_each_variant_has_a_label_and_flops_that_do_not_depend_on_the_orientation(spectral_map):
    variants = list(spectral_map.variants())
    assert spectral_map.defaults in variants
    assert len({spectral_map.label.format(**settings) for settings in variants}) == len(variants)
    for settings in variants:
        assert spectral_map.num_flops(8, 24, **settings) == spectral_map.num_flops(24, 8, **settings)
