"""Sizes and places of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_partrain.mesh import AXES, ParallelMesh, ParallelSizes
from tests.test_numerics import in_group


def test_auto_takes_what_is_left() -> None:
    assert ParallelSizes.resolve(8) == ParallelSizes(dp_shard=8)
    assert ParallelSizes.resolve(8, data_parallel_replicate_size=2) == ParallelSizes(dp_replicate=2, dp_shard=4)
    assert ParallelSizes.resolve(1).world_size == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 3), "data_parallel_size=3 needs 3 processes, but devices x num_nodes gives 4"),
        ((4, "auto", 3), "Sizes that do: 1, 2, 4"),
        ((4, 0), "at least 1"),
        ((4, "all"), "'auto' or a whole number"),
        ((4, "auto", 0), "at least 1"),
    ],
)
def test_sizes_that_do_not_fit(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelSizes.resolve(*arguments)


def test_sizes_are_whole_and_frozen() -> None:
    with pytest.raises(ValueError, match="'tp' must be a whole number"):
        ParallelSizes(tp=0)
    with pytest.raises(ValueError, match="whole number"):
        ParallelSizes(pp=True)
    with pytest.raises(AttributeError):
        ParallelSizes().tp = 2  # type: ignore[misc]


def test_places_of_eight_ranks() -> None:
    """Tensor-parallel peers are neighbours, pipeline stages furthest apart; both names of an axis mean one group."""

    def place(rank: int) -> Any:
        mesh = ParallelMesh.create(ParallelSizes(pp=2, dp_shard=2, tp=2), "cpu")
        names = mesh.device_mesh["data_parallel"], mesh.device_mesh["tensor_parallel"]
        lightning = [each.get_local_rank() for each in names]
        import torch.distributed as dist

        members = dist.get_process_group_ranks(mesh.data_parallel_group)
        return [mesh.rank(axis) for axis in AXES], mesh.data_parallel_rank, lightning, members, mesh.coordinates()

    for rank, (ranks, data_rank, lightning, members, words) in enumerate(in_group(8, place)):
        pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
        assert ranks == [pp, 0, dp, 0, tp]
        assert data_rank == dp
        assert lightning == [dp, tp]
        assert members == [4 * pp + tp, 4 * pp + 2 + tp]
        assert words == f"pp {pp}, dp_shard {dp}, tp {tp}"


def test_replicas_come_before_shards() -> None:
    def place(rank: int) -> Any:
        mesh = ParallelMesh.create(ParallelSizes(dp_replicate=2, dp_shard=2), "cpu")
        return mesh.rank("dp_replicate"), mesh.rank("dp_shard"), mesh.data_parallel_rank, mesh.shard_mesh.shape

    assert in_group(4, place) == [(r // 2, r % 2, r, (2, 2)) for r in range(4)]


def test_wrong_world() -> None:
    def create(rank: int) -> str:
        with pytest.raises(ValueError, match="needs 4 processes, but 2 are running"):
            ParallelMesh.create(ParallelSizes(dp_shard=4), "cpu")
        return "refused"

    assert in_group(2, create) == ["refused"] * 2
