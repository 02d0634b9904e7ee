"""Adasum: a sum of gradients that agree like a mean, and of those that have nothing in common like a sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_partrain.sync.communicators import chunk_size
from lightning_partrain.sync.compressors.base import (
    AllGather,
    AllToAll,
    Compressor,
    Part,
    Reduced,
    Reduction,
    Sum,
    Task,
    all_reduce_bytes,
)

#: Of a squared length, relative to those of what was added up: less is rounding, and counts as zero.
ROUNDING = 1e-14
#: So many entries are widened to float64 at a time: few enough for a cache.
STRETCH = 2**15


def combine(gram: Tensor) -> Tensor:
    """The coefficients, (parameters, ranks), with which Adasum adds up the ranks' vectors.

    Adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, of ranks (0, 1), (2, 3), ..., then of the pairs of these, and so on;
    the last of an odd number waits for the next round. All of these are sums of the ranks' vectors, whose products follow from those of
    the vectors: nothing but coefficients has to be computed in the rounds.

    Args:
        gram: (parameters, ranks, ranks), the inner products of the vectors.
    """

    def dot(a: Tensor, b: Tensor) -> Tensor:
        return torch.einsum("pi,pij,pj->p", a, gram, b)

    def factor(a: Tensor, product: Tensor) -> Tensor:
        square = dot(a, a)
        added = (a * a * gram.diagonal(dim1=1, dim2=2)).sum(1)
        return torch.where(square > ROUNDING * added, 1 - product / (2 * square), 1.0)[:, None]

    ranks = gram.shape[1]
    nodes = list(torch.eye(ranks, dtype=gram.dtype, device=gram.device).expand(len(gram), -1, -1).unbind(1))
    while len(nodes) > 1:
        pairs = zip(nodes[::2], nodes[1::2], strict=False)
        above = [factor(a, product) * a + factor(b, product) * b for a, b in pairs for product in [dot(a, b)]]
        nodes = above + (nodes[-1:] if len(nodes) % 2 else [])
    return nodes[0]


class Adasum(Compressor):
    """Adasum of the gradients instead of their mean, parameter by parameter (Maleki et al., arXiv 2006.02924).

    Equal gradients give that gradient, orthogonal ones their sum: learning rates need not grow with the ranks. Nothing is lost, and about
    as many bytes travel as for a mean. Inner products are computed in float64.
    """

    feedback = False
    can_feed_back = False
    least_dim = 0
    takes_embeddings = True

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        numel, ranks = vector.numel(), task.ranks
        width = chunk_size(numel, ranks, 1)
        rows = torch.nn.functional.pad(vector, (0, ranks * width - numel)).view(ranks, width)
        mine = yield AllToAll(rows)  # this rank's chunk of everyone's vector
        gram = torch.zeros(len(task.parts), ranks, ranks, dtype=torch.float64, device=vector.device)
        spans = list(self._spans(task.parts, task.rank * width, width))
        for index, begin, end in spans:
            for stretch in mine[:, begin:end].split(STRETCH, 1):
                wide = stretch.double()
                gram[index].addmm_(wide, wide.T)
        coefficients = combine((yield Sum(gram))).to(vector)
        result = torch.zeros_like(mine[0])
        for index, begin, end in spans:
            torch.mv(mine[:, begin:end].T, coefficients[index], out=result[begin:end])
        everyone = yield AllGather(result)
        return Reduced(everyone.view(-1)[:numel])

    @staticmethod
    def _spans(parts: Sequence[Part], first: int, width: int) -> Iterator[tuple[int, int, int]]:
        """Index, begin and end in the chunk that begins at ``first``, of parameters which it has something of."""
        for index, part in enumerate(parts):
            begin, end = max(part.start - first, 0), min(part.start + part.numel - first, width)
            if begin < end:
                yield index, begin, end

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """An all-reduce of the vector, filled up to a multiple of the ranks, and one of 8 ranks^2 bytes a parameter."""
        numel = sum(shape.numel() for shape in shapes)
        return 8 * (ranks - 1) * chunk_size(numel, ranks, 1) + all_reduce_bytes(8 * len(shapes) * ranks**2, ranks)
