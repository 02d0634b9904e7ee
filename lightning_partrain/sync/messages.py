"""Messages between ranks: JSON in byte tensors, never pickle."""

from __future__ import annotations

import json
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist


def _encode(value: Any) -> bytes:
    def default(item: Any) -> Any:
        if isinstance(item, PurePath):
            return {"__path__": str(item)}
        if isinstance(item, torch.Tensor) and item.numel() == 1:
            return item.item()
        raise TypeError(
            f"Only JSON values, paths and one-element tensors can be sent between ranks, not {type(item).__name__}. "
            "Send tensors with strategy.all_gather or torch.distributed."
        )

    return json.dumps(value, default=default).encode()


def _decode(data: bytes) -> Any:
    return json.loads(data, object_hook=lambda d: Path(d["__path__"]) if d.keys() == {"__path__"} else d)


def _bytes_tensor(data: bytes, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(data or b" "), dtype=torch.uint8).to(device)


def broadcast_json(value: Any, src: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """``value`` of global rank ``src``, on every rank of ``group``. Tuples arrive as lists, paths as paths.

    Raises:
        TypeError: on the sending rank, for what JSON cannot hold.
    """
    sending = dist.get_rank() == src
    data = _bytes_tensor(_encode(value), device) if sending else torch.empty(0, dtype=torch.uint8, device=device)
    size = torch.tensor([data.numel()], device=device)
    dist.broadcast(size, src, group=group)
    if not sending:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, src, group=group)
    return value if sending else _decode(data.cpu().numpy().tobytes())


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``value``, in the order of the group's ranks, on every rank."""
    data = _bytes_tensor(_encode(value), device)
    world = dist.get_world_size(group)
    sizes = [torch.empty(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=device), group=group)
    longest = int(torch.cat(sizes).max())
    padded = torch.cat([data, data.new_full((longest - data.numel(),), ord(" "))])
    parts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(world)]
    dist.all_gather(parts, padded, group=group)
    return [_decode(part.cpu().numpy().tobytes()) for part in parts]
