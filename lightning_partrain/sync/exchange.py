"""Averages buckets of gradients over replicas by a compressor, while the backward pass goes on.

Every bucket passes through one lane, in the order in which all ranks hand them out: first inside of a replica, as it is, where the replica
has several ranks; then between replicas, compressed. Of a bucket that is whole on every rank of a replica, one of them exchanges it for all
(they take turns), so that a node sends it once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_partrain import compat
from lightning_partrain.sync.communicators import chunk_size
from lightning_partrain.sync.compression import Compression
from lightning_partrain.sync.compressors.base import Part, Sum, Task, all_reduce_bytes
from lightning_partrain.sync.feedback import MOMENTUM, RESIDUAL, MomentumCorrection, NoFeedback
from lightning_partrain.sync.lane import Job, Steps, lane_for
from lightning_partrain.sync.links import Links, Message
from lightning_partrain.sync.memory import Memory, Named
from lightning_partrain.sync.reducer import Bucket


class CompressedExchange:
    """What a :class:`GradientReducer` gives its buckets to.

    Args:
        compression: the options.
        dense: for options, the names of parameters that stay as they are.
        outer: one rank of each replica, for this alone.
        inner: the ranks of this replica, for this alone; ``None`` when there is one.
        device: of the gradients.
        seed: equal on all ranks.

    Attributes:
        step: so many backward passes were averaged.
        sent, dense_sent: bytes that this rank sent between replicas in the last pass, and would have sent without compression.
    """

    def __init__(
        self,
        compression: Compression,
        dense: Callable[[Compression], set[str]],
        outer: dist.ProcessGroup,
        inner: dist.ProcessGroup | None,
        device: torch.device,
        seed: int,
    ) -> None:
        self._dense_names = dense
        self.use(compression)
        self.links, self.inner, self.seed = Links(outer), inner, seed
        self.inner_ranks = 1 if inner is None else dist.get_world_size(inner)
        self.lane = lane_for(device)
        self.on_host = device.type == "cpu"  # elsewhere a step must not wait to see a number
        self.step = 0
        self.sent = self.dense_sent = 0.0
        #: The factor that losses were multiplied with; what is remembered is in units without it.
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        #: What the gradients of this window will be multiplied with when they are averaged.
        self.factor: Tensor | None = None
        #: Called before each pass.
        self.before_pass: Callable[[], None] = lambda: None
        #: Kind -> name of a parameter -> what feedback takes from elsewhere, such as an optimizer's momentum.
        self.sources: dict[str, Callable[[str], Tensor]] = {}
        self._memories: dict[Bucket, Memory] = {}
        #: Where steps may be skipped: what was remembered before the parameters' last step, and whose step is still to come.
        self._before: dict[Bucket, tuple[Memory, set[str]]] = {}
        self._named = Named()
        self._turns: dict[Bucket, int] = {}
        self._scale: Tensor | None = None  # of gradients, to what is remembered
        self._may_skip = self._counted = False
        self._times: list[
            Any
        ] = []  # when the last pass began, when it had computed everything, and when that had travelled

    def use(self, compression: Compression) -> None:
        """From now on. The reducer's buckets have to be built again when there are some."""
        self.compression, self._dense = compression, self._dense_names(compression)
        self.feedback: NoFeedback = compression.feedback()

    # -- what the reducer asks -------------------------------------------------------------------------------------------

    @property
    def bucket_bytes(self) -> int:
        return self.compression.bucket_bytes

    def takes(self, name: str, shape: torch.Size) -> bool:
        return name not in self._dense and self.compression.takes(shape)

    def rebuilt(self, buckets: list[Bucket]) -> None:
        """The reducer has new buckets."""
        self._named = self.named()
        self._memories.clear()
        self._before.clear()
        self._turns.clear()
        load = [0] * self.inner_ranks
        for bucket in buckets:
            self._turns[bucket] = turn = load.index(min(load))
            load[turn] += bucket.width

    def begin(self, buckets: list[Bucket]) -> None:
        """A backward pass begins whose gradients will be averaged.

        Raises:
            RuntimeError: when averages of momenta would be taken for gradients.
        """
        if self.feedback.gives_momentum and any(bucket.averaged for bucket in buckets):
            raise RuntimeError(
                f"A second backward pass before the optimizer's step: {self.compression.compressor!r} has put momentum in the place of the first "
                "one's gradients, to which nothing can be added. Step and zero_grad after each manual_backward, or accumulate with "
                "accumulate_grad_batches."
            )
        self.before_pass()
        self.links.sent = self.dense_sent = 0.0
        scale = self.loss_scale()
        self._may_skip, self._scale = scale is not None, scale
        if self.factor is not None:
            per = torch.where(self.factor > 0, 1 / self.factor, 1.0)
            self._scale, self.factor = per if scale is None else scale * per, None
        self._times = [self.lane.now()]

    def launch(self, bucket: Bucket) -> Job:
        """Average a sealed bucket: a whole one in its buffer, of a cut one this rank's row into ``bucket.received``."""
        return self.lane.submit(partial(self._average, bucket))

    def wait(self, finish: Callable[[], None]) -> None:
        """Call ``finish``, which waits for what is still on its way, and note how long that takes."""
        self.lane.flush()
        self._times.append(self.lane.now())
        finish()
        self._times.append(self.lane.now())
        self.sent = self.links.sent
        self.step += 1
        self._counted = True

    # -- in the lane -----------------------------------------------------------------------------------------------------

    def _average(self, bucket: Bucket) -> Steps:
        assert bucket.buffer is not None
        if bucket.cut:
            assert bucket.received is not None
            row = self._sum_of_row(bucket)
            yield from self._between_replicas(bucket, row)
            return
        row = bucket.buffer[0]
        if self.inner is None:
            yield from self._between_replicas(bucket, row)
            return
        dist.all_reduce(row, group=self.inner)
        turn = self._turns[bucket]
        if turn == dist.get_rank(self.inner):
            yield from self._between_replicas(bucket, row)
        else:
            yield Message(row)  # buckets are handed on in one order inside of a replica, too
        dist.broadcast(row, group=self.inner, group_src=turn)

    def _sum_of_row(self, bucket: Bucket) -> Tensor:
        """This rank's row, summed inside of the replica."""
        assert bucket.buffer is not None and bucket.received is not None
        if self.inner is None:
            return bucket.received.copy_(bucket.buffer[0])
        if dist.get_backend(self.inner) == "gloo":  # its reduce-scatter sends as much as an all-reduce
            parts = torch.empty_like(bucket.buffer)
            dist.all_to_all_single(parts, bucket.buffer, group=self.inner)
            return torch.sum(parts, 0, out=bucket.received)
        compat.reduce_scatter_single(bucket.received, bucket.buffer.view(-1), group=self.inner)
        return bucket.received

    def _between_replicas(self, bucket: Bucket, row: Tensor) -> Steps:
        if not self.feedback.remembers or not bucket.compressed:
            self._pay(bucket, row[: bucket.flags_at])
        self.dense_sent += all_reduce_bytes(row.nbytes, self.links.ranks)
        if bucket.compressed and self.step >= self.compression.start_step:
            yield from self._compress(bucket, row[: bucket.flags_at], row[bucket.flags_at :])
        else:
            yield self.links.start(Sum(row))
            row.div_(self.links.ranks)
            if isinstance(self.feedback, MomentumCorrection):
                self._add_momentum(bucket, row[: bucket.flags_at], row[bucket.flags_at :], self.feedback.momentum)

    def _pay(self, bucket: Bucket, values: Tensor) -> None:
        """Send, once, what is owed for parameters for which nothing will be remembered from now on."""
        known = {*self._named.vectors.get(RESIDUAL, {}), *self._named.servers}
        parts = [part for part in bucket.parts if part.name in known]
        if parts:
            wide = torch.zeros_like(values, dtype=torch.promote_types(values.dtype, torch.float32))
            memory = Memory.of(self._named, bucket.parts, wide, None, self.links.ranks, self.links.rank)
            owed = memory.vectors[RESIDUAL]
            values.add_(owed if self._scale is None else owed * self._scale)
            self._named.forget(part.name for part in parts)

    def _compress(self, bucket: Bucket, values: Tensor, flags: Tensor) -> Steps:
        """
        Args:
            values: the gradients, and afterwards their mean.
            flags: for each parameter whether this rank used it, and afterwards whether any did.
        """
        wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
        finite = values.sum(dtype=wide).isfinite()
        counts = torch.cat([flags.to(wide), (~finite).to(wide)[None]])
        self.links.perform(Sum(counts))
        flags.copy_(counts[:-1])
        bad = counts[-1] > 0
        if self.on_host and bad:
            yield Message(values.fill_(torch.nan))  # and what is remembered stays good
            return
        gradient = values.to(wide)
        if not self.on_host:
            gradient = torch.where(bad, torch.zeros_like(gradient), gradient)
        if self._scale is not None:
            gradient = gradient / self._scale
        mean, memory = yield from self._reduce(bucket, gradient)
        self._remember(bucket, memory, counts, None if self.on_host else bad)
        if self._scale is not None:
            mean = mean * self._scale
        values.copy_(mean if self.on_host else torch.where(bad, torch.full_like(mean, torch.nan), mean))

    def _add_momentum(self, bucket: Bucket, values: Tensor, flags: Tensor, factor: float) -> None:
        """To a mean that was exact, as the optimizer has none. The same on all ranks, and where compression begins later, each rank's own."""
        gradient = values.to(torch.promote_types(values.dtype, torch.float32))
        if self._scale is not None:
            gradient = gradient / self._scale
        before = self._memory(bucket, gradient)
        velocity = gradient + factor * before.vectors[MOMENTUM] if MOMENTUM in before.vectors else gradient.clone()
        memory = Memory({**before.vectors, MOMENTUM: velocity}, before.server, before.state)
        self._remember(bucket, memory, flags, ~velocity.sum().isfinite())
        if self._scale is not None:
            velocity = velocity * self._scale
        values.copy_(velocity)

    def _remember(self, bucket: Bucket, memory: Memory, counts: Tensor, bad: Tensor | None) -> None:
        """From now on ``memory``, but what it was before for parameters that no rank used and, all of it, if the gradients were ``bad``."""
        before = self._memories[bucket]
        unused = self._unused(bucket, counts)
        if unused:
            memory.restore(before, unused, self.links.rank)
        if bad is not None:
            memory.keep_if(bad, before)
        self._memories[bucket] = memory
        if self._may_skip:  # another bucket may turn out not to be finite
            self._before.setdefault(bucket, (before, set()))[1].update(part.name for part in bucket.parts)

    @staticmethod
    def _unused(bucket: Bucket, counts: Tensor) -> list[Part]:
        """Parameters that no rank used: only one that did not use them itself has to look."""
        if all(slot.filled for slot in bucket.slots):
            return []
        return [part for part, used in zip(bucket.parts, counts.tolist(), strict=False) if not used]

    def _reduce(self, bucket: Bucket, gradient: Tensor) -> Generator[Message, Tensor, tuple[Tensor, Memory]]:
        compressor = self.compression.compressor
        assert compressor is not None
        memory = self._memory(bucket, gradient)
        vectors: Mapping[str, Tensor] = memory.vectors
        for kind, source in self.sources.items():
            vectors = {
                **vectors,
                kind: torch.cat([source(part.name).reshape(-1) for part in bucket.parts]).to(gradient),
            }
        rule = copy(self.feedback)  # of this bucket, while another one travels
        vector = rule.before(gradient, vectors)
        step = self.step - self.compression.start_step
        task = Task(
            bucket.parts,
            self.links.ranks,
            self.links.rank,
            step,
            self.seed,
            rule.remembers,
            memory.state,
            memory.server,
            compressor.density_at(step),
        )
        result = yield from self.links.travel(compressor.reduce(vector, task))
        kept = rule.after(vector, result.sent, vectors)
        return result.mean, Memory(kept, result.server, result.state)

    def _width(self, numel: int) -> int | None:
        """How much of a vector this rank averages for all, where that is how it is done."""
        block = None if self.compression.compressor is None else self.compression.compressor.served_block()
        return None if block is None else chunk_size(numel, self.links.ranks, block)

    def _memory(self, bucket: Bucket, like: Tensor) -> Memory:
        if bucket not in self._memories:
            ranks, rank, width = self.links.ranks, self.links.rank, self._width(like.numel())
            self._memories[bucket] = Memory.of(self._named, bucket.parts, like, width, ranks, rank)
        return self._memories[bucket]

    # -- between passes ----------------------------------------------------------------------------------------------------

    @property
    def compressing(self) -> bool:
        """Whether the last pass was compressed."""
        return self.compression.compressor is not None and self.step > self.compression.start_step

    def stepped(self, names: set[str], skipped: bool) -> None:
        """The optimizer of these parameters has made its step, or skipped it: what was sent for it is lost then."""
        for bucket, (before, waiting) in list(self._before.items()):
            if skipped:
                done = [part for part in bucket.parts if part.name in waiting & names]
                self._memories[bucket].restore(before, done, self.links.rank)
            waiting -= names
            if not waiting:
                del self._before[bucket]
        if skipped and self._counted and not self.compressing:  # exact passes count when their step is made
            self.step -= 1
        self._counted = False

    def exposed_seconds(self) -> float:
        """How long the last pass waited for what was on its way when it had computed everything."""
        return self.lane.seconds(*self._times[1:]) if self._times else 0.0

    def backward_seconds(self) -> float:
        """How long the last pass computed, with gradients on their way."""
        return self.lane.seconds(*self._times[:2]) if self._times else 0.0

    def residual_norm(self) -> float:
        """Of what this rank has not sent yet."""
        owed = [memory.vectors[RESIDUAL] for memory in self._memories.values() if RESIDUAL in memory.vectors]
        return (
            float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in owed])))
            if owed
            else 0.0
        )

    def feedback_size(self) -> tuple[int, int]:
        """Entries and bytes of what is, or will be, remembered of gradients that were not sent; a compressor's own state is little beside it."""
        entries = size = 0
        for bucket in self._turns:
            mine = self.inner is None or bucket.cut or self._turns[bucket] == dist.get_rank(self.inner)
            if bucket.compressed and self.feedback.remembers and mine:
                here = bucket.flags_at * self.feedback.vectors + (self._width(bucket.flags_at) or 0)
                entries += here
                size += here * max(4, bucket.dtype.itemsize)
        return entries, size

    def state_tensors(self) -> list[Tensor]:
        """All that is remembered."""
        tensors = []
        for memory in self._memories.values():
            tensors += [*memory.vectors.values(), *([] if memory.server is None else [memory.server])]
            tensors += [value for named in memory.state.values() for value in named.values()]
        return tensors

    def named(self) -> Named:
        """What is remembered, by parameter."""
        named = Named(
            {kind: dict(values) for kind, values in self._named.vectors.items()},
            dict(self._named.servers),
            {kind: dict(values) for kind, values in self._named.state.items()},
        )
        for bucket, memory in self._memories.items():
            named.forget(part.name for part in bucket.parts)
            memory.put_into(named, bucket.parts, self.links.rank)
        return named

    def load(self, named: Named, step: int) -> None:
        self._memories.clear()
        self._named, self.step = named, step

    def close(self) -> None:
        self.lane.close()
