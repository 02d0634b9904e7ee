"""Messages between ranks: JSON in byte tensors, never pickle."""

from __future__ import annotations

import itertools
import json
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist


def _plain(value: Any) -> Any:
    """``value`` in JSON's own types; ``json.dumps`` alone would turn keys that are numbers into text without a word."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, PurePath):
        return {"__path__": str(value)}
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _plain(value.item())
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        strange = next((key for key in value if not isinstance(key, str)), None)
        if strange is None:
            return {key: _plain(item) for key, item in value.items()}
        raise TypeError(
            f"Only dictionaries whose keys are text can be sent between ranks, not {type(strange).__name__}."
        )
    raise TypeError(
        f"Only JSON values, paths and one-element tensors can be sent between ranks, not {type(value).__name__}. "
        "Send tensors with strategy.all_gather or torch.distributed."
    )


def _encode(value: Any) -> bytes:
    """What cannot be sent becomes a message that :func:`_decode` raises, so that no rank is left waiting for it."""
    try:
        return json.dumps(_plain(value)).encode()
    except TypeError as error:
        return json.dumps({"__refused__": f"{error} Rank {dist.get_rank()} tried to."}).encode()


def _decode(data: torch.Tensor) -> Any:
    def restore(item: dict[str, Any]) -> Any:
        if item.keys() == {"__refused__"}:
            raise TypeError(item["__refused__"])
        return Path(item["__path__"]) if item.keys() == {"__path__"} else item

    return json.loads(data.cpu().numpy().tobytes(), object_hook=restore)


def _bytes_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def broadcast_json(value: Any, src: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """``value`` of global rank ``src``, equal on every rank of ``group``: tuples arrive as lists, one-element tensors as
    numbers, paths as paths, also on the sending rank.

    Raises:
        TypeError: on every rank, for what JSON cannot hold.
    """
    sending = dist.get_rank() == src
    data = _bytes_tensor(_encode(value), device) if sending else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src, group=group)
    if not sending:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src, group=group)
    return _decode(data)


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in the order of the group's ranks, on every rank. See :func:`broadcast_json`."""
    data = _bytes_tensor(_encode(value), device)
    world = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    longest = int(torch.cat(sizes).max())
    padded = torch.cat([data, data.new_full((longest - data.numel(),), ord(" "))])
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part) for part in parts]


_meetings = itertools.count()


def meet(store: dist.Store, timeout: timedelta) -> list[int]:
    """Wait until every rank has called this; the ranks that have not after ``timeout``.

    Unlike a collective it can be left alone without harm to the next one, and unlike ``monitored_barrier`` it keeps its
    time on every rank (torch 2.13 waits for the group's own timeout on all but rank 0).
    """
    rank, world, meeting = dist.get_rank(), dist.get_world_size(), next(_meetings)
    place = f"lightning_partrain/meeting/{meeting}"
    store.set(f"{place}/{rank}", "")
    if store.add(f"{place}/count", 1) == world:
        store.set(f"{place}/all", "")
    try:
        store.wait([f"{place}/all"], timeout)
    except dist.DistError:
        return [other for other in range(world) if not store.check([f"{place}/{other}"])]
    done = f"lightning_partrain/meeting/{meeting - 2}"  # who is here has left the last one, so all have left that before it
    for key in (rank, "count", "all") if rank == 0 else (rank,):
        store.delete_key(f"{done}/{key}")
    return []
