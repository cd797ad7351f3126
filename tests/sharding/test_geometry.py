"""Every number of every matrix lies where the layout says, once, on whichever rank."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from soren_align.sharding import RankShard, flat_partitions, parameter_slices, replicas, row_blocks

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6).map(
    lambda shapes: {f"matrix {i}": shape for i, shape in enumerate(shapes)}
)
NUM_RANKS = st.integers(1, 7)


def matrices_of(shapes):
    """The numbers 0, 1, 2... over all matrices, so that each is recognised."""
    ends = torch.tensor([m * n for m, n in shapes.values()]).cumsum(0).tolist()
    return [torch.arange(end - m * n, end).view(m, n) for end, (m, n) in zip(ends, shapes.values(), strict=True)]


def assert_fragments_find_their_numbers(layout, shapes, memories):
    """memories[rank][tensor]: what a rank holds, as one row."""
    for matrix, whole in zip(layout.weights, matrices_of(shapes), strict=True):
        assert matrix.shape == whole.shape
        found = torch.full((whole.numel(),), -1)
        for rank, offset, start, numel in matrix.shards:
            held = memories[rank][matrix.tensor][start : start + numel]
            assert len(held) == numel > 0
            assert (found[offset : offset + numel] == -1).all()
            found[offset : offset + numel] = held
        assert torch.equal(found, whole.flatten())
        assert len({f.rank for f in matrix.shards}) == len(matrix.shards)


@given(SHAPES, NUM_RANKS, st.integers(1, 5))
@settings(deadline=None)
def test_flat_partitions_are_the_concatenation_cut_in_equal_parts(shapes, num_ranks, multiple):
    flat = torch.cat([matrix.flatten() for matrix in matrices_of(shapes)])
    flat = torch.nn.functional.pad(flat, (0, -len(flat) % (num_ranks * multiple)), value=-7)
    memories = [[part] for part in flat.chunk(num_ranks)]
    layout = flat_partitions(shapes, num_ranks, partition_numel=len(flat) // num_ranks)
    assert_fragments_find_their_numbers(layout, shapes, memories)


@given(SHAPES, NUM_RANKS)
@settings(deadline=None)
def test_parameter_slices_are_equal_parts_of_each_matrix_one_after_the_other(shapes, num_ranks):
    padded = [torch.nn.functional.pad(m.flatten(), (0, -m.numel() % num_ranks), value=-7) for m in matrices_of(shapes)]
    memories = [[torch.cat([m.chunk(num_ranks)[rank] for m in padded])] for rank in range(num_ranks)]
    assert_fragments_find_their_numbers(parameter_slices(shapes, num_ranks), shapes, memories)


@given(SHAPES, NUM_RANKS)
@settings(deadline=None)
def test_row_blocks_are_those_of_torch_chunk(shapes, num_ranks):
    memories = [[] for _ in range(num_ranks)]
    for matrix in matrices_of(shapes):
        blocks = [block.flatten() for block in matrix.chunk(num_ranks)]
        for rank, memory in enumerate(memories):
            memory.append(blocks[rank] if rank < len(blocks) else torch.empty(0))
    assert_fragments_find_their_numbers(row_blocks(shapes, num_ranks), shapes, memories)


def test_replicas_lie_whole_on_every_rank():
    (matrix,) = replicas({"a": (2, 3)}, 2).weights
    assert matrix.shards == (RankShard(0, 0, 0, 6), RankShard(1, 0, 0, 6))


def test_padding_between_parameters_belongs_to_no_matrix():
    first, second = flat_partitions({"a": (1, 3), "b": (2, 2)}, 2, starts=[0, 4], partition_numel=6).weights
    assert first.shards == (RankShard(0, 0, 0, 3),)
    assert second.shards == (RankShard(0, 0, 4, 2), RankShard(1, 2, 0, 2))


def test_partitions_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="b starts at 2, within the parameter before it"):
        flat_partitions({"a": (1, 3), "b": (2, 2)}, 2, starts=[0, 2])
    with pytest.raises(ValueError, match="2 partitions of 3 elements cannot hold 7"):
        flat_partitions({"a": (1, 3), "b": (2, 2)}, 2, partition_numel=3)
