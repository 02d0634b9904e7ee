"""What a compressor is: mathematics on this rank's numbers that says what has to travel, and never sends it.

A compressor's ``reduce`` is a generator. It yields requests (:class:`Sum`, :class:`Max`, :class:`AllToAll`, :class:`AllGather`) and is
sent their answers, so that the same lines run over gloo in a thread, over NCCL on a stream, between nodes only, or in a test without any
process group. It changes nothing that it was given: what it has to remember comes back in :class:`Reduced`, and is dropped when the
gradients turn out not to be finite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_partrain.sync.feedback import NoFeedback


@dataclass(frozen=True)
class Request:
    """Something that is to travel; its kind says how."""

    tensor: Tensor


class Sum(Request):
    """The sum over all ranks, in place of ``tensor``; of floating-point types."""


class Max(Request):
    """The largest of all ranks, element by element, in place of ``tensor``."""


class AllToAll(Request):
    """Row r of ``tensor``, (ranks, n), goes to rank r. The answer has the same shape; its row r came from rank r."""


class AllGather(Request):
    """``tensor``, (n,), of all ranks: (ranks, n)."""


@dataclass(frozen=True)
class Part:
    """A parameter's place in the vector that is reduced: from ``start`` on, and its shape there."""

    name: str
    shape: torch.Size
    start: int

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, vector: Tensor) -> Tensor:
        """A view of ``vector``, (n,), with the parameter's shape."""
        return vector[self.start : self.start + self.numel].view(self.shape)


#: Kind -> name of a parameter -> what is remembered of it from step to step.
State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """One vector to be reduced over the ranks: the gradients of several parameters.

    Attributes:
        parts: the parameters, in order; they cover the vector.
        ranks, rank: how many take part, and which is this one.
        step: so many reductions were compressed before; equal on all ranks.
        seed: equal on all ranks and over the whole run.
        feedback: whether what was not sent is remembered, so that ``Reduced.sent`` (and ``server``) are wanted.
        state: what ``Reduced.state`` was the last time; empty in the beginning.
        server: what ``Reduced.server`` was the last time.
        density: the share of entries that sparse compressors send, where a schedule is ramping it; ``None``: their own.
    """

    parts: Sequence[Part]
    ranks: int
    rank: int
    step: int = 0
    seed: int = 0
    feedback: bool = True
    state: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    server: Tensor | None = None
    density: float | None = None

    def draw(self, device: torch.device, *key: Any, of_rank: bool = False) -> torch.Generator:
        """Random numbers that depend on the step and ``key``: the same on all ranks, or this rank's own. Nothing to save or resume."""
        text = repr((self.seed, self.step, key, self.rank if of_rank else None))
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")
        return torch.Generator(device).manual_seed(number)


@dataclass(frozen=True)
class Reduced:
    """What came of a reduction.

    Attributes:
        mean: (n,), the same bits on every rank; may be in the place of a tensor that was requested, never of the vector itself.
        sent: (n,), what of this rank's vector the others were told; ``None`` for all of it, or without feedback.
        server: what this rank, which averages a chunk of the vector for all, could not tell them: of the chunk that starts at
            ``rank * len(server)``, in units of the mean.
        state: kind -> name of a parameter -> what is to be remembered.
    """

    mean: Tensor
    sent: Tensor | None = None
    server: Tensor | None = None
    state: State = field(default_factory=dict)


Reduction = Generator[Request, Tensor, Reduced]


class Compressor:
    """Base of the compressors, which are small objects with checked options and no state.

    A subclass gives :meth:`reduce`, and :meth:`sent_bytes` in closed form.
    """

    #: Whether error feedback is on where the user does not say.
    feedback: ClassVar[bool] = True
    #: Whether it knows what it did not send.
    can_feed_back: bool = True
    #: Of how many dimensions a parameter has to be, to be compressed.
    least_dim: ClassVar[int] = 2
    #: Whether embeddings are compressed like other parameters.
    takes_embeddings: ClassVar[bool] = False

    def fits(self, shape: torch.Size) -> bool:
        """Whether a parameter of this shape is worth compressing. Others are averaged as they are."""
        return True

    def reduce(self, vector: Tensor, task: Task) -> Reduction:
        """The mean of all ranks' ``vector``, (n,), float32 or float64, which must not be changed."""
        raise NotImplementedError

    def sent_bytes(self, shapes: Sequence[torch.Size], ranks: int) -> float:
        """What one rank sends for parameters of these shapes (float32), in one vector, to so many ranks, itself included."""
        raise NotImplementedError

    def served_block(self) -> int | None:
        """Where ranks average chunks for all, in two shots: chunks are whole blocks of so many entries."""
        return None

    def own_feedback(self) -> NoFeedback | None:
        """What this compressor does with what it did not send, where that is not plain error feedback."""
        return None

    def density_at(self, step: int) -> float | None:
        """The share of entries to send in the compressed step ``step``, for compressors with a ramp; see :class:`Task`."""
        return None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({options})"


def all_reduce_bytes(size: float, ranks: int) -> float:
    """What one rank sends in a ring all-reduce of ``size`` bytes."""
    return 2 * (ranks - 1) / ranks * size


def number(name: str, value: Any, low: float, high: float, whole: bool = False, low_open: bool = False) -> Any:
    """``value``, when it is a number in the range.

    Raises:
        ValueError: otherwise; says the range.
    """
    kind = (int,) if whole else (int, float)
    right = isinstance(value, kind) and not isinstance(value, bool)
    if not right or not (low < value if low_open else low <= value) or not value <= high:
        what = "a whole number" if whole else "a number"
        begin = f"more than {low:g}" if low_open else f"at least {low:g}"
        end = f" and at most {high:g}" if high < float("inf") else ""
        raise ValueError(f"{name} must be {what} of {begin}{end}, not {value!r}.")
    return value


def one_of(name: str, value: Any, choices: Sequence[Any]) -> Any:
    """``value``, when it is among ``choices``.

    Raises:
        ValueError: otherwise.
    """
    if isinstance(value, bool) != any(isinstance(c, bool) for c in choices) or value not in choices:
        raise ValueError(f"{name}={value!r} does not exist. Choose one of {', '.join(map(repr, choices))}.")
    return value
