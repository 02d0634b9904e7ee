"""A compressor without process groups: the reductions of several ranks in lock-step, and the ledger of error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import (
    AllGather,
    AllToAll,
    Compressor,
    Max,
    Part,
    Reduced,
    Reduction,
    Request,
    Sum,
    Task,
)
from lightning_partrain.sync.feedback import ErrorFeedback, NoFeedback


def parts_of(shapes: Sequence[Sequence[int]]) -> list[Part]:
    """Parameters ``p0``, ``p1``, ... side by side."""
    parts, at = [], 0
    for index, shape in enumerate(shapes):
        parts.append(Part(f"p{index}", torch.Size(shape), at))
        at += parts[-1].numel
    return parts


def _answers(requests: list[Request]) -> list[Tensor]:
    """As the collectives would; whatever is answered in place is changed in place, with the same bits on every rank."""
    kinds, tensors = {type(r) for r in requests}, [r.tensor for r in requests]
    assert len(kinds) == 1 and len({(t.shape, t.dtype) for t in tensors}) == 1, (
        f"ranks ask for different things: {requests}"
    )
    kind = kinds.pop()
    if kind in (Sum, Max):
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total = total + tensor if kind is Sum else torch.maximum(total, tensor)
        for tensor in tensors:
            tensor.copy_(total)
        return tensors
    if kind is AllToAll:
        assert all(len(t) == len(tensors) for t in tensors)
        return [torch.stack([t[rank] for t in tensors]) for rank in range(len(tensors))]
    assert kind is AllGather
    return [torch.stack(tensors) for _ in tensors]


def _bytes(request: Request, ranks: int) -> float:
    size = request.tensor.numel() * request.tensor.element_size()
    if isinstance(request, (Sum, Max)):
        return 2 * (ranks - 1) / ranks * size
    return (ranks - 1) / ranks * size if isinstance(request, AllToAll) else (ranks - 1) * size


def together(reductions: list[Reduction]) -> tuple[list[Reduced], float]:
    """Run one reduction a rank; what came of them, and the bytes that one rank sent."""
    answers: list[Tensor | None] = [None] * len(reductions)
    sent = 0.0
    while True:
        requests: list[Request] = []
        ended: list[Reduced] = []
        for reduction, answer in zip(reductions, answers, strict=True):
            try:
                requests.append(reduction.send(answer))  # type: ignore[arg-type]
            except StopIteration as stop:
                ended.append(stop.value)
        if ended:
            assert not requests, "some ranks ended before the others"
            return ended, sent
        sent += _bytes(requests[0], len(reductions))
        answers = list(_answers(requests))


@dataclass
class Ranks:
    """Several ranks that reduce step after step, with their memories.

    Attributes:
        means: what each rank got in the last step.
        sent: bytes that one rank sent in the last step.
    """

    compressor: Compressor
    shapes: Sequence[Sequence[int]]
    ranks: int
    feedback: NoFeedback | None = None  # None: error feedback; one object a rank is made of its type
    seed: int = 7
    step: int = 0
    memory: list[dict[str, Tensor]] = field(default_factory=list)
    servers: list[Tensor | None] = field(default_factory=list)
    states: list[dict[str, dict[str, Tensor]]] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    sent: float = 0.0

    def __post_init__(self) -> None:
        self.memory = [{} for _ in range(self.ranks)]
        self.servers = [None] * self.ranks
        self.states = [{} for _ in range(self.ranks)]

    def reduce(self, gradients: Sequence[Tensor]) -> Tensor:
        """One step: the mean that all ranks got, whose bits are compared."""
        import copy

        parts = parts_of(self.shapes)
        ways = [copy.deepcopy(self.feedback) or ErrorFeedback() for _ in range(self.ranks)]
        vectors = [way.before(g, m) for way, g, m in zip(ways, gradients, self.memory, strict=True)]
        kept = [vector.clone() for vector in vectors]
        tasks = [
            Task(
                parts,
                self.ranks,
                rank,
                self.step,
                self.seed,
                ways[rank].remembers,
                self.states[rank],
                self.servers[rank],
                self.compressor.density_at(self.step),
            )
            for rank in range(self.ranks)
        ]
        done, self.sent = together([self.compressor.reduce(v, t) for v, t in zip(vectors, tasks, strict=True)])
        for rank, result in enumerate(done):
            assert torch.equal(vectors[rank], kept[rank]), "the vector was changed"
            assert torch.equal(result.mean, done[0].mean), "ranks got different bits"
            self.memory[rank] = ways[rank].after(vectors[rank], result.sent, self.memory[rank])
            self.servers[rank], self.states[rank] = result.server, result.state
        self.means = [result.mean for result in done]
        self.step += 1
        return done[0].mean

    def withheld(self) -> Tensor:
        """What the ranks still owe the mean: the mean of their residuals, and the servers'."""
        total = torch.stack([memory["residual"] for memory in self.memory]).mean(0)
        for rank, server in enumerate(self.servers):
            if server is not None:
                chunk = total[rank * len(server) : (rank + 1) * len(server)]
                chunk += server[: len(chunk)]
        return total
