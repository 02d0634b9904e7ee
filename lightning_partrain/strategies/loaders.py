"""Data loaders of ranks that may not agree on how many batches there are."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_partrain.compat import pl_worker_init_function
from lightning_partrain.sync.messages import gather_json


class _Wrapped:
    """A loader with another end; everything else is the loader's own."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class ShortenedLoader(_Wrapped):
    """The first ``length`` batches."""

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(self._length), self._loader, strict=False):
            yield batch


class AgreedLoader(_Wrapped):
    """Ends on all ranks as soon as one of them has no more batches; one small all-reduce a batch, on the host."""

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        super().__init__(loader)
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        missing = object()
        count = 0
        while True:
            batch = next(batches, missing)
            everyone = torch.tensor([int(batch is not missing)])
            dist.all_reduce(everyone, dist.ReduceOp.MIN, group=self._group)
            if not everyone.item():
                if batch is not missing:
                    rank_zero_warn(
                        f"The loader ended after {count} batches, when the first of the ranks ran out of them."
                    )
                return
            count += 1
            yield batch


def agree_on_length(loader: Any, control_group: dist.ProcessGroup) -> Any:
    """``loader`` itself when all ranks know the same length, else one that ends on all of them together.

    Collective over ``control_group`` (CPU tensors).
    """
    length = sized_len(loader)
    known = length is not None and not has_iterable_dataset(loader)
    lengths = gather_json(length if known else None, torch.device("cpu"), control_group)
    if None in lengths:
        return AgreedLoader(loader, control_group)
    if len(set(lengths)) == 1:
        return loader
    rank_zero_warn(
        f"The data loaders of the ranks have {', '.join(map(str, lengths))} batches; all of them stop after {min(lengths)}. "
        "Give every rank as many batches (use_distributed_sampler=True does) to see all the data."
    )
    return ShortenedLoader(loader, min(lengths))


def seed_workers(loader: Any, data_parallel_rank: int) -> None:
    """Let the workers of ranks that see the same samples draw the same random numbers."""
    if hasattr(loader, "worker_init_fn") and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_parallel_rank)
