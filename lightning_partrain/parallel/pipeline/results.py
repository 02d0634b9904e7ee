"""What the last stage's steps gave, joined over the micro-batches and made known to every stage."""

from __future__ import annotations

import inspect
import json
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


class Messages:
    """From the last stage to all others of the same data-parallel rank.

    What is plain text goes over the host once and is remembered; afterwards a step sends one number for it, and the tensors.

    Args:
        group: the stages.
        host_group: the same ranks, for tensors on the host.
    """

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._host_group, self._device = group, host_group, device
        self.source = dist.get_global_rank(group, dist.get_world_size(group) - 1)
        self._texts: list[str] = []

    @property
    def sending(self) -> bool:
        return dist.get_rank() == self.source

    def share(self, value: Any, root: nn.Module) -> Any:
        """``value`` of the last stage on every stage: tensors, plain values, metrics of ``root``, and containers of them."""
        tensors: list[Tensor] = []
        numbers: list[float] = []
        packed = json.loads(self._share_text(json.dumps(_pack(value, tensors, numbers, root)) if self.sending else ""))
        if not self.sending:
            tensors = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in _shapes(packed)]
            numbers = [0.0] * _count_numbers(packed)
        if numbers:
            sent = torch.tensor(numbers, dtype=torch.float64)
            dist.broadcast(sent, self.source, group=self._host_group)
            numbers = sent.tolist()
        tensors = [tensor.to(self._device) for tensor in tensors]
        for tensor in tensors:
            if tensor.numel():
                dist.broadcast(_as_sent(tensor), self.source, group=self._group)
        return _unpack(packed, iter(tensors), iter(numbers), root)

    def _share_text(self, text: str) -> str:
        known = self.sending and text in self._texts
        number = self._texts.index(text) if known else len(self._texts)
        size = 0 if known else len(text.encode())
        head = torch.tensor([number, size])
        dist.broadcast(head, self.source, group=self._host_group)
        number, size = head.tolist()
        if size:
            body = (
                torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
                if self.sending
                else torch.empty(size, dtype=torch.uint8)
            )
            dist.broadcast(body, self.source, group=self._host_group)
            self._texts.append(body.numpy().tobytes().decode())
        return self._texts[number]


def _as_sent(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _pack(value: Any, tensors: list[Tensor], numbers: list[float], root: nn.Module) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        tensors.append(value.contiguous())
        return {"tensor": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, Metric):
        return {"metric": next(name for name, module in root.named_modules() if module is value)}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float)):  # a number that changes is no part of the text
        numbers.append(value)
        return {"number": type(value).__name__}
    if callable(value):
        return {"function": getattr(value, "__name__", "")}
    if isinstance(value, dict):
        return {
            "keys": [_pack(k, tensors, numbers, root) for k in value],
            "values": [_pack(v, tensors, numbers, root) for v in value.values()],
        }
    if type(value) in (list, tuple):
        return {type(value).__name__: [_pack(v, tensors, numbers, root) for v in value]}
    if isinstance(value, Logged):
        fields = (value.name, value.value, value.options, value.of_step)
        return {"logged": [_pack(each, tensors, numbers, root) for each in fields]}
    return {"refused": type(value).__name__}


def _shapes(packed: Any) -> list[tuple[list[int], torch.dtype]]:
    if isinstance(packed, list):
        return [shape for item in packed for shape in _shapes(item)]
    if not isinstance(packed, dict):
        return []
    if "tensor" in packed:
        return [(packed["tensor"], getattr(torch, packed["dtype"]))]
    return [shape for item in packed.values() for shape in _shapes(item)]


def _count_numbers(packed: Any) -> int:
    if isinstance(packed, dict):
        return 1 if "number" in packed else sum(map(_count_numbers, packed.values()))
    return sum(map(_count_numbers, packed)) if isinstance(packed, list) else 0


def _unpack(packed: Any, tensors: Iterator[Tensor], numbers: Iterator[float], root: nn.Module) -> Any:
    if not isinstance(packed, dict):
        return packed
    (kind, content), *rest = packed.items()
    if kind == "tensor":
        return next(tensors)
    if kind == "number":
        return next(numbers) if content == "float" else int(next(numbers))
    if kind == "metric":
        return root.get_submodule(content)
    if kind == "function":
        return content
    if kind == "refused":
        raise TypeError(
            f"A step returned a {content}, which the last stage cannot send to the others. Return tensors, plain values, and lists, "
            "tuples or dictionaries of them."
        )
    if kind == "keys":
        keys = [_unpack(k, tensors, numbers, root) for k in content]
        return dict(zip(keys, (_unpack(v, tensors, numbers, root) for v in rest[0][1]), strict=True))
    items = [_unpack(item, tensors, numbers, root) for item in content]
    if kind == "logged":
        return Logged(*items)
    return tuple(items) if kind == "tuple" else items


def share_metrics(root: nn.Module, messages: Messages) -> None:
    """Give the metrics of every stage what those of the last stage compute. Collective over all stages and replicas."""
    if messages.sending:
        for collection in (m for m in root.modules() if isinstance(m, MetricCollection)):
            if any(metric.update_called for metric in collection.values()):
                collection.compute()  # lets metrics of one group share their state
    for metric in (m for m in root.modules() if isinstance(m, Metric)):
        value = [metric.compute(), metric.update_count] if messages.sending and metric.update_called else None
        shared = messages.share(value, root)
        if shared is not None and not messages.sending:
            metric._computed, metric._update_count = shared
