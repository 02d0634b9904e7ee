"""``compressor="auto"``: measures the link and the steps, and takes the compressor with which a step should be shortest, or none.

Only compressors that keep the loss within a few per cent on everything we measured are candidates. All ranks decide the same: what they
measure is made equal first (the slowest counts).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors.base import (
    AllGather,
    Part,
    Reduction,
    Task,
    all_reduce_bytes,
)
from lightning_partrain.sync.exchange import CompressedExchange
from lightning_partrain.sync.reducer import GradientReducer

#: In the order in which they are preferred where the times are the same.
CANDIDATES = ("bf16", "int8", "powersgd", "int4")
#: So much shorter has a step to be.
WORTH = 0.05
#: The link is looked at again after so many steps, and decided upon again when it is so many times faster or slower.
LOOK_EVERY, CHANGED = 100, 1.5
#: So many exact steps are timed first; the first one warms up.
TIMED_STEPS = 4
#: Seconds that the measurement of the link may take.
BUDGET = 1.0
SMALL, LARGE = 1 << 10, 1 << 18


@dataclass(frozen=True)
class Link:
    """Of the slowest rank: seconds a message takes at least, and bytes that a rank sends in a second."""

    latency: float
    rate: float

    def seconds(self, sent: float, messages: float) -> float:
        return sent / self.rate + messages * self.latency

    def differs(self, other: Link) -> bool:
        return max(self.rate / other.rate, other.rate / self.rate) > CHANGED


def slowest(seconds: Sequence[float], device: torch.device) -> list[float]:
    """The most of all ranks, one by one. Collective over all ranks, not only those of a group: they have to decide the same."""
    all_of_them = torch.tensor(list(seconds), dtype=torch.float64, device=device)
    dist.all_reduce(all_of_them, dist.ReduceOp.MAX)
    return list(all_of_them.tolist())


def _now(device: torch.device) -> float:
    """When all that the device was given is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _all_reduce_seconds(numel: int, group: dist.ProcessGroup, device: torch.device) -> float:
    message = torch.zeros(numel, dtype=torch.uint8, device=device)
    begin = _now(device)
    dist.all_reduce(message, group=group)
    return _now(device) - begin


def measure_link(group: dist.ProcessGroup, device: torch.device, quick: bool = False) -> Link:
    """Small and large all-reduces, the large ones larger and larger while there is time. Collective over all ranks, each in its group."""
    ranks, begin = dist.get_world_size(group), time.perf_counter()
    _all_reduce_seconds(SMALL, group, device)  # connects
    latency = min(slowest([_all_reduce_seconds(SMALL, group, device)], device)[0] for _ in range(3))
    size, spent = LARGE, 0.0
    while True:
        seconds = min(slowest([_all_reduce_seconds(size, group, device)], device)[0] for _ in range(2))
        rate = all_reduce_bytes(size, ranks) / max(seconds - latency, 1e-7)
        (spent,) = slowest([time.perf_counter() - begin], device)
        if quick or spent + 8 * seconds > BUDGET or size >= 1 << 26:
            return Link(latency, rate)
        size *= 4


def _alone(reduction: Reduction, ranks: int) -> int:
    """Run it as if all ranks had the same; how many messages it wanted."""
    messages, answer = 0, None
    try:
        while True:
            request = reduction.send(answer)  # type: ignore[arg-type]
            messages += 1
            answer = request.tensor
            if isinstance(request, AllGather):
                answer = answer.view(1, -1).expand(ranks, -1).contiguous()
    except StopIteration:
        return messages


def math_seconds(
    compression: Compression, parts: Sequence[Part], ranks: int, device: torch.device
) -> tuple[float, int]:
    """What encoding and decoding these parameters takes, and how many messages it wants."""
    assert compression.compressor is not None
    vector = torch.randn(sum(part.numel for part in parts), device=device)
    feedback = compression.feedback()
    best, messages = float("inf"), 0
    for step in range(2):
        task = Task(parts, ranks, 0, step, 0, feedback.remembers)
        begin = _now(device)
        messages = _alone(compression.compressor.reduce(feedback.before(vector, {}), task), ranks)
        best = min(best, _now(device) - begin)
    return best, messages


@dataclass(frozen=True)
class Choice:
    """What was decided: ``None`` for exact averages; and why, for people."""

    name: str | None
    why: str


@dataclass(frozen=True)
class Offer:
    """Of a compressor, for one step: bytes that a rank sends, seconds of mathematics, messages."""

    sent: float
    seconds: float
    messages: float


