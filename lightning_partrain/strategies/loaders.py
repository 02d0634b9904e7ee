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


class LoaderWrapper:
    """A loader with another end; everything else is the loader's own, also what is set from outside (Lightning resets the
    iterator of persistent workers that way).

    Args:
        length: how many batches there are at most; ``None`` when nobody knows.
    """

    _OWN = frozenset(("_loader", "_length", "_group"))

    def __init__(self, loader: Any, length: int | None) -> None:
        self._loader = loader
        self._length = length

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The data loader of some rank has no length.")
        return self._length


class ShortenedLoader(LoaderWrapper):
    """The first ``length`` batches."""

    def __iter__(self) -> Iterator[Any]:
        for _, batch in zip(range(len(self)), self._loader, strict=False):
            yield batch


class StartedLoader(LoaderWrapper):
    """A loader of which somebody has taken the first batch already: its first iteration begins with that one."""

    _OWN = frozenset((*LoaderWrapper._OWN, "_start"))

    def __init__(self, loader: Any, first: Any, rest: Iterator[Any]) -> None:
        super().__init__(loader, sized_len(loader))
        self._start: tuple[Any, Iterator[Any]] | None = (first, rest)

    def __iter__(self) -> Iterator[Any]:
        if self._start is None:
            yield from self._loader
            return
        (first, rest), self._start = self._start, None
        yield first
        yield from rest


class AgreedLoader(LoaderWrapper):
    """Ends on all ranks as soon as one of them has no more batches; one small all-reduce a batch, on the host."""

    def __init__(self, loader: Any, length: int | None, group: dist.ProcessGroup) -> None:
        super().__init__(loader, length)
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        missing = object()
        count = 0
        while True:
            batch = next(batches, missing)
            there = int(batch is not missing)
            votes = torch.tensor([there, -there])
            dist.all_reduce(votes, dist.ReduceOp.MIN, group=self._group)
            everyone, someone = votes.tolist()
            if not everyone:
                if someone:
                    rank_zero_warn(
                        f"A data loader ended after {count} batches, when the first of the ranks ran out of them."
                    )
                return
            count += 1
            yield batch


def _lengths(loader: Any, control_group: dist.ProcessGroup) -> Any:
    """Of all ranks: the lengths, and whether they are certain."""
    length, certain = sized_len(loader), not has_iterable_dataset(loader)
    return zip(*gather_json((length, certain), torch.device("cpu"), control_group), strict=True)


def same_length(loader: Any, control_group: dist.ProcessGroup) -> bool:
    """Whether all ranks are sure to have as many batches. Collective over ``control_group``."""
    lengths, all_certain = _lengths(loader, control_group)
    return len(set(lengths)) == 1 and None not in lengths and all(all_certain)


def agree_on_length(loader: Any, control_group: dist.ProcessGroup) -> Any:
    """``loader`` itself when all ranks know the same length, else one that ends on all of them together.

    Collective over ``control_group`` (CPU tensors). The length of an iterable data set is taken as a promise only.
    """
    lengths, all_certain = _lengths(loader, control_group)
    shortest = None if None in lengths else min(lengths)
    if shortest is not None and len(set(lengths)) > 1:
        rank_zero_warn(
            f"The data loaders of the ranks have {', '.join(map(str, lengths))} batches; all of them stop after {shortest}. "
            "Give every rank as many batches (use_distributed_sampler=True does) to see all the data."
        )
    if shortest is None or not all(all_certain):
        return AgreedLoader(loader, shortest, control_group)
    return loader if len(set(lengths)) == 1 else ShortenedLoader(loader, shortest)


def seed_workers(loader: Any, data_parallel_rank: int) -> None:
    """Let the workers of ranks that see the same samples draw the same random numbers."""
    if hasattr(loader, "worker_init_fn") and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_parallel_rank)
