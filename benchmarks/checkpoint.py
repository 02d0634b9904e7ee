"""What saving and loading a checkpoint costs `hybrid_3d` beside Lightning's full save and torch's distributed checkpoint (DCP).

`python -m benchmarks.checkpoint [--processes 2 4] [--megabytes 400] [--rounds 7]`: 24 float32 matrices and AdamW's two moments of each, on
CPU ranks of one thread each. Within a round, each way saves the same state once, one after the other, on the same forked ranks; a way trains two
steps and saves after both, and the second save counts. All write to one temporary directory (TMPDIR says where), empty again after each
save; no cache is dropped, so that loading reads what is in memory.

`ms` is the time in the call, from a barrier before it to its return on the slowest rank, and `on_disk_ms` the time until the data is
synced to the disk, where the call did not do so: Lightning's full save and DCP with sync_files=False are synced right after it, and the
checkpoint that async_save writes is waited for, while nothing trains. DCP syncs its files by default, and ours always do. `peak_mb` is the
memory that a rank needs beyond what it had before the call, until the data is on the disk (Linux only); it is measured in a round of its
own, in which what is freed is given back to the system, which takes time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.common import report
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer

BLOCKS, STEPS = 8, 2
LINUX = sys.platform.startswith("linux")
LIGHTNING, DCP, DCP_UNSYNCED = "Lightning ddp, one file", "DCP", "DCP, sync_files=False"
FULL, SHARDED, ASYNC = "ours, full", "ours, sharded", "ours, sharded, async_save"

#: Seconds or megabytes, by what was measured.
Sample = dict[str, float]


def width_for(megabytes: float) -> int:
    """Of :class:`Matrices`, for so much state; divides by four, so that rows do."""
    return 4 * max(1, round((megabytes * 1e6 / (BLOCKS * 8 * 12)) ** 0.5 / 4))


class Matrices(pl.LightningModule):
    """Eight blocks of three matrices of ``2 * width ** 2`` numbers or twice as many."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        w = width_for(megabytes)
        sizes = ((w, 2 * w), (2 * w, 2 * w), (2 * w, w))
        self.blocks = nn.Sequential(
            *(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes)) for _ in range(BLOCKS))
        )

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self.blocks(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def state_and_tensor(megabytes: float) -> tuple[float, float]:
    """Megabytes of the whole state, and of its largest tensor."""
    with torch.device("meta"):
        sizes = [param.nbytes / 1e6 for param in Matrices(megabytes).parameters()]
    return 3 * sum(sizes), max(sizes)


def memory(what: str) -> float:
    """Megabytes: ``VmRSS``, what this process has, or ``VmHWM``, the most since that was forgotten."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024 / 1e6


class SaveEachStep(pl.Callback):
    """Saves while the run is on, as a ModelCheckpoint does, and keeps what the last save cost."""

    def __init__(self, measured: Callable[..., Sample]) -> None:
        self.measured = measured
        self.sample: Sample = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy = trainer.strategy
        complete = strategy.wait_for_checkpoint if isinstance(strategy, Hybrid3DStrategy) else None
        self.sample = self.measured(trainer.save_checkpoint, complete)


class TimedLoad(Hybrid3DStrategy):
    """Adds up the seconds in which it reads and takes over a checkpoint."""

    seconds = 0.0

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with self._timed():
            return super().load_checkpoint(*args, **kwargs)

    def load_awaiting(self) -> None:
        with self._timed():
            super().load_awaiting()

    def load_optimizer_state_dict(self, *args: Any) -> None:
        with self._timed():
            super().load_optimizer_state_dict(*args)


class Rank:
    """One rank: saves a state in one way or another, or loads it.

    Args:
        folder: the same on all ranks; checkpoints are written in it.
        keep: leave them there.
        weigh: give freed memory back at once, so that its peak is what is needed.
    """

    def __init__(
        self, rank: int, ranks: int, megabytes: float, folder: Path, keep: bool = False, weigh: bool = False
    ) -> None:
        self.rank, self.ranks, self.megabytes, self.folder, self.keep = rank, ranks, megabytes, folder, keep
        if weigh and LINUX:
            ctypes.CDLL(None).mallopt(-3, 1 << 17)  # M_MMAP_THRESHOLD, fixed
        dist.init_process_group("gloo", rank=rank, world_size=ranks)

    def data(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.ones(STEPS, width_for(self.megabytes))))

    def measured(self, name: str, save: Callable[[Path], Any], complete: Callable[[], Any] | None = None) -> Sample:
        """What ``save`` costs this rank; ``complete`` waits for it, and by default syncs its files."""
        path = self.folder / name
        if self.keep and self.rank == 0:  # of the step before
            shutil.rmtree(path, ignore_errors=True)
        gc.collect()
        dist.barrier()
        if LINUX:
            Path("/proc/self/clear_refs").write_text("5")  # forget the most so far
            before = memory("VmRSS")
        start = time.perf_counter()
        save(path)
        returned = time.perf_counter()
        (complete or partial(self._sync, path))()
        sample = {"seconds": returned - start, "on_disk": time.perf_counter() - start}
        if LINUX:
            sample["peak"] = memory("VmHWM") - before
        dist.barrier()
        if not self.keep and self.rank == 0:
            for left in self.folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        dist.barrier()
        return sample

    def _sync(self, path: Path) -> None:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in files[self.rank :: self.ranks]:
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())

    def lightning(self, name: str, strategy: Any) -> Sample:
        torch.manual_seed(0)
        callback = SaveEachStep(partial(self.measured, name))
        run = trainer(strategy, self.ranks, max_steps=STEPS, callbacks=[callback])
        run.fit(Matrices(self.megabytes), self.data())
        return callback.sample

    def _fully_sharded(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = Matrices(self.megabytes)
        mesh = dist.init_device_mesh("cpu", (self.ranks,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module.blocks, mesh=mesh)
        return module.blocks, module.configure_optimizers()

    def dcp(self, name: str, sync: bool) -> Sample:
        model, optimizer = self._fully_sharded()

        def save(path: Path) -> None:
            state, optimizer_state = get_state_dict(model, optimizer)
            writer = dcp.FileSystemWriter(path, sync_files=sync)
            dcp.save({"model": state, "optimizer": optimizer_state}, storage_writer=writer)

        sample: Sample = {}
        for (batch,) in self.data():
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            sample = self.measured(name, save, (lambda: None) if sync else None)
        return sample

    def load_dcp(self, path: Path) -> Sample:
        model, optimizer = self._fully_sharded()
        dist.barrier()
        start = time.perf_counter()
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)  # in place
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        return {"seconds": time.perf_counter() - start}

    def load_ours(self, path: Path) -> Sample:
        strategy = TimedLoad(zero_stage=3)
        run = trainer(strategy, self.ranks, max_steps=STEPS)
        run.fit(Matrices(self.megabytes), self.data(), ckpt_path=path)
        return {"seconds": strategy.seconds}

    def ways(self) -> dict[str, Callable[[], Sample]]:
        def ours(name: str, **options: Any) -> Callable[[], Sample]:
            return lambda: self.lightning(name, Hybrid3DStrategy(zero_stage=3, **options))

        return {
            LIGHTNING: lambda: self.lightning(LIGHTNING, DDPStrategy()),
            DCP: partial(self.dcp, DCP, True),
            DCP_UNSYNCED: partial(self.dcp, DCP_UNSYNCED, False),
            FULL: ours(FULL, checkpoint_format="full"),
            SHARDED: ours(SHARDED, checkpoint_format="sharded"),
            ASYNC: ours(ASYNC, checkpoint_format="sharded", async_save=True),
        }

    def loads(self) -> dict[str, Callable[[], Sample]]:
        return {DCP: lambda: self.load_dcp(self.folder / DCP), SHARDED: lambda: self.load_ours(self.folder / SHARDED)}


def in_turn(ranks: int, rounds: int, contest: Callable[[int], dict[str, Callable[[], Sample]]]) -> dict[str, Any]:
    """Name -> measure -> what the slowest (or largest) rank needed, by round. Each round begins with another one."""

    def rounds_of(rank: int) -> list[dict[str, Sample]]:
        ways = contest(rank)
        names, results = list(ways), []
        for number in range(rounds):
            first = number % len(names)
            results.append({name: ways[name]() for name in (*names[first:], *names[:first])})
        return results

    by_rank = run_ranks(ranks, rounds_of, timeout=3600)
    return {
        name: {
            measure: [max(rank[number][name][measure] for rank in by_rank) for number in range(rounds)]
            for measure in sample
        }
        for name, sample in by_rank[0][0].items()
    }


def row(processes: int, name: str, **values: Any) -> dict[str, Any]:
    columns = ("ms", "range_ms", "on_disk_ms", "peak_mb", "ratio", "ratio_range", "at_most", "held")
    return {"processes": processes, "row": name, **dict.fromkeys(columns, ""), **values}


def cost(processes: int, name: str, found: dict[str, list[float]]) -> dict[str, Any]:
    milliseconds = [each * 1e3 for each in found["seconds"]]
    values: dict[str, Any] = {
        "ms": round(statistics.median(milliseconds), 1),
        "range_ms": [round(min(milliseconds), 1), round(max(milliseconds), 1)],
    }
    if "on_disk" in found:
        values["on_disk_ms"] = round(statistics.median(found["on_disk"]) * 1e3, 1)
    if "peak" in found:
        values["peak_mb"] = round(statistics.median(found["peak"]), 1)
    return row(processes, name, **values)


def claim(processes: int, name: str, ratios: list[float], limit: float | None = None) -> dict[str, Any]:
    ratio = statistics.median(ratios)
    values: dict[str, Any] = {"ratio": round(ratio, 3), "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)]}
    if limit is not None:
        values |= {"at_most": limit, "held": "held" if ratio <= limit else "not held"}
    return row(processes, name, **values)


def by_round(a: list[float], b: list[float]) -> list[float]:
    return [x / y for x, y in zip(a, b, strict=True)]


def save_rows(processes: int, megabytes: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    saved = in_turn(processes, rounds, lambda rank: Rank(rank, processes, megabytes, folder).ways())
    if LINUX:
        weighed = in_turn(processes, 1, lambda rank: Rank(rank, processes, megabytes, folder, weigh=True).ways())
        saved = {name: {**found, "peak": weighed[name]["peak"]} for name, found in saved.items()}
    state, tensor = state_and_tensor(megabytes)
    allowed = state / processes + tensor
    rows = [cost(processes, f"save: {name}", found) for name, found in saved.items()]
    sharded, asynchronous = saved[SHARDED], saved[ASYNC]
    rows += [
        claim(processes, "sharded / DCP, which syncs", by_round(sharded["seconds"], saved[DCP]["seconds"]), 1.25),
        claim(processes, "async, in the call / sharded", by_round(asynchronous["seconds"], sharded["seconds"]), 0.15),
        claim(processes, "sharded / Lightning", by_round(sharded["seconds"], saved[LIGHTNING]["seconds"])),
        claim(processes, "sharded / Lightning, synced", by_round(sharded["seconds"], saved[LIGHTNING]["on_disk"])),
    ]
    if LINUX:
        name = f"peak of {{}} / {state / processes:.0f} MB of shard + {tensor:.1f} MB of a tensor"
        rows += [
            claim(processes, name.format(what), [each / allowed for each in found["peak"]], 1.0)
            for what, found in (("sharded", sharded), ("async", asynchronous))
        ]
    return rows


def load_rows(processes: int, megabytes: float, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """On as many ranks as saved it, and on half as many, which hold other parts."""

    def save(rank: int) -> None:
        ways = Rank(rank, processes, megabytes, folder, keep=True).ways()
        ways[DCP]()
        ways[SHARDED]()

    run_ranks(processes, save, timeout=600)
    rows = []
    for ranks in dict.fromkeys((processes, max(1, processes // 2))):
        loaded = in_turn(ranks, rounds, lambda rank, ranks=ranks: Rank(rank, ranks, megabytes, folder).loads())  # type: ignore[misc]
        rows += [cost(processes, f"load on {ranks}: {name}", found) for name, found in loaded.items()]
        ratios = by_round(loaded[SHARDED]["seconds"], loaded[DCP]["seconds"])
        rows.append(claim(processes, f"load on {ranks}: sharded / DCP", ratios))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes", type=float, default=400, help="parameters and AdamW's moments together")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()

    state, tensor = state_and_tensor(arguments.megabytes)
    print(
        f"CPU figures. {state:.1f} MB of state, tensors of up to {tensor:.1f} MB, {arguments.rounds} rounds", flush=True
    )
    rows = []
    for processes, measure in ((n, measure) for n in arguments.processes for measure in (save_rows, load_rows)):
        with tempfile.TemporaryDirectory() as folder:
            found = measure(processes, arguments.megabytes, arguments.rounds, Path(folder))
        rows += [{**each, "state_mb": round(state, 1), "rounds": arguments.rounds} for each in found]
        print(*found, sep="\n", flush=True)
    report("checkpoint", rows)
    for each in rows:
        if each["held"]:
            print(
                f"{each['held']}: {each['processes']} processes, {each['row']}: {each['ratio']}, at most {each['at_most']}"
            )


if __name__ == "__main__":
    main()
