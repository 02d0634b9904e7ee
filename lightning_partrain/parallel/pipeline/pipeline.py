"""A LightningModule over pipeline stages: cut once, run for every step, whole again at the end."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_partrain.mesh import ParallelMesh
from lightning_partrain.parallel import token_loss
from lightning_partrain.parallel.buffers import broadcast_tensors
from lightning_partrain.parallel.hollow import is_hollow, make_hollow
from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.parallel.pipeline.cut import (
    Cut,
    Flow,
    Split,
    buffer_stages,
    choose_cut,
    extend_cut,
    parameter_stages,
)
from lightning_partrain.parallel.pipeline.record import Recording, record
from lightning_partrain.parallel.pipeline.results import LogBook, loggers_of_a_step, messages, share_metrics
from lightning_partrain.parallel.pipeline.schedule import Schedule, build_schedule, run_one_stage
from lightning_partrain.parallel.pipeline.sources import digest
from lightning_partrain.parallel.pipeline.stage import Stage
from lightning_partrain.parallel.pipeline.units import CannotCutError, Unit, block_lists, find_units
from lightning_partrain.parallel.random_states import seeded

Context = Callable[[], Any]

#: ``num_microbatches="auto"`` makes up to so many micro-batches a stage: a bubble of at most a fifth of the step.
PER_STAGE = 4

#: Schedules with their receive buffers are kept for so many shapes of batches.
KEPT = 16


class Pipeline:
    """This rank's stage, and what all stages agree on.

    Args:
        module: the LightningModule, whole, on the device, with its trainer.
        mesh: the mesh of the run.
        num_microbatches: into how many parts a data-parallel rank's batch is cut; ``"auto"`` takes the largest divisor of the
            batch size up to four times the number of stages.
        schedule: the order of forward and backward passes.
        split: where to cut.
        together: modules that have to be on one stage.
        seed: equal on all ranks; the random numbers of every micro-batch follow from it.
        contexts: name of a step -> context for it, such as autocast.
        host_group: the ranks of ``mesh.group("pp")``, for tensors on the host.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: ParallelMesh,
        num_microbatches: int | Literal["auto"],
        schedule: Schedule,
        split: Split,
        contexts: Mapping[str, Context],
        host_group: dist.ProcessGroup | None,
        device: torch.device,
        seed: int,
        together: Sequence[Collection[str]] = (),
    ) -> None:
        self._together = together
        self._seed = seed
        self.generator = torch.Generator().manual_seed(seed)
        self.module, self.mesh, self.device, self.contexts = module, mesh, device, contexts
        self.num_microbatches, self.kind, self.split = num_microbatches, schedule, split
        self.stages, self.index = mesh.size("pp"), mesh.rank("pp")
        self.messages = None if host_group is None else messages(module, mesh.group("pp"), host_group, device)
        self.units = find_units(module, split.blocks)
        self._opened: set[str] = set()
        self._steps: dict[Hashable, tuple[Recording, Flow]] = {}
        self._schedules: dict[Hashable, Any] = {}
        self.cut: Cut | None = None
        self.stage: Stage | None = None
        self.absent: set[nn.Parameter] = set()
        self.written_buffers: list[str] = []
        self._steps_run, self._epoch, self._nothing_yet = 0, -1, True

    # -- where to cut ---------------------------------------------------------------------------------------------------

    def make_cut(self, steps: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Cut the model so that all ``steps`` (name and arguments, the batch first) can run on it.

        No communication: every stage comes to the same result by itself.

        Raises:
            CannotCutError, ValueError: when there is no such cut; the message says why and the way out.
        """
        lists = block_lists(self.module)
        if self.split.blocks is not None and self.split.blocks not in lists:
            raise CannotCutError(f"pipeline_split blocks={self.split.blocks!r} is no list of layers. {_known(lists)}")
        recordings = self._look_at(steps)
        calls = list(recordings[0][1].calls)
        while self.split.blocks is None and self.stages > 1 and (unit := self._too_large(calls)) is not None:
            self._opened.add(unit.name)
            self.units = find_units(self.module, opened=self._opened)
            recordings = self._look_at(steps)
            calls = list(recordings[0][1].calls)
        if not any(unit.block for unit in self.units if unit.name in calls) and self.stages > 1:
            raise CannotCutError(
                f"No list of layers (nn.ModuleList or nn.Sequential) was found between whose members {steps[0][0]} could be cut. "
                f"{_known(lists)} Modules that it calls: {', '.join(calls) or 'none'}."
            )
        cut = choose_cut(calls, self.units, self.stages, self.split.at, self._together)
        for _, recording in recordings:
            cut = extend_cut(cut, list(recording.calls))
        flows = []
        for key, recording in recordings:
            flows.append(Flow(recording, cut))
            self._steps[key] = (recording, flows[-1])
        self.cut = cut
        self.lives = parameter_stages(self.module, cut, self.units, flows)
        for name, param in self.module.named_parameters():
            if len(self.lives[name]) > 1 and (
                param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None)
            ):
                raise CannotCutError(
                    f"{name!r} is used on several stages and has a hook on its gradient, which would see each stage's part of it. Use "
                    "on_before_optimizer_step, or cut elsewhere with pipeline_split."
                )
        first: dict[Tensor, str] = {}
        named = self.module.named_parameters(remove_duplicate=False)
        self._first_names = {name: first.setdefault(param, name) for name, param in named}
        self.buffer_lives = buffer_stages(self.module, cut, self.units)
        self.written_buffers = sorted({name for _, recording in recordings for name in recording.written_buffers})
        self.stage = Stage(self.module, self.units, cut, self.index, self.device, self._finish)
        self._tell()

    def fingerprint(self, steps: Sequence[tuple[str, tuple[Any, ...]]]) -> tuple[str, str]:
        """What all ranks must have in common (the cut), and what the stages of a data-parallel rank must (their batch, too)."""
        assert self.cut is not None
        cut = repr((self.cut.stages, sorted(self.lives.items())))
        column = hashlib.sha256(repr([flow.crossing for _, flow in self._steps.values()]).encode())
        for _, args in steps:
            column.update(digest(args[0]).encode())
        return hashlib.sha256(cut.encode()).hexdigest(), column.hexdigest()

    def _look_at(self, steps: Sequence[tuple[str, tuple[Any, ...]]]) -> list[tuple[Hashable, Recording]]:
        recordings = []
        for name, args in steps:
            sizes = self._sizes(args[0], exact=name == "training_step")
            for part in dict(zip(sizes, batches.split(args[0], sizes), strict=True)).values():
                with _mode_of(self.module, name):
                    key, recording = self._key(name, part, args), self._record(name, (part, *args[1:]))
                recordings.append((key, recording))
        return recordings

    def _too_large(self, calls: list[str]) -> Unit | None:
        """A block that holds a list of layers itself and is larger than a stage should be, or stands for too few stages."""
        called = [unit for unit in self.units if unit.name in calls]
        blocks = [unit for unit in called if unit.block is not None]
        lists = [unit for unit in blocks if block_lists(unit.module)]
        share = sum(unit.numel for unit in called) / self.stages
        largest = max(lists, key=lambda unit: unit.numel, default=None)
        if largest is None or (len(blocks) >= self.stages and largest.numel <= share):
            return None
        return largest

    def _record(self, name: str, args: tuple[Any, ...]) -> Recording:
        book = LogBook(self.module)
        # all ranks look at the same way through a step that draws its way
        with seeded(self._seed), book.open(), loggers_of_a_step(self.module.trainer, recording=True):
            return record(
                self.module,
                self.units,
                name,
                args,
                self.contexts[name],
                book.values,
                whole=not any(map(is_hollow, self.module.parameters())),
            )

    def _key(self, name: str, part: Any, args: tuple[Any, ...]) -> Hashable:
        trained = tuple(p.requires_grad for p in self.module.parameters())  # a callback may freeze and unfreeze
        return (name, batches.signature(part), self.module.training, args[2:], trained)

    def _tell(self) -> None:
        assert self.cut is not None
        if self.stages == 1:
            return
        numel = {name: p.numel() for name, p in self.module.named_parameters()}
        lines = []
        for stage, names in enumerate(self.cut.stages):
            held = sum(numel[name] for name, stages in self.lives.items() if stage in stages)
            lines.append(f"  stage {stage}: {held / 1e6:.2f} M parameters, {names[0]} to {names[-1]}" if names else "")
        tied = [name for name, stages in self.lives.items() if len(stages) > 1]
        if tied:
            lines.append(f"  on several stages: {', '.join(tied[:8])}{', ...' if len(tied) > 8 else ''}")
        rank_zero_info("Pipeline stages:\n" + "\n".join(lines))

    # -- parameters -----------------------------------------------------------------------------------------------------

    def empty(self) -> None:
        """Take the memory of parameters that live elsewhere; they keep name, shape and identity."""
        for name, param in self.module.named_parameters():
            if self.index not in self.lives[name]:
                self.absent.add(param)
                make_hollow(param)
                param.grad = None

    def own_blocks(self) -> list[nn.Module]:
        """The blocks that this stage runs."""
        assert self.cut is not None
        return [u.module for u in self.units if u.block is not None and u.name in self.cut.stages[self.index]]

    def home(self, name: str) -> int:
        """The stage whose value of a parameter or buffer counts, in norms and checkpoints: the first that holds it."""
        name = self._first_names.get(name, name)
        return self.lives[name][0] if name in self.lives else self.buffer_lives.get(name, 0)

    # -- a step ---------------------------------------------------------------------------------------------------------

    def _sizes(self, batch: Any, exact: bool = False) -> list[int]:
        samples = batches.batch_size(batch)
        if samples == 0:
            raise ValueError("The batch has no samples.")
        if self.num_microbatches == "auto":
            most = PER_STAGE * self.stages
            fitting = [n for n in range(self.stages, most + 1) if samples % n == 0]
            number = fitting[-1] if fitting else min(samples, most)
        else:
            number = self.num_microbatches
            if exact and number > samples:
                raise ValueError(
                    f"num_microbatches={number}, but a batch of this data-parallel rank has {samples} samples. Use at most {samples}, or "
                    "larger batches."
                )
            number = min(number, samples)  # a smaller last batch
        return batches.micro_batch_sizes(samples, number)

    def run(
        self,
        name: str,
        args: tuple[Any, ...],
        training: bool,
        scale: float | Tensor = 1.0,
        scale_of_sums: Tensor | None = None,
    ) -> Any:
        """Run the step ``name`` on all stages and give what it would have returned for the whole batch, on all of them.

        Args:
            args: the step's arguments, the batch first.
            training: run the backward passes too; gradients are added to ``param.grad``.
            scale: factor of the loss before the backward passes.
            scale_of_sums: the same for losses that are sums over tokens; see :mod:`token_loss`.
        """
        assert self.stage is not None
        sizes = self._sizes(args[0])
        parts = batches.split(args[0], sizes)
        seeds = self._seeds(len(sizes), args)
        self._book = LogBook(self.module)
        self._outputs: list[Any] = []
        self._weights = [scale * size / sum(sizes) for size in sizes]
        self._of_sums = scale_of_sums
        self._done = 0
        while self._done < len(sizes):
            same = sizes.count(sizes[self._done])
            window = slice(self._done, self._done + same)
            key = self._key(name, parts[self._done], args)
            if key not in self._steps:
                self._steps[key] = self._look_again(name, (parts[self._done], *args[1:]))
            if training and self._is_time_to_look():
                self._compare(key, name, (parts[self._done], *args[1:]), may_change=self._nothing_yet)
            recording, flow = self._steps[key]
            calls = [self._call(name, (part, *args[1:])) for part in parts[window]]
            self.stage.prepare(recording, flow, calls, seeds[window])
            with self.stage.stepping(), loggers_of_a_step(self.module.trainer):
                self._run_schedule(flow, same, training)
            self._done += same
        output = self._share(sizes)
        if training and self.device.type == "cpu" and math.isnan(self._loss_of(output)):
            self._compare(key, name, (parts[0], *args[1:]), may_change=False)  # a value that was not sent?
        return output

    @staticmethod
    def _loss_of(output: Any) -> Any:
        return output.get("loss") if isinstance(output, Mapping) else output

    def _is_time_to_look(self) -> bool:
        """At the first batch of every epoch, and at steps 1, 2, 4, 8, ...: a step may depend on how far training is."""
        epoch = self.module.trainer.current_epoch
        self._nothing_yet = epoch != self._epoch
        self._epoch = epoch
        self._steps_run += 1
        return self._nothing_yet or self._steps_run & (self._steps_run - 1) == 0

    def _compare(self, key: Hashable, name: str, args: tuple[Any, ...], may_change: bool) -> None:
        """Look at the step again, and send from now on what it needs now.

        Raises:
            CannotCutError: when it needs more than was sent, and has run so already, or needs parameters that are elsewhere.
        """
        if self._steps[key][0].real or self.stages == 1:
            return
        recording, flow = self._look_again(name, args)
        for new, old in zip(flow.crossing, self._steps[key][1].crossing, strict=True):
            more = [crossing for crossing in new if crossing not in old]
            if more and not may_change:
                raise CannotCutError(
                    f"{name} now needs {'the gradient of ' if more[0].gradient else ''}what {more[0].unit!r} returns on a later stage, but did not "
                    "when the model was cut, so that it was not sent. A pipeline needs steps that go the same way in all batches of an epoch."
                )
            if more:
                self._steps[key] = (recording, flow)
                return

    def _look_again(self, name: str, args: tuple[Any, ...]) -> tuple[Recording, Flow]:
        """At a batch of another form than those before.

        Raises:
            CannotCutError: when the step then needs parameters that the cut has put elsewhere.
        """
        assert self.cut is not None
        recording = self._record(name, args)
        flow = Flow(recording, self.cut)
        for stage, names in enumerate(flow.parameters):
            elsewhere = sorted(param for param in names if stage not in self.lives[param])
            if elsewhere:
                raise CannotCutError(
                    f"{name} uses {elsewhere[0]!r} on stage {stage} for this batch, but did not for the first one, by which the model was cut. "
                    "A pipeline needs steps that go through the same modules every time."
                )
        return recording, flow

    def _call(self, name: str, args: tuple[Any, ...]) -> Callable[[], Any]:
        step = getattr(self.module, name)

        def call() -> Any:
            with self._book.open(), self.contexts[name]():
                return step(*args)

        return call

    def _run_schedule(self, flow: Flow, number: int, training: bool) -> None:
        assert self.stage is not None
        if self.stages == 1:
            run_one_stage(self.stage, number, training)
            return
        place = (flow, number, training)
        schedule = self._schedules.pop(place, None)
        if schedule is None:
            schedule = build_schedule(
                self.stage,
                self.mesh.group("pp"),
                flow.crossing,
                number,
                self.kind,
                torch.get_default_dtype(),
                training,
                self.device,
            )
        self._schedules[place] = schedule  # the last used is the last to go
        if len(self._schedules) > KEPT:
            del self._schedules[next(iter(self._schedules))]
        index = torch.arange(number)
        try:
            schedule.step(mb=index, target=index if training else None, return_outputs=False)
        except RuntimeError as error:
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__  # torch wraps what the user's step raised  # noqa: B904
            raise

    def _finish(self, index: int, output: Any) -> Tensor:
        self._outputs.append(batches.mapped(output, Tensor.detach))
        if not torch.is_grad_enabled():
            return torch.zeros((), device=self.device)
        if self._of_sums is not None and token_loss.is_counted(output):
            loss, _ = token_loss.loss_and_count(output)
            return loss * self._of_sums.to(loss.dtype)
        loss = self._loss_of(output)
        if not isinstance(loss, Tensor):
            raise ValueError(
                f"training_step returned {type(output).__name__} without a loss for a micro-batch. A pipeline cannot skip a batch: "
                "return a loss (zero times a sum of outputs, if need be) for every one."
            )
        return loss * self._weights[self._done + index]

    def _share(self, sizes: list[int]) -> Any:
        """Join outputs and logs on the last stage, give them to all, and log once."""
        trainer = self.module.trainer
        joined: Any = None
        if self.index == self.stages - 1:
            joined = (self._joined(sizes), self._book.joined(sizes), bool(trainer.should_stop))
        if self.messages is not None:
            joined = self.messages.share(joined)
        output, logs, stop = joined
        trainer.should_stop = trainer.should_stop or stop  # as the step on the last stage may have asked for
        self._book.replay(logs)
        for buffer in self.written_buffers if self.messages is not None else ():
            broadcast_tensors([self.module.get_buffer(buffer)], self.messages.source, self.mesh.group("pp"))  # type: ignore[union-attr]
        return output

    def _joined(self, sizes: list[int]) -> Any:
        if self._of_sums is None or not any(map(token_loss.is_counted, self._outputs)):
            return batches.join(self._outputs, sizes)
        counted = token_loss.joined(self._outputs)
        others = [{key: value for key, value in output.items() if key not in counted} for output in self._outputs]
        return {**batches.join(others, sizes), **counted}

    def share_metrics(self) -> None:
        """Give the metrics of every stage what those of the last compute. Collective over stages, and over replicas there."""
        if self.messages is not None:
            share_metrics(self.module, self.messages)

    def _seeds(self, number: int, args: tuple[Any, ...]) -> list[int]:
        """A seed for each micro-batch of this data-parallel rank: what one process would draw that runs all of them."""
        ranks, rank = self.mesh.size("data_parallel"), self.mesh.rank("data_parallel")
        generator = self.generator
        if not torch.is_grad_enabled():  # evaluation leaves those of training alone, but differs from batch to batch
            generator = torch.Generator().manual_seed((self._seed + 1 + hash(args[1:])) % (1 << 63))
        drawn = torch.randint(1 << 62, (ranks * number,), generator=generator)
        return drawn[rank * number : (rank + 1) * number].tolist()


@contextmanager
def _mode_of(module: nn.Module, step: str) -> Iterator[None]:
    """As Lightning runs ``step``: evaluation in eval mode, without gradients."""
    if step == "training_step":
        yield
        return
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for each, training in modes.items():
            each.training = training


def _known(lists: Mapping[str, int]) -> str:
    if not lists:
        return "The model has no such list."
    return "Lists in the model: " + ", ".join(f"{name} ({members} members)" for name, members in lists.items()) + "."
