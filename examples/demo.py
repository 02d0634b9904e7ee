"""What ``make demo`` runs: the byte-level GPT on eight processes, and a report that holds it to its promises.

``python -m examples.demo`` is ``python examples/gpt.py fit --config examples/gpt.yaml --config strategies/hybrid_3d_tp2_pp2.yaml``
and what follows from it; with ``--layout dp`` it is the same on two data-parallel processes, for longer. Further arguments go
to that LightningCLI. The exit code is 1 when the validation loss does not beat counting pairs of bytes (``dp``: triples), or
when the losses are not those of one process on the same global batch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from examples.byte_models import bits_per_byte
from examples.demo_plot import plot_losses
from examples.gpt import Batch, GPTModule, StdlibText, Windows
from lightning_partrain.lightning_cli import ParallelCLI
from lightning_partrain.numerics import local_tensor
from lightning_partrain.sync.messages import gather_json

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/demo")
#: Layout -> its configs, and the byte model that the GPT has to beat in the steps that it is given.
LAYOUTS = {
    "3d": (
        ("examples/gpt.yaml", "strategies/hybrid_3d_tp2_pp2.yaml", "examples/demo.yaml", "examples/demo_3d.yaml"),
        "order-1",
    ),
    "dp": (("examples/gpt.yaml", "strategies/hybrid_3d.yaml", "examples/demo.yaml"), "order-2"),
}
COMPARED_STEPS = 20
LARGEST_DIFFERENCE = 1e-5  # relative, between float32 losses
KINDS = ("parameters", "gradients", "buckets", "optimizer state")


def storage_bytes(tensors: Iterable[Tensor], counted: set[int]) -> int:
    """Memory that ``tensors`` keep alive, but for storages ``counted`` before; adds theirs to them."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    new = storages.keys() - counted
    counted |= new
    return sum(storages[pointer] for pointer in new)


class Recorder(Callback):
    """The first losses, the time of the later steps, and what each rank holds before its last optimizer step."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.held: list[dict[str, int]] = []
        self.steps = 0
        self.seconds = 0.0
        self._since: float | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx < COMPARED_STEPS:
            self.losses.append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))
            return
        now = time.perf_counter()
        if self._since is not None:  # from the end of one step to the end of the next, loading included
            self.steps += 1
            self.seconds += now - self._since
        self._since = now

    def on_validation_start(self, *_: Any) -> None:
        self._since = None

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step != trainer.max_steps - 1 or trainer.world_size == 1:
            return
        strategy: Any = trainer.strategy
        tensors = strategy.model_parallel.state_tensors()
        state = [v for values in trainer.optimizers[0].state.values() for v in values.values() if isinstance(v, Tensor)]
        tensors["optimizer state"] = [local_tensor(v) for v in state]
        counted: set[int] = set()
        held = {kind: storage_bytes(tensors[kind], counted) for kind in KINDS}
        held["elements"] = sum(p.numel() for p in tensors["parameters"])
        self.held = gather_json(held, torch.device("cpu"), strategy.control_group)


class GlobalBatches(StdlibText):
    """Batches as two or more ranks see them together: Lightning's sampler, asked for one rank's share of one."""

    def loader(self, windows: Windows) -> DataLoader[Batch]:
        if windows.seed is None:
            return super().loader(windows)
        seed = int(os.environ["PL_GLOBAL_SEED"])
        sampler: DistributedSampler[Batch] = DistributedSampler(
            windows, num_replicas=1, rank=0, shuffle=True, seed=seed
        )
        return DataLoader(windows, self.batch_size, sampler=sampler)


def cli(
    data: type[StdlibText], recorder: Recorder, configs: Iterable[str], arguments: list[str], **options: Any
) -> ParallelCLI:
    words = [word for name in configs for word in ("--config", str(ROOT / name))]
    return ParallelCLI(
        GPTModule, data, args=words + arguments, trainer_defaults={"callbacks": recorder}, run=False, **options
    )


def losses_of_one_process(batch_size: int, configs: Iterable[str], arguments: list[str]) -> list[float]:
    """The first losses of the same run without parallelism: same seed, same weights, same global batches."""
    recorder = Recorder()
    alone = ["--trainer.strategy=auto", "--trainer.devices=1", f"--trainer.max_steps={COMPARED_STEPS}"]
    quiet = ["--trainer.logger=false", "--trainer.callbacks=null", "--trainer.limit_val_batches=0"]
    quiet += [
        f"--trainer.{name}=false" for name in ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    ]
    run = cli(
        GlobalBatches,
        recorder,
        configs,
        [*arguments, *alone, *quiet, f"--data.batch_size={batch_size}"],
        save_config_callback=None,
    )
    run.trainer.fit(run.model, datamodule=run.datamodule)
    return recorder.losses


def table(rows: list[list[str]]) -> str:
    """Columns side by side, the first flush left, the others flush right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [
        [c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))] for row in rows
    ]
    return "\n".join("  " + "   ".join(line) for line in lines)


