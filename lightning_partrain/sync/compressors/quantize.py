"""Blockwise quantisation to integers: the largest magnitude of a block is its scale."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.communicators import chunk_size, gather, two_shot
from lightning_partrain.sync.compressors.base import Compressor, Reduction, Task, number, one_of

#: Bits -> the largest code, and the type of codes. Of 32 bits half the range is used, so that no rounding of a scale runs over it.
CODES = {4: (7, torch.int8), 8: (127, torch.int8), 32: (2**30, torch.int32)}


class BlockCodec:
    """Blocks to integer codes and a scale each. A block that is not finite comes back as not finite.

    Args:
        bits: 4, 8 or 32 a number.
        block: so many numbers share a scale.
        dtype: of the numbers and scales.
    """

    def __init__(self, bits: int, block: int, dtype: torch.dtype) -> None:
        self.bits, self.block, self.dtype = bits, block, dtype
        self._levels, self._code = CODES[bits]
        self._wide = torch.float64 if bits == 32 else dtype  # such codes have more digits than float32

    def encode(self, rows: Tensor, draw: torch.Generator | None) -> Sequence[Tensor]:
        short = -rows.shape[1] % self.block
        blocks = (torch.nn.functional.pad(rows, (0, short)) if short else rows).view(len(rows), -1, self.block)
        # Two passes that only read: less than one that writes magnitudes. The bound keeps 1 / scale finite, also for zeros.
        largest = torch.maximum(blocks.amax(2, keepdim=True), blocks.amin(2, keepdim=True).neg_())
        scale = largest.div_(self._levels).clamp_min_(torch.finfo(self.dtype).tiny)
        steps = blocks * scale.to(self._wide).reciprocal()
        if draw is not None:
            # The nearer a number is to the next code, the more often it becomes that: right on average.
            steps.add_(_dither(steps, draw)).clamp_(-self._levels, self._levels)
        codes = steps.round_().to(self._code)
        if self.bits == 4:  # two digits of -7 to 7, to the base of 16
            low, high = codes.view(len(rows), -1, 2, self.block // 2).unbind(2)
            codes = torch.add(low, high, alpha=16)
        return scale, codes  # scales first: aligned in any message

    def decode(self, code: Sequence[Tensor], width: int) -> Tensor:
        scale, codes = code
        if self.bits == 4:
            codes = torch.cat([codes << 4 >> 4, codes + 8 >> 4], 2)
        values = codes.to(self._wide).mul_(scale).to(self.dtype)
        return values.view(len(values), -1)[:, :width]


def _dither(like: Tensor, draw: torch.Generator) -> Tensor:
    """Multiples of 2^-16 from -1/2 up to 1/2; four come of a random word, as drawing words takes more time than all the rest."""
    words = torch.empty(-(-like.numel() // 4), dtype=torch.int64, device=like.device)
    words.random_(-(2**63), None, generator=draw)
    return words.view(torch.int16)[: like.numel()].view_as(like).to(like.dtype).mul_(2.0**-16)


class Quantize(Compressor):
    """Integers of 4 or 8 bits, with a scale for every ``block`` numbers.

    Exchanged in two shots, as in ZeRO++ (Wang et al., arXiv 2306.10209): the numbers are averaged, not the codes, so that nothing runs over,
    and what a rank sends does not grow with the number of ranks.

    Args:
        bits: 4, 8 or 32 a number. 32 is for comparison: it is as exact as the numbers are.
        block: so many neighbours share a scale, which their largest magnitude gives; even.
        rounding: ``"nearest"``, or ``"stochastic"``: right on average, with twice the squared error, in half as much time again.
        communicator: ``"two_shot"``, or ``"gather"``: rounds once instead of twice; sends as much to 2 ranks, and more to others.

    Raises:
        ValueError: for an option out of its range.
    """

    def __init__(
        self, bits: int = 8, block: int = 256, rounding: str = "nearest", communicator: str = "two_shot"
    ) -> None:
        self.bits: int = one_of("bits", bits, list(CODES))
        self.block: int = number("block", block, 2, 2**20, whole=True)
        if block % 2:
            raise ValueError(f"block must be even, not {block}: 4-bit codes travel in pairs.")
        self.rounding: str = one_of("rounding", rounding, ("nearest", "stochastic"))
        self.communicator: str = one_of("communicator", communicator, ("two_shot", "gather"))

    def served_block(self) -> int | None:
        return None if self.communicator == "gather" else self.block

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        codec = BlockCodec(self.bits, self.block, vector.dtype)
        draw = None
        if self.rounding == "stochastic":
            draw = task.draw(vector.device, "quantize", task.parts[0].name, of_rank=True)
        exchange = two_shot if self.communicator == "two_shot" else gather
        return (yield from exchange(vector, codec, task, draw))

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """2 (ranks - 1) chunks of a vector / ranks, or with gather (ranks - 1) vectors: of blocks of ``block * bits / 8 + 4`` bytes."""
        numel = sum(shape.numel() for shape in shapes)
        one_block = self.block * self.bits / 8 + 4
        if self.communicator == "gather":
            return (ranks - 1) * -(-numel // self.block) * one_block
        return 2 * (ranks - 1) * chunk_size(numel, ranks, self.block) / self.block * one_block
