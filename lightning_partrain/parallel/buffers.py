"""Buffers follow rank 0, as in torch's DDP."""

from __future__ import annotations

from collections.abc import Collection

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_partrain.parallel.batchnorm import batch_norm_layers
from lightning_partrain.parallel.hollow import is_hollow

#: Tensors travel in pieces of about this size.
BROADCAST_BYTES = 64 << 20


@torch.no_grad()
def broadcast_tensors(tensors: list[Tensor], source: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank of ``group`` the ``tensors`` of global rank ``source``, many small ones at a time."""
    kinds: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and not isinstance(tensor, DTensor) and not is_hollow(tensor):
            kinds.setdefault(tensor.dtype, []).append(tensor)
    for kind in kinds.values():
        while kind:
            batch = [kind.pop()]
            size = batch[0].nbytes
            while kind and size + kind[-1].nbytes <= BROADCAST_BYTES:
                size += kind[-1].nbytes
                batch.append(kind.pop())
            flat = torch.cat([t.reshape(-1) for t in batch])
            dist.broadcast(flat.view(torch.uint8) if flat.dtype == torch.bool else flat, source, group=group)
            for tensor, part in zip(batch, flat.split([t.numel() for t in batch]), strict=True):
                tensor.copy_(part.view(tensor.shape))


class SharedBuffers:
    """The buffers of ``module``, equal on all ranks of ``group`` from the start; see :meth:`share`.

    Args:
        group: ranks that hold the same buffers; all of them by default.
        names: of the buffers to look after; all of them by default.
    """

    def __init__(
        self, module: nn.Module, group: dist.ProcessGroup | None = None, names: Collection[str] | None = None
    ) -> None:
        norms = set(batch_norm_layers(module))
        self._group = group
        self._source = dist.get_global_rank(group, 0) if group is not None else 0
        self._places = [
            (m, key, m in norms)
            for prefix, m in module.named_modules()
            for key in m._buffers
            if names is None or (f"{prefix}.{key}" if prefix else key) in names
        ]
        self._seen: dict[int, tuple[int, int]] = {}
        self._changed(with_batch_norm=True)

    def share(self, with_batch_norm: bool) -> None:
        """Bring the buffers that have changed from the first rank.

        Before each training step all but the running statistics of batch norm, which the step does not read; before
        evaluation and saving those too.
        """
        changed = self._changed(with_batch_norm)
        if changed:
            broadcast_tensors(list(changed.values()), self._source, self._group)
            self._seen.update({index: (id(buffer), buffer._version) for index, buffer in changed.items()})

    def _changed(self, with_batch_norm: bool) -> dict[int, Tensor]:
        changed: dict[int, Tensor] = {}
        for index, (module, key, batch_norm) in enumerate(self._places):
            buffer = module._buffers[key]
            if buffer is None or (batch_norm and not with_batch_norm):
                continue
            state = (id(buffer), buffer._version)
            # batch norm's kernel does not count versions
            if batch_norm or self._seen.setdefault(index, state) != state:
                changed[index] = buffer
        return changed
