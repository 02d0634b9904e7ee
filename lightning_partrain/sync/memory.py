"""What error feedback and compressors remember of the gradients: by bucket while training, by parameter everywhere else.

Buckets change when a parameter is unfrozen or another number of ranks resumes; names do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_partrain.sync.compressors.base import Part, State
from lightning_partrain.sync.feedback import RESIDUAL


@dataclass
class Named:
    """Of this rank, by parameter.

    Attributes:
        vectors: kind (``"residual"``, ...) -> name -> what feedback remembers, in the gradient's shape on this rank.
        servers: name -> (begin, values): what this rank could not tell of the mean of a stretch of the flat parameter.
        state: what compressors remember.
    """

    vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    servers: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    state: State = field(default_factory=dict)

    def forget(self, names: Iterable[str]) -> None:
        for name in names:
            for values in (*self.vectors.values(), *self.state.values(), self.servers):
                values.pop(name, None)  # type: ignore[attr-defined]

    @property
    def owes(self) -> bool:
        return bool(any(self.vectors.values()) or self.servers)

    def to_save(self) -> dict[str, Any]:
        servers = {name: [begin, values] for name, (begin, values) in self.servers.items()}
        return {"vectors": self.vectors, "servers": servers, "state": self.state}

    @classmethod
    def of_saved(cls, saved: Mapping[str, Any]) -> Named:
        servers = {name: (int(begin), values) for name, (begin, values) in saved["servers"].items()}
        return cls(dict(saved["vectors"]), servers, dict(saved["state"]))

    @classmethod
    def mean(cls, everyone: Sequence[Named]) -> Named:
        """For ranks of another number: each begins with the mean of what all of those before owed."""
        vectors = {
            kind: {name: torch.stack([each.vectors[kind][name] for each in everyone]).mean(0) for name in named}
            for kind, named in everyone[0].vectors.items()
        }
        for each in everyone:
            for name, (begin, values) in each.servers.items():  # whoever serves remembers as a worker, too
                vectors[RESIDUAL][name].view(-1)[begin : begin + values.numel()] += values
        return cls(vectors, {}, everyone[0].state)


@dataclass
class Memory:
    """Of one bucket's vector, (n,).

    Attributes:
        vectors: kind -> (n,).
        server: what this rank could not tell of the mean of the chunk that begins at ``rank * len(server)``.
        state: what the compressor remembers.
    """

    vectors: dict[str, Tensor] = field(default_factory=dict)
    server: Tensor | None = None
    state: State = field(default_factory=dict)

    @classmethod
    def of(cls, named: Named, parts: Sequence[Part], like: Tensor, width: int | None, ranks: int, rank: int) -> Memory:
        """What ``named`` has of ``parts``, which cover a vector such as ``like`` of which each rank serves ``width`` entries."""
        memory = cls()
        for kind, values in named.vectors.items():
            here = [part for part in parts if part.name in values]
            if here:
                memory.vectors[kind] = torch.zeros_like(like)
            for part in here:
                part.of(memory.vectors[kind]).copy_(values[part.name].view(part.shape))
        for kind, values in named.state.items():
            memory.state[kind] = {part.name: values[part.name].to(like) for part in parts if part.name in values}
        stretches = [
            (p.start + named.servers[p.name][0], named.servers[p.name][1]) for p in parts if p.name in named.servers
        ]
        if stretches:
            memory._serve(stretches, like, width, ranks, rank)
        return memory

    def _serve(
        self, stretches: list[tuple[int, Tensor]], like: Tensor, width: int | None, ranks: int, rank: int
    ) -> None:
        """What this rank owes is owed by its chunk again, or, when the vector is cut otherwise by now, by this rank as a worker."""
        owed = torch.zeros_like(like)
        for begin, values in stretches:
            owed[begin : begin + values.numel()] = values.to(like)
        first = min(begin for begin, _ in stretches)
        last = max(begin + values.numel() for begin, values in stretches)
        if width is not None and rank * width == first and last == min((rank + 1) * width, like.numel()):
            self.server = torch.zeros(width, dtype=like.dtype, device=like.device)
            self.server[: last - first] = owed[first:last]
        else:
            self.vectors[RESIDUAL] = self.vectors.get(RESIDUAL, torch.zeros_like(like)) + owed * ranks

    def put_into(self, named: Named, parts: Sequence[Part], rank: int) -> None:
        """By parameter, as copies."""
        for kind, vector in self.vectors.items():
            named.vectors.setdefault(kind, {}).update({part.name: part.of(vector).clone() for part in parts})
        for kind, values in self.state.items():
            named.state.setdefault(kind, {}).update({name: value.clone() for name, value in values.items()})
        if self.server is not None:
            first = rank * len(self.server)
            for part in parts:
                begin, end = max(part.start, first), min(part.start + part.numel, first + len(self.server))
                if begin < end:
                    named.servers[part.name] = (begin - part.start, self.server[begin - first : end - first].clone())

    def restore(self, before: Memory, parts: Sequence[Part], rank: int) -> None:
        """Take back what was remembered of ``parts`` before: what was sent for them is lost."""
        for part in parts:
            for kind, vector in self.vectors.items():
                place = part.of(vector)
                place.copy_(part.of(before.vectors[kind])) if kind in before.vectors else place.zero_()
            for kind, values in self.state.items():
                if part.name in before.state.get(kind, {}):
                    values[part.name] = before.state[kind][part.name]
                else:
                    values.pop(part.name, None)
            if self.server is not None:
                first = rank * len(self.server)
                span = slice(max(part.start - first, 0), max(part.start + part.numel - first, 0))
                self.server[span] = 0.0 if before.server is None else before.server[span]

    def keep_if(self, bad: Tensor, before: Memory) -> None:
        """Where ``bad``, a scalar on the device, is true, remember what was remembered before; without waiting for it."""
        for kind, vector in self.vectors.items():
            old = before.vectors.get(kind)
            self.vectors[kind] = torch.where(bad, torch.zeros_like(vector) if old is None else old, vector)
        if self.server is not None:
            old = torch.zeros_like(self.server) if before.server is None else before.server
            self.server = torch.where(bad, old, self.server)
        for kind, values in self.state.items():
            for name, value in values.items():
                old = before.state.get(kind, {}).get(name)
                if old is not None:
                    values[name] = torch.where(bad, old, value)