def choose(link: Link, compute: float, hidden: float, offers: Mapping[str | None, Offer]) -> Choice:
    """
    Args:
        compute: seconds that a step takes without communication.
        hidden: seconds of them during which gradients may travel.
        offers: by compressor, with ``None`` for exact averages.
    """

    def step(offer: Offer) -> float:
        return compute + offer.seconds + max(0.0, link.seconds(offer.sent, offer.messages) - hidden)

    times = {name: step(offer) for name, offer in offers.items()}
    dense, best = times[None], min(times, key=lambda name: times[name])
    each = ", ".join(f"{name or 'exact'} {seconds * 1e3:.3g} ms" for name, seconds in times.items())
    what = (
        f"The link sends {link.rate * 8e-6:.3g} Mbit/s a rank (latency {link.latency * 1e3:.2g} ms) and a step computes for "
        f"{compute * 1e3:.3g} ms. Expected steps: {each}."
    )
    if times[best] > (1 - WORTH) * dense:
        return Choice(None, f"compressor='auto' is off: nothing would be {WORTH:.0%} faster. {what}")
    return Choice(best, f"compressor='auto' takes {best}. {what}")


class AutoCompression:
    """Decides for an exchange, in the course of a run.

    Args:
        exchange, reducer: of the run; nothing is compressed yet.
        options: with which compressors are taken.
        device: of the gradients.
        tell: given what was decided, and why, in words.
    """

    def __init__(
        self,
        exchange: CompressedExchange,
        reducer: GradientReducer,
        options: Compression,
        device: torch.device,
        tell: Callable[[str], None],
    ) -> None:
        self.exchange, self.reducer, self.options, self.device, self.tell = exchange, reducer, options, device, tell
        self.choice: str | None = None
        self.offers: dict[str | None, Offer] | None = None
        self._times: list[tuple[float, float, float]] = []  # seconds of steps, of that exposed, and backward
        self._began: float | None = None
        self._glance: Link | None = None  # as the link was when that was decided
        self._steps = 0

    def begin_window(self) -> None:
        """A training step begins, perhaps the first before an optimizer's step: validation and loading are not counted."""
        if self._began is None:
            self._began = time.perf_counter()

    def after_step(self) -> None:
        """Collective: ranks measure together."""
        self._steps += 1
        if self._steps <= TIMED_STEPS:
            seconds = time.perf_counter() - (self._began or time.perf_counter())
            self._times.append((seconds, self.exchange.exposed_seconds(), self.exchange.backward_seconds()))
        self._began = None
        if self._steps == TIMED_STEPS:
            self._measure()
        elif self._steps > TIMED_STEPS and self._steps % LOOK_EVERY == 0 and self._glance is not None:
            link = measure_link(self.exchange.links.group, self.device, quick=True)
            if link.differs(self._glance):
                self._decide()

    def _measure(self) -> None:
        seconds, exposed, backward = zip(*self._times[1:], strict=True)
        compute = median(a - b for a, b in zip(seconds, exposed, strict=True))
        hidden = median(backward)
        buckets = len(self.reducer.buckets)
        self._compute, self._hidden = slowest([compute, hidden * (buckets - 1) / buckets], self.device)
        self._decide()

    def _decide(self) -> None:
        """Measure the link, and take what is best on it."""
        exchange, first = self.exchange, self._glance is None
        self._glance = measure_link(exchange.links.group, self.device, quick=True)
        link = measure_link(exchange.links.group, self.device)
        if self.offers is None:
            self.offers = {name: self._offer(name) for name in (None, *CANDIDATES)}
            exchange.use(self.options.taking(self.choice))
        choice = choose(link, self._compute, self._hidden, self.offers)
        if first or choice.name != self.choice:
            self.tell(choice.why)
        self.take(choice.name)

    def _offer(self, name: str | None) -> Offer:
        """What a step with this compressor would be, on the rank that has most of each."""
        options, ranks = self.options.taking(name), self.exchange.links.ranks
        self.exchange.use(options)
        parts = [part for bucket in self.reducer.buckets for part in bucket.parts]
        taken = [part for part in parts if self.exchange.takes(part.name, part.shape)]
        numel = sum(part.numel for part in taken)
        sent = all_reduce_bytes(4 * (sum(part.numel for part in parts) - numel), ranks)
        seconds, messages = 0.0, 1.0
        if options.compressor is not None and taken:
            sample = sample_of(taken)
            seconds, each = math_seconds(options, sample, ranks, self.device)
            seconds *= numel / sum(part.numel for part in sample)
            messages += max(1.0, 4 * numel / options.bucket_bytes) * (each + 1)
            sent += options.compressor.sent_bytes([part.shape for part in taken], ranks)
        return Offer(*slowest([sent, seconds, messages], self.device))

    def take(self, name: str | None) -> None:
        if name != self.choice:
            self.choice = name
            self.exchange.use(self.options.taking(name))
            self.reducer.build()


def sample_of(parts: Sequence[Part], most: int = 1 << 21) -> list[Part]:
    """The first parts up to so many entries, side by side; at least one."""
    sample: list[Part] = []
    for part in parts:
        at = sample[-1].start + sample[-1].numel if sample else 0
        if sample and at + part.numel > most:
            break
        sample.append(Part(part.name, part.shape, at))
    return sample
