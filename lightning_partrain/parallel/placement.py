"""Between whole tensors and the parts that ranks hold.

A parameter is cut over the tensor-parallel ranks first, each of which then cuts its part by rows over the data-parallel shards,
as ``fully_shard`` does after a tensor-parallel plan. Axes of a mesh stand in the other order: replicas, shards, tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_partrain.numerics import local_tensor
from lightning_partrain.parallel.hollow import hollow


@dataclass(frozen=True)
class Fused:
    """Several matrices in one parameter, side by side along ``dim``, each of which is cut over the ``ranks`` for itself.

    The cut parameter holds the first part of each matrix, then the second of each, and so on: as a whole it is a permutation of the
    model's own, in which checkpoints are written.
    """

    dim: int
    sizes: tuple[int, ...]
    ranks: int

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(begin in the ranks' order, begin in the model's order, length) of each rank's part of each matrix."""
        place = 0
        for rank in range(self.ranks):
            for number, size in enumerate(self.sizes):
                length = size // self.ranks
                yield place, sum(self.sizes[:number]) + rank * length, length
                place += length

    def _order(self) -> Tensor:
        return torch.cat([torch.arange(start, start + length) for _, start, length in self.blocks()])

    def by_rank(self, whole: Tensor) -> Tensor:
        """From the model's order."""
        return whole.index_select(self.dim, self._order().to(whole.device))

    def by_matrix(self, whole: Tensor) -> Tensor:
        """To the model's order."""
        return whole.index_select(self.dim, self._order().argsort().to(whole.device))


def _cuts(like: DTensor) -> Iterator[tuple[int, int, int]]:
    """(mesh axis, dimension, its size before) in the order in which the whole tensor is cut."""
    shape = list(like.shape)
    for axis in reversed(range(like.device_mesh.ndim)):
        placement = like.placements[axis]
        if placement.is_replicate():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        size, ranks = shape[dim], like.device_mesh.size(axis)
        yield axis, dim, size
        shape[dim] = len(range(size)[_span(size, ranks, like.device_mesh.get_local_rank(axis))])


def _span(size: int, ranks: int, rank: int) -> slice:
    """The part of ``rank``: ceil(size / ranks) for each, as far as it goes."""
    chunk = -(-size // ranks)
    return slice(min(rank * chunk, size), min((rank + 1) * chunk, size))


def local_part_of(full: Tensor, like: DTensor, fused: Fused | None = None) -> Tensor:
    """This rank's part of ``full`` (of the shape of ``like``), cut as ``like`` is, as a copy. No communication."""
    part = full.detach().to(like.device)
    if fused is not None:
        part = fused.by_rank(part)
    return _narrowed(part, like, list(_cuts(like)))


def rows_of(part: Tensor, like: DTensor) -> Tensor:
    """This rank's rows of its tensor-parallel ``part``, cut over the data-parallel axes as ``like`` is, as a copy."""
    tensor_parallel = tensor_axis(like)
    return _narrowed(part, like, [cut for cut in _cuts(like) if cut[0] != tensor_parallel])


def _narrowed(part: Tensor, like: DTensor, cuts: list[tuple[int, int, int]]) -> Tensor:
    for axis, dim, size in cuts:
        span = _span(size, like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis))
        part = part.narrow(dim, span.start, span.stop - span.start)
    return part.clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def whole(tensor: DTensor, fused: Fused | None = None) -> Tensor:
    """The whole tensor on every rank. Collective over the axes on which ``tensor`` is cut."""
    full = gathered(tensor, len(list(_cuts(tensor))))
    return fused.by_matrix(full) if fused is not None else full


