"""The oracle: a fit over many ranks against one process on the same global batches, step by step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain import numerics
from lightning_partrain.parallel import placement
from lightning_partrain.parallel.placement import Fused
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import BATCH, CASES, Case
from tests.pipeline_models import PIPELINE_CASES
from tests.tensor_models import TENSOR_CASES


@dataclass(frozen=True)
class Run:
    """What is trained and how, apart from the layout."""

    case: str = "gpt"
    precision: str = "64-true"
    optimizer: str = "adamw"
    accumulate: int = 1
    clip: tuple[str, float] | None = None
    epochs: int = 1
    micro_batches: int | None = None  # of the one process that is the oracle


@dataclass
class Record:
    """What one rank saw."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def case_of(run: Run) -> Case:
    return {**CASES, **PIPELINE_CASES, **TENSOR_CASES}[run.case]


def whole(tensor: Tensor, fused: Fused | None = None) -> Tensor:
    return (placement.whole(tensor, fused) if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole_by_name(trainer: pl.Trainer, named: dict[str, Tensor]) -> dict[str, Tensor]:
    fused = getattr(trainer.strategy, "_fused_names", {})
    return {name: whole(tensor, fused.get(name)) for name, tensor in named.items()}


class Recorder(pl.Callback):
    """Collects the data-parallel mean loss, gradients, their norm, and parameters at each optimizer step."""

    def __init__(self) -> None:
        self.record = Record()

    @staticmethod
    def _parameters(trainer: pl.Trainer) -> dict[str, torch.nn.Parameter]:
        layout = getattr(trainer.strategy, "model_parallel", None)
        return layout.named_parameters() if layout else dict(trainer.lightning_module.named_parameters())

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.record.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")))

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        params = self._parameters(trainer)
        norm = getattr(trainer.strategy, "grad_norm", lambda: numerics.grad_norm(params.values()))
        self.record.norms.append(float(norm()))
        gradients = {n: p.grad for n, p in params.items() if p.grad is not None}
        self.record.gradients.append(whole_by_name(trainer, gradients))

    def on_before_zero_grad(self, trainer: pl.Trainer, *_: Any) -> None:
        self.record.parameters.append(whole_by_name(trainer, self._parameters(trainer)))

    def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
        self.record.metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}


