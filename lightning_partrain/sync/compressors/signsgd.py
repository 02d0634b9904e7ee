"""Signs, one bit a number."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.communicators import chunk_size, two_shot
from lightning_partrain.sync.compressors.base import (
    AllGather,
    AllToAll,
    Compressor,
    Reduced,
    Reduction,
    Task,
    number,
    one_of,
)

#: Times it, the highest byte of 8 bytes of 0 or 1 has them as its bits, the first as the lowest.
GATHER_BITS = 0x0102040810204080


def pack_bits(bits: Tensor) -> Tensor:
    """Booleans, (rows, 8 n) and contiguous, eight a byte: (rows, n)."""
    return (bits.view(torch.int64) * GATHER_BITS).bitwise_right_shift_(56).to(torch.uint8)


def unpack_signs(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes, (rows, n): (rows, 8 n) of -1 where a bit is set, and 1."""
    places = torch.arange(8, device=packed.device)
    table = 1 - 2 * (torch.arange(256, device=packed.device)[:, None] >> places & 1)
    return table.to(dtype).index_select(0, packed.reshape(-1).int()).view(len(packed), -1)


class SignCodec:
    """Blocks to signs, of which that of zero is 1, and their mean magnitude.

    What fills the last block up has no part in its mean. For this the codec knows the place of the rows that it is given: all of a vector,
    a row a rank, or one row: the chunk that this rank averages.

    Args:
        block: so many numbers share a scale; a multiple of 8.
        numel: of the vector.
        ranks, rank: how many chunks the vector is cut into, and which one is this rank's.
    """

    def __init__(self, block: int, numel: int, ranks: int, rank: int) -> None:
        self.block, self.numel, self.ranks, self.rank = block, numel, ranks, rank

    def encode(self, rows: Tensor, draw: torch.Generator | None) -> Sequence[Tensor]:
        begin = 0 if len(rows) == self.ranks else self.rank * rows.shape[1]
        there = min(max(self.numel - begin, 0), rows.numel())
        full, rest = divmod(there, self.block)
        scale = rows.view(-1, self.block).abs().mean(1)
        if rest:
            scale[full] = rows.view(-1)[there - rest : there].abs().mean()
        return scale.view(len(rows), -1, 1), pack_bits(rows < 0)  # scales first: aligned in any message

    def decode(self, code: Sequence[Tensor], width: int) -> Tensor:
        scale, packed = code
        signs = unpack_signs(packed, scale.dtype)
        return signs.view(len(signs), -1, self.block).mul_(scale).view(len(signs), width)


def average_signs(vector: Tensor, block: int, task: Task) -> Reduction:
    """The mean of what the ranks' signs and blocks' mean magnitudes say, itself told as such."""
    return two_shot(vector, SignCodec(block, vector.numel(), task.ranks, task.rank), task)


def vote(vector: Tensor, task: Task) -> Reduction:
    """For each entry the sign, 1 or -1, that most ranks have. Zero, and a draw, count as 1."""
    ranks, numel = task.ranks, vector.numel()
    width = chunk_size(numel, ranks, 8)
    negative = torch.zeros(ranks * width, dtype=torch.bool, device=vector.device)
    torch.lt(vector, 0, out=negative[:numel])
    ballots = yield AllToAll(pack_bits(negative.view(ranks, width)))
    votes = unpack_signs(ballots, vector.dtype).sum(0, keepdim=True)
    gathered = yield AllGather(pack_bits(votes < 0)[0])
    return Reduced(unpack_signs(gathered, vector.dtype).view(-1)[:numel])


def sign_bytes(shapes: Sequence[torch.Size], ranks: int, block: int, scale_bytes: int = 4) -> float:
    """2 (ranks - 1) chunks of a vector / ranks, of blocks of ``block / 8 + scale_bytes``."""
    width = chunk_size(sum(shape.numel() for shape in shapes), ranks, block)
    return 2 * (ranks - 1) * width / block * (block / 8 + scale_bytes)


def sign_block(block: int) -> int:
    """The option, checked."""
    if number("block", block, 8, 2**20, whole=True) % 8:
        raise ValueError(f"block must be a multiple of 8, not {block}: signs travel eight a byte.")
    return block


class SignSGD(Compressor):
    """Signs with the mean magnitude of every ``block`` numbers, in two shots, with feedback on both sides.

    dist-EF-blockSGD (Zheng, Huang and Kwok, arXiv 1905.10936), which is EF-signSGD (Karimireddy et al., arXiv 1901.09847) for many ranks.
    Its blocks are neighbours in a bucket, not whole parameters.

    Args:
        block: so many neighbours share a scale; a multiple of 8.
        vote: signSGD with majority vote (Bernstein et al., arXiv 1802.04434, 1810.05291) instead: ranks send signs alone, and the result is
            the sign, 1 or -1, that most of them have (zero and a draw: 1). Every weight moves by the learning rate, which should be about
            1e-4, and nothing is fed back.

    Raises:
        ValueError: for an option out of its range.
    """

    def __init__(self, block: int = 256, vote: bool = False) -> None:
        self.block: int = sign_block(block)
        self.vote: bool = one_of("vote", vote, (False, True))

    @property
    def feedback(self) -> bool:  # type: ignore[override]
        return not self.vote

    @property
    def can_feed_back(self) -> bool:  # type: ignore[override]
        return not self.vote

    def served_block(self) -> int | None:
        return None if self.vote else self.block

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        return vote(vector, task) if self.vote else average_signs(vector, self.block, task)

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """2 (ranks - 1) chunks of a vector / ranks: of blocks of ``block / 8 + 4`` bytes, or with ``vote`` a bit a number."""
        return sign_bytes(shapes, ranks, 8, 0) if self.vote else sign_bytes(shapes, ranks, self.block)
