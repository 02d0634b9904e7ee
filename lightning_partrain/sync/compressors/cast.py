"""Numbers of 16 bits, added up as such."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import (
    Compressor,
    Max,
    Reduced,
    Reduction,
    Sum,
    Task,
    all_reduce_bytes,
    one_of,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Cast(Compressor):
    """Half the bytes: values are rounded to 16 bits and summed in 16 bits.

    Values are multiplied by a power of two before they are added up, so that no sum overflows: with bf16, which has the range of float32,
    by one over the ranks (rounded); with fp16 by the one that brings the largest magnitude of all ranks just below the end of its range, so
    that small gradients do not vanish either. For that scale fp16 takes a message of one number more.

    Error feedback remembers what the cast took from this rank's values. The mean is that of rounded values in a sum that is rounded to 16 bits
    each time a rank's are added, and this last error is nobody's residual: it is lost.

    Args:
        dtype: ``"bf16"`` (8 significant bits), or ``"fp16"`` (11, of what is over 2^-28 of the ranks times the largest magnitude; fewer below).

    Raises:
        ValueError: for another dtype.
    """

    feedback: ClassVar[bool] = False
    least_dim: ClassVar[int] = 0
    takes_embeddings: ClassVar[bool] = True

    def __init__(self, dtype: str = "bf16") -> None:
        self.dtype: str = one_of("dtype", dtype, tuple(DTYPES))

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        scale: Tensor | float = 2.0 ** -_doublings(task.ranks)
        if self.dtype == "fp16":
            low, high = torch.aminmax(vector)
            largest = yield Max(torch.maximum(high, low.neg_())[None])
            scale = _scale(largest, task.ranks)
        code = (vector * scale).to(DTYPES[self.dtype])
        sent = code.to(vector.dtype).div_(scale) if task.feedback else None
        total = yield Sum(code)
        return Reduced(total.to(vector.dtype).mul_(1 / (scale * task.ranks)), sent)

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """An all-reduce of 2 bytes a parameter; fp16: and of one float32."""
        numel = sum(shape.numel() for shape in shapes)
        return all_reduce_bytes(2 * numel + (4 if self.dtype == "fp16" else 0), ranks)


def _doublings(ranks: int) -> int:
    """The least power of two that is no smaller than ``ranks``."""
    return (ranks - 1).bit_length()


def _scale(largest: Tensor, ranks: int) -> Tensor:
    """A power of two that keeps the sum of as many values as ``ranks``, none over ``largest``, (1,), at 2^15, half of fp16's range."""
    _, exponent = torch.frexp(largest)  # largest < 2^exponent
    # No larger than what has a reciprocal; only numbers next to the smallest of their type are kept from the whole range by it.
    most = math.frexp(torch.finfo(largest.dtype).max)[1] - 2
    exponent = (15 - exponent).clamp_(max=most) - _doublings(ranks)
    return torch.ldexp(torch.ones_like(largest), exponent)
