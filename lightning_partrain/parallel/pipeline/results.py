"""What the last stage's steps gave, joined over the micro-batches and made known to every stage."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_partrain.parallel.pipeline import batch as batches
from lightning_partrain.sync.values import Kind, Values

_LOG = inspect.signature(LightningModule.log)


@dataclass
class Logged:
    """One call of ``self.log``: its value and its other arguments as they were given, and a metric's value of the step."""

    name: str
    value: Any
    options: dict[str, Any]
    of_step: Any = None


@dataclass
class LogBook:
    """Takes the place of ``self.log`` while stages run: the calls of each micro-batch, by name and how often it was logged before."""

    root: LightningModule
    pages: list[dict[tuple[str, int], Logged]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[None]:
        """One micro-batch."""
        self.pages.append({})
        before = vars(self.root).get("log")
        vars(self.root)["log"] = self._log
        try:
            yield
        finally:
            del vars(self.root)["log"]
            if before is not None:
                vars(self.root)["log"] = before

    def _log(self, *args: Any, **kwargs: Any) -> None:
        given = _LOG.bind(self.root, *args, **kwargs).arguments
        name, value = given.pop("name"), given.pop("value")
        given.pop("self")
        page = self.pages[-1]
        times = sum(key[0] == name for key in page)
        of_step = value._forward_cache if isinstance(value, Metric) else None
        page[(name, times)] = Logged(name, value.detach() if isinstance(value, Tensor) else value, given, of_step)

    def values(self) -> list[Any]:
        """Logged tensors, metrics left out."""
        return [logged.value for page in self.pages for logged in page.values() if isinstance(logged.value, Tensor)]

    def joined(self, sizes: Sequence[int]) -> list[Logged]:
        """The calls for the whole batch: values reduced over micro-batches of ``sizes`` samples as ``reduce_fx`` says."""
        together = []
        for key in dict.fromkeys(key for page in self.pages for key in page):
            calls = [page[key] for page in self.pages if key in page]
            weights = [size for page, size in zip(self.pages, sizes, strict=True) if key in page]
            options = dict(calls[-1].options)
            counts = [call.options.get("batch_size") for call in calls]
            if all(count is not None for count in counts):
                weights = counts  # type: ignore[assignment]
                options["batch_size"] = sum(weights)
            value = _reduced([call.value for call in calls], weights, options.get("reduce_fx", "mean"))
            cached = [call.of_step for call in calls]
            of_step = batches.weighted_mean(cached, weights) if all(isinstance(c, Tensor) for c in cached) else None
            together.append(Logged(key[0], value, options, of_step))
        return together

    def replay(self, logs: list[Logged]) -> None:
        """Log what :meth:`joined` gave, on this rank."""
        for logged in logs:
            if isinstance(logged.value, Metric):
                logged.value._forward_cache = logged.of_step
            self.root.log(logged.name, logged.value, **logged.options)


def _reduced(values: list[Any], weights: list[int], reduce: Any) -> Any:
    if isinstance(values[0], Metric) or len(values) == 1:
        return values[-1]
    how = reduce if isinstance(reduce, str) else getattr(reduce, "__name__", str(reduce))
    if how in ("mean", "avg"):
        return batches.weighted_mean(values, weights)
    if how == "sum":
        return sum(values)
    if how in ("min", "max"):
        stacked = torch.stack([torch.as_tensor(value).reshape(()) for value in values])
        return getattr(stacked, how)()
    return values[-1]  # Lightning refuses it when it is logged


class _Elsewhere:
    """A logger on a rank where Lightning's loggers do nothing: says so when a step uses it."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def __getattr__(self, name: str) -> Any:
        if name == "experiment" or name.startswith("log_"):
            warnings.warn(
                f"A step used self.logger.{name} on the last stage, which is rank {dist.get_rank()}, but loggers work on rank 0 only: nothing "
                "is logged. Use self.log, or log what the step returns in on_train_batch_end and the like.",
                stacklevel=2,
            )
        return getattr(self._logger, name)


@contextmanager
def loggers_of_a_step(trainer: Any, recording: bool = False) -> Iterator[None]:
    """While a step runs: none when it is only looked at, and on ranks other than 0 loggers that say that they are elsewhere."""
    before = trainer.loggers
    if recording:
        trainer.loggers = [DummyLogger() for _ in before]
    elif not trainer.is_global_zero:
        trainer.loggers = [_Elsewhere(logger) for logger in before]
    try:
        yield
    finally:
        trainer.loggers = before


def messages(root: nn.Module, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> Values:
    """From the last stage to all others of the same data-parallel rank: values, metrics of ``root``, and calls of ``self.log``."""

    def name_of(metric: Metric) -> tuple[str, list[Any]]:
        return next(name for name, module in root.named_modules() if module is metric), []

    kinds = {
        "metric": Kind(lambda v: isinstance(v, Metric), name_of, lambda name, _: root.get_submodule(name)),
        "logged": Kind(
            lambda v: isinstance(v, Logged),
            lambda v: (None, [v.name, v.value, v.options, v.of_step]),
            lambda _, parts: Logged(*parts),
        ),
        "function": Kind(callable, lambda v: (getattr(v, "__name__", ""), []), lambda name, _: name),
    }
    source = dist.get_global_rank(group, dist.get_world_size(group) - 1)
    return Values(source, group, host_group, device, kinds)


def share_metrics(root: nn.Module, messages: Values) -> None:
    """Give the metrics of every stage what those of the last stage compute. Collective over all stages and replicas."""
    if messages.sending:
        for collection in (m for m in root.modules() if isinstance(m, MetricCollection)):
            if any(metric.update_called for metric in collection.values()):
                collection.compute()  # lets metrics of one group share their state
    for metric in (m for m in root.modules() if isinstance(m, Metric)):
        value = [metric.compute(), metric.update_count] if messages.sending and metric.update_called else None
        shared = messages.share(value)
        if shared is not None and not messages.sending:
            metric._computed, metric._update_count = shared