def shares(
    data: tuple[Tensor, ...], rank: int, ranks: int, batch: int = BATCH, loader: Callable[..., Any] | None = None
) -> Any:
    """Rank ``rank``'s samples: its part of each global batch."""
    samples = data[0].shape[0]
    index = torch.arange(samples).view(-1, ranks, batch // ranks)[:, rank].reshape(-1)
    mine = tuple(d[index] for d in data)
    if loader is not None:
        return loader(mine, batch // ranks)
    return DataLoader(TensorDataset(*mine), batch_size=batch // ranks)


def fit(
    run: Run, rank: int = 0, ranks: int = 1, strategy: Any = "auto", stages: int = 1, tensor: int = 1, **options: Any
) -> Record:
    case = case_of(run)
    torch.manual_seed(0)
    module = case.build()
    module.optimizer = run.optimizer
    data = case.data(torch.float64 if run.precision == "64-true" else torch.float32)
    recorder = Recorder()
    if run.clip is not None:
        options |= {"gradient_clip_algorithm": run.clip[0], "gradient_clip_val": run.clip[1]}
    replicas = ranks // stages // tensor
    loader = shares(data, rank // tensor % replicas, replicas, loader=case.loader)
    trainer(
        strategy,
        ranks,
        precision=run.precision,
        max_epochs=run.epochs,
        accumulate_grad_batches=run.accumulate,
        sync_batchnorm=case.synchronize_batch_norm and ranks > 1,
        callbacks=[recorder],
        **options,
    ).fit(module, loader, loader)
    recorder.record.parameters.append({n: whole(p) for n, p in module.named_parameters()})
    recorder.record.buffers = {n: b.clone() for n, b in module.named_buffers()}
    return recorder.record


@cache
def one_process(run: Run) -> Record:
    """The oracle's record; forked, so that the test process itself computes nothing."""
    strategy = "auto" if run.micro_batches is None else Hybrid3DStrategy(num_microbatches=run.micro_batches)
    return run_ranks(1, lambda _: fit(run, strategy=strategy))[0]


def without_gradient(expected: Record, double: bool) -> dict[str, Tensor]:
    """Elements whose true gradient is zero (a bias before a batch norm, the key's bias in attention): what an optimizer
    that divides by the gradient's size makes of their rounding noise is compared absolutely."""
    noise = 1e-12 if double else 1e-6
    flat: dict[str, Tensor] = {}
    for gradients in expected.gradients:
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        for name, grad in gradients.items():
            flat[name] = flat.get(name, torch.ones_like(grad, dtype=torch.bool)) & (grad.abs() < noise * largest)
    return flat


def far(
    name: str,
    got: dict[str, Tensor],
    expected: dict[str, Tensor],
    limit: float,
    flat: dict[str, Tensor],
    floor: float,
) -> list[str]:
    """Tensors that differ by more than ``limit`` of their largest value (at least ``floor``); elements of ``flat`` by
    more than ``limit``."""
    if got.keys() != expected.keys():
        return [f"{name}: other names: {sorted(got.keys() ^ expected.keys())}"]
    bad = []
    for key, value in expected.items():
        if value.numel() == 0:
            continue
        scale = torch.full_like(value, max(float(value.abs().max()), floor), dtype=torch.float64)
        if key in flat:
            scale[flat[key]] = 1.0
        difference = float(((got[key].double() - value.double()).abs() / scale).max())
        if not difference <= limit:
            bad.append(f"{name} {key}: {difference:.1e}")
    return bad


def differences(got: Record, expected: Record, run: Run) -> list[str]:
    """What is not the same, in words; empty when all is."""
    double = run.precision == "64-true"
    limit = (1e-6 if case_of(run).float32_inside else 1e-10) if double else 1e-5
    bad = []
    for what in ("losses", "norms"):
        ours, theirs = getattr(got, what), getattr(expected, what)
        if len(ours) != len(theirs):
            bad.append(f"{len(ours)} {what} instead of {len(theirs)}")
        for step, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            if not abs(a - b) <= limit * max(abs(b), 1e-12):
                bad.append(f"{what} at {step}: {a} instead of {b}")
    for key, value in expected.metrics.items():
        if key.endswith("_step") or (key == "train_loss" and "train_loss_epoch" in expected.metrics):
            continue  # a step's value is the rank's own
        if not abs(got.metrics.get(key, float("nan")) - value) <= limit * abs(value):
            bad.append(f"metric {key}: {got.metrics.get(key)} instead of {value}")
    steps = (
        len(expected.gradients) if double else 1
    )  # in float32, AdamW carries the last digit of one step into the next
    flat = without_gradient(expected, double)
    for step in range(steps):
        largest = max(float(g.abs().max()) for g in expected.gradients[step].values() if g.numel())
        bad += far(f"gradient at {step}", got.gradients[step], expected.gradients[step], limit, flat, 1e-3 * largest)
    if double:
        if len(got.parameters) != len(expected.parameters):
            bad.append(f"{len(got.parameters)} optimizer steps instead of {len(expected.parameters)}")
        for step, (ours_, theirs_) in enumerate(zip(got.parameters, expected.parameters, strict=False)):
            bad += far(f"parameter at {step}", ours_, theirs_, limit, flat, 1e-3)
        bad += far("buffer", got.buffers, expected.buffers, limit, {}, 1.0)
    return bad


def complete(records: list[Record], stages: int) -> None:
    """Give each rank's record what only other stages of the same data-parallel rank hold."""
    replicas = len(records) // stages
    for replica in range(replicas):
        column = records[replica::replicas]
        for what in ("gradients", "parameters"):
            by_step = [
                dict(kv for each in step for kv in each.items())
                for step in zip(*(getattr(r, what) for r in column), strict=True)
            ]
            for record in column:
                setattr(
                    record, what, [{**whole, **own} for whole, own in zip(by_step, getattr(record, what), strict=True)]
                )


def assert_same_as_one_process(
    run: Run,
    ranks: int,
    strategy: Callable[[], Any],
    timeout: float = 120.0,
    stages: int = 1,
    tensor: int = 1,
    **options: Any,
) -> list[Record]:
    """Train ``run`` on ``ranks`` forked ranks, ``stages`` of them a pipeline and ``tensor`` of them one layer, and in one process; every rank must have seen
    the same.

    Losses, epoch metrics and the gradient norm to 1e-10 relative in float64 (1e-5 in float32), gradients and parameters
    by name at every optimizer step in float64.
    """
    expected = one_process(run)
    records = run_ranks(
        ranks, lambda rank: fit(run, rank, ranks, strategy(), stages, tensor, **options), timeout=timeout
    )
    complete(records, stages)
    bad = [f"rank {rank}: {line}" for rank, record in enumerate(records) for line in differences(record, expected, run)]
    assert not bad, f"{run} on {ranks} ranks:\n" + "\n".join(bad[:2000])
    return records


def hybrid(**arguments: Any) -> Callable[[], Hybrid3DStrategy]:
    return lambda: Hybrid3DStrategy(**arguments)


__all__ = [
    "Record",
    "Recorder",
    "Run",
    "assert_same_as_one_process",
    "fit",
    "hybrid",
    "one_process",
    "shares",
    "whole",
]