def memory_table(held: list[dict[str, int]], elements: int) -> str:
    """What each rank holds in megabytes, and what one process would: gradients, two moments and parameters in float32."""
    whole = 4 * elements
    rows = [["", "parameters held", *(f"{kind} MB" for kind in KINDS), "in all MB"]]
    alone = {
        "elements": elements,
        "parameters": whole,
        "gradients": whole,
        "buckets": 0,
        "optimizer state": 2 * whole,
    }
    for name, each in [*((f"rank {rank}", each) for rank, each in enumerate(held)), ("one process", alone)]:
        sizes = [each[kind] for kind in KINDS]
        rows.append([name, f"{each['elements']:,}", *(f"{size / 1e6:.2f}" for size in [*sizes, sum(sizes)])])
    return table(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layout", choices=LAYOUTS, default="3d", help="how the ranks share the work")
    parser.add_argument("--save-figure", type=Path, help="a second place for the loss plot")
    options, arguments = parser.parse_known_args()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    started = time.perf_counter()
    recorder = Recorder()
    configs, to_beat = LAYOUTS[options.layout]
    run = cli(StdlibText, recorder, configs, arguments)
    trainer, data = run.trainer, run.datamodule
    trainer.fit(run.model, datamodule=data)
    if not trainer.is_global_zero:
        return 0
    world = trainer.world_size
    strategy: Any = trainer.strategy
    samples = strategy.mesh.size("data_parallel") * data.batch_size
    if dist.is_initialized():
        dist.destroy_process_group()

    alone = losses_of_one_process(samples, configs, arguments)
    pairs = list(zip(recorder.losses, alone, strict=True))
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)
    models = {
        name: bits_per_byte(data.train_text, data.val_text, order)
        for order, name in enumerate(("unigram", "order-1", "order-2"))
    }
    bits = float(trainer.callback_metrics["val_loss"]) / math.log(2)
    tokens = samples * data.context * recorder.steps / recorder.seconds
    figure = RUN / "loss.png"
    axes = {
        "data": strategy.mesh.sizes.data_parallel_size,
        "tensor": strategy.mesh.sizes.tp,
        "pipeline": strategy.mesh.sizes.pp,
    }
    sizes = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    title = f"Byte-level GPT on {world} ranks: {sizes}"
    metrics = Path(str(trainer.loggers[0].log_dir), "metrics.csv")
    plot_losses(metrics, models, title, [figure, *([options.save_figure] if options.save_figure else [])])
    report = {
        "validation_bits_per_byte": {"gpt": bits, **models},
        "tokens_per_second": tokens,
        "held_before_the_step": recorder.held,
        "largest_relative_difference_of_first_losses": difference,
        "seconds": time.perf_counter() - started,
    }
    (RUN / "report.json").write_text(json.dumps(report, indent=2) + "\n")

    print(f"\nValidation after {trainer.global_step} steps, in bits per byte")
    print(
        table(
            [
                ["GPT", f"{bits:.3f}"],
                *([f"{name} byte model", f"{value:.3f}"] for name, value in reversed(models.items())),
            ]
        )
    )
    print("\nHeld by each rank, before an optimizer step")
    print(memory_table(recorder.held, sum(p.numel() for p in run.model.parameters())))
    print(f"\n{tokens:,.0f} tokens/s on {world} ranks ({sizes}); {report['seconds']:.0f} s in all")
    print(
        f"First {len(pairs)} losses beside one process on the same global batch: largest relative difference {difference:.1e}"
    )
    print(f"Loss plot: {figure}   metrics and config: {metrics.parent}   W&B: wandb sync {RUN}/wandb/latest-run")

    failures = []
    if not bits < models[to_beat]:
        failures.append(
            f"the validation loss of {bits:.3f} bits does not beat the {to_beat} byte model's {models[to_beat]:.3f}."
        )
    if not difference <= LARGEST_DIFFERENCE:
        failures.append(
            f"the losses differ from those of one process by {difference:.1e}, more than {LARGEST_DIFFERENCE:.0e}."
        )
    for failure in failures:
        print(f"demo failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
