"""What an optimizer step is made of, in words: which run on one device is the same."""

from __future__ import annotations

from typing import Any

from lightning_partrain.mesh import ParallelMesh


def samples_of_a_batch(loader: Any) -> int | None:
    """Of one data-parallel rank, where a single loader with a batch size says so."""
    loaders = list(getattr(loader, "flattened", [loader]))
    size = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    if size is None and len(loaders) == 1:
        size = getattr(getattr(loaders[0], "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def meaning(mesh: ParallelMesh, loader: Any, accumulate: int) -> str:
    """A sentence for the log.

    Args:
        loader: the training loader of the Trainer.
        accumulate: batches of each rank a step.
    """
    ranks, size = mesh.size("data_parallel"), samples_of_a_batch(loader)
    parts = [f"{ranks} data-parallel rank{'s' if ranks > 1 else ''}"]
    if size is not None:
        parts.append(f"{size} samples")
    if accumulate > 1:
        parts.append(f"{accumulate} batches")
    if size is None:
        what = f"{' x '.join(parts)}, a batch of the loader each"
        same = f"{ranks} times the batch" if ranks > 1 else "the same batch"
    else:
        what = f"{' x '.join(parts)} = {ranks * size * accumulate} samples"
        same = f"batch_size={ranks * size}"
    accumulated = f" and accumulate_grad_batches={accumulate}" if accumulate > 1 else ""
    others = mesh.sizes.tp * mesh.sizes.pp
    peers = f" (the {others} ranks of each hold parts of the model, and work on the same samples)" if others > 1 else ""
    return f"An optimizer step takes {what}{peers}: one device does the same with {same}{accumulated}, and the same learning rate."