@torch.no_grad()
def gathered(tensor: DTensor, cuts: int) -> Tensor:
    """The local tensor with the last ``cuts`` of its cuts undone. Collective over those axes."""
    mesh = tensor.device_mesh
    part = local_tensor(tensor).to(mesh.device_type)  # from where it is, which with offload is the host
    for axis, dim, size in list(reversed(list(_cuts(tensor))))[:cuts]:
        ranks = mesh.size(axis)
        chunk = -(-size // ranks)
        shape = list(part.shape)
        shape[dim] = chunk
        mine = part.new_zeros(shape)
        mine.narrow(dim, 0, part.shape[dim]).copy_(part)
        received = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(received, mine, group=mesh.get_group(axis))
        part = torch.cat(received, dim).narrow(dim, 0, size)
    return part


TENSOR_AXES = ("tp", "tensor_parallel")


def tensor_axis(tensor: Tensor) -> int | None:
    """The axis of its mesh over which a parameter is cut by a tensor-parallel plan, if any."""
    if isinstance(tensor, DTensor):
        for axis, name in enumerate(tensor.device_mesh.mesh_dim_names or ()):
            if name in TENSOR_AXES:
                return axis
    return None


@torch.no_grad()
def without_shards(tensor: DTensor) -> Tensor:
    """What the data-parallel shards of ``tensor`` make together: a plain tensor, or one that is tensor-parallel still."""
    axis = tensor_axis(tensor)
    if axis is None:
        return whole(tensor)
    mesh, placement = tensor.device_mesh, tensor.placements[axis]
    part = gathered(tensor, sum(cut[0] != axis for cut in _cuts(tensor)))
    assert mesh.mesh_dim_names is not None
    return DTensor.from_local(
        part, mesh[mesh.mesh_dim_names[axis]], [placement], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def hollow_without_shards(tensor: DTensor) -> Tensor:
    """The same without its numbers, and without communication."""
    axis = tensor_axis(tensor)
    if axis is None:
        return hollow(tensor.shape, tensor.dtype, tensor.device)
    mesh, placement = tensor.device_mesh, tensor.placements[axis]
    shape = list(tensor.shape)
    dim = placement.dim  # type: ignore[attr-defined]
    shape[dim] = len(range(shape[dim])[_span(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))])
    assert mesh.mesh_dim_names is not None
    return DTensor.from_local(
        hollow(shape, tensor.dtype, tensor.device),
        mesh[mesh.mesh_dim_names[axis]],
        [placement],
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


@dataclass(frozen=True)
class Piece:
    """A block of a whole tensor, in the model's own order.

    Attributes:
        offsets: where it begins.
        tensor: its numbers, a view of the local part.
    """

    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes


def pieces(tensor: Tensor, fused: Fused | None = None) -> list[Piece]:
    """What this rank holds of a tensor: one block, or one of each matrix of a fused parameter. No communication."""
    local = local_tensor(tensor)
    if not isinstance(tensor, DTensor):
        return [Piece((0,) * local.ndim, local)]
    begin = [0] * tensor.ndim
    for axis, dim, size in _cuts(tensor):
        span = _span(size, tensor.device_mesh.size(axis), tensor.device_mesh.get_local_rank(axis))
        begin[dim] += span.start
    if not tensor.numel():  # also of nothing there is one
        return [Piece((0,) * tensor.ndim, local.new_empty(tensor.shape))]
    if not local.numel():
        return []
    if fused is None:
        return [Piece(tuple(begin), local)]
    found, dim = [], fused.dim
    first, last = begin[dim], begin[dim] + local.shape[dim]  # in the ranks' order
    for ranks_start, start, length in fused.blocks():
        low, high = max(first, ranks_start), min(last, ranks_start + length)
        if low < high:
            offsets = [*begin[:dim], start + low - ranks_start, *begin[dim + 1 :]]
            found.append(Piece(tuple(offsets), local.narrow(dim, low - first, high - low)))
    return found


@dataclass(frozen=True)
class Entry:
    """What one rank holds of a tensor of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"With checkpoint_format='sharded', tensors in a checkpoint that is being saved are pieces that ranks hold (Entry), which have no "
            f"{name!r}. Hooks such as on_save_checkpoint may take them out or add others; to change them, use checkpoint_format='full'."
        )

    @classmethod
    def of(cls, tensor: Tensor, fused: Fused | None = None) -> Entry:
        return cls(tuple(tensor.shape), tensor.dtype, pieces(tensor, fused))


@runtime_checkable
class Stored(Protocol):
    """A whole tensor that lies elsewhere, as in a file; blocks of it can be had."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """The block that begins at ``offsets``, on the host."""
        ...


def part_of(value: Tensor | Stored, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A block of a whole tensor."""
    if not isinstance(value, Tensor):
        return value.part(offsets, sizes)
    return value[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def whole_of(value: Tensor | Stored) -> Tensor:
    return value if isinstance(value, Tensor) else value.part([0] * len(value.shape), value.shape)


@torch.no_grad()
def fill(tensor: Tensor, value: Tensor | Stored, fused: Fused | None = None) -> None:
    """Give ``tensor``, which may be cut, its part of a whole one of its shape. No communication."""
    for piece in pieces(tensor, fused):
        piece.tensor.copy_(part_of(value, piece.offsets, piece.tensor.shape))
