"""Runs every path on one GPU: NCCL with a world of one, host synchronisations in the step as errors, step time, memory.

`python -m benchmarks.gpu_check` takes a few minutes; with several GPUs, `torchrun --nproc-per-node=N -m benchmarks.gpu_check`
compares the parity table's layouts with one process as well. It prints one line a path and exits with 1 if one fails.
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks.common import RESULTS, benchmark_gpt, random_bytes
from examples.gpt import GPTModule
from lightning_partrain.strategies import (
    CompressedDDPStrategy,
    DeepSpeedZeroStrategy,
    FairScaleZeroStrategy,
    Hybrid3DStrategy,
    ZeroStrategy,
    compressed_replicas,
)
from lightning_partrain.sync.compressors import COMPRESSORS

STEPS, WARM_UP = 24, 8


class NoHostSync(pl.Callback):
    """From the end of the warm-up on, whatever waits for the device inside forward, backward and step raises."""

    def __init__(self, may_wait: bool) -> None:
        self.may_wait = may_wait
        self.started = self.seconds = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.started = time.perf_counter()
        if batch_idx >= WARM_UP and not self.may_wait:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def on_train_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.seconds = (time.perf_counter() - self.started) / (STEPS - WARM_UP)


class SumsGPT(GPTModule):
    """Returns sums over tokens and how many there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss * batch[1].numel(), "num_tokens": batch[1].numel()}


class Saves(pl.Callback):
    """A checkpoint in the warm-up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == WARM_UP - 2:
            trainer.save_checkpoint(self.path)


def run_in_pieces(name: str, **arguments: Any) -> dict[str, Any]:
    """A model that is born in pieces, saved while it trains, and resumed from there."""
    losses = []
    try:
        folder = Path(tempfile.gettempdir()) / "gpu_check"
        for resume in (None, folder):
            strategy = Hybrid3DStrategy(checkpoint_format="sharded", async_save=True, **arguments)
            trainer = pl.Trainer(
                accelerator="gpu",
                devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
                strategy=strategy,
                max_steps=STEPS,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[] if resume else [Saves(folder)],
            )
            torch.manual_seed(0)
            with trainer.init_module(empty_init=True):
                module = benchmark_gpt()
            # resumed in the middle of an epoch, Lightning begins the loader anew: only that it trains is compared
            trainer.fit(module, random_bytes(STEPS, 8), ckpt_path=resume)
            losses.append(round(float(trainer.callback_metrics["train_loss"]), 4))
        return {"path": name, "ok": all(map(math.isfinite, losses)), "losses": losses}
    except Exception as error:
        traceback.print_exc()
        return {"path": name, "ok": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}


def run(name: str, strategy: Any, **options: Any) -> dict[str, Any]:
    """One path: its step time, peak memory and last loss, or its error. ``waits`` says that a step may wait for the device."""
    # 16-mixed waits for one number: whether to skip the step
    timer = NoHostSync(may_wait=options.pop("waits", False) or options.get("precision") == "16-mixed")
    torch.cuda.empty_cache()
    module = benchmark_gpt()
    if options.pop("sums", False):
        module.__class__ = SumsGPT
    try:
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            strategy=strategy,
            max_steps=STEPS // options.get("accumulate_grad_batches", 1),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[timer],
            **options,
        )
        trainer.fit(module, random_bytes(STEPS, 8))
        return {
            "path": name,
            "ok": True,
            "step_ms": round(timer.seconds * 1e3, 2),
            "peak_MiB": round(torch.cuda.max_memory_allocated() / 2**20, 1),
            "loss": round(float(trainer.callback_metrics["train_loss"]), 4),
        }
    except Exception as error:
        traceback.print_exc()
        return {"path": name, "ok": False, "error": f"{type(error).__name__}: {str(error)[:200]}"}
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("No GPU here: this check needs one CUDA device.")
    if "LOCAL_RANK" not in os.environ:  # a world of one, without a launcher
        os.environ.update(LOCAL_RANK="0", WORLD_SIZE="1", NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    paths: list[tuple[str, Any, dict[str, Any]]] = [("lightning ddp", "ddp", {})]
    stage: Any
    for stage in range(4):
        for reduce in ("window", "micro_batch"):
            name = f"hybrid_3d zero_stage={stage} reduce={reduce}"
            options = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
            paths.append((name, Hybrid3DStrategy(zero_stage=stage, reduce=reduce), options))
        paths.append(
            (
                f"hybrid_3d zero_stage={stage} bf16-mixed",
                Hybrid3DStrategy(zero_stage=stage),
                {"precision": "bf16-mixed"},
            )
        )
        paths.append(
            (f"hybrid_3d zero_stage={stage} 16-mixed", Hybrid3DStrategy(zero_stage=stage), {"precision": "16-mixed"})
        )
        paths.append(
            (
                f"hybrid_3d zero_stage={stage} num_microbatches=4",
                Hybrid3DStrategy(zero_stage=stage, num_microbatches=4),
                {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
            )
        )
        sums = {"sums": True, "accumulate_grad_batches": 2}
        paths.append((f"hybrid_3d zero_stage={stage} num_tokens", Hybrid3DStrategy(zero_stage=stage), sums))
        if int(os.environ["WORLD_SIZE"]) % 2 == 0:
            paths.append(
                (
                    f"hybrid_3d zero_stage={stage} pipeline_parallel_size=2",
                    Hybrid3DStrategy(zero_stage=stage, pipeline_parallel_size=2, num_microbatches=4),
                    {"gradient_clip_val": 1.0},
                )
            )
            paths.append(
                (
                    f"hybrid_3d zero_stage={stage} tensor_parallel_size=2",
                    Hybrid3DStrategy(zero_stage=stage, tensor_parallel_size=2),
                    {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0},
                )
            )
        if int(os.environ["WORLD_SIZE"]) % 4 == 0:
            paths.append(
                (
                    f"hybrid_3d zero_stage={stage} tensor_parallel_size=2 pipeline_parallel_size=2",
                    Hybrid3DStrategy(
                        zero_stage=stage, tensor_parallel_size=2, pipeline_parallel_size=2, num_microbatches=4
                    ),
                    {"gradient_clip_val": 1.0},
                )
            )
    accumulated: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    offload: Any
    for stage, offload in ((1, "optimizer"), (3, "optimizer"), (3, "all")):
        strategy = ZeroStrategy(zero_stage=stage, offload=offload)
        paths.append((f"zero_{stage} offload={offload}", strategy, {**accumulated, "waits": True}))
    compressed_replicas.LEAST_REPLICAS = 1  # all of it also with one GPU
    for compressor in (*COMPRESSORS, "auto"):
        more = {**accumulated, "gradient_clip_val": None} if compressor == "onebit" else accumulated
        first = CompressedDDPStrategy(compressor, start_step=2)
        paths.append(
            (f"ddp_{compressor}", first, {**more, "waits": compressor == "auto"})
        )  # which measures now and then
    paths.append(("ddp_int4 16-mixed", CompressedDDPStrategy("int4"), {"precision": "16-mixed"}))
    replicas = Hybrid3DStrategy(
        zero_stage=2, data_parallel_replicate_size=int(os.environ["WORLD_SIZE"]), replica_sync="int8"
    )
    if int(os.environ["WORLD_SIZE"]) > 1:
        paths.append(("hybrid_3d zero_stage=2 replica_sync=int8", replicas, accumulated))
    if find_spec("fairscale") is not None:
        for stage in (1, 2):
            paths.append((f"zero_{stage}_fairscale", FairScaleZeroStrategy(zero_stage=stage), accumulated))
    if find_spec("deepspeed") is not None:  # last, and it waits for the norm of the gradients in every step
        for stage in (1, 2, 3):
            for precision in ("32-true", "bf16-mixed", "16-true"):
                more = {**accumulated, "precision": precision, "waits": True}
                paths.append((f"zero_{stage}_deepspeed {precision}", DeepSpeedZeroStrategy(zero_stage=stage), more))
        offloaded = DeepSpeedZeroStrategy(zero_stage=3, offload_optimizer=True, offload_parameters=True)
        paths.append(("zero_3_deepspeed offloaded", offloaded, {**accumulated, "waits": True}))
    rows = [run(name, strategy, **options) for name, strategy, options in paths]
    for stage in (1, 3):
        rows.append(
            run_in_pieces(f"hybrid_3d zero_stage={stage} born in pieces, async_save, resumed", zero_stage=stage)
        )
    if int(os.environ["LOCAL_RANK"]) == 0:
        for row in rows:
            print(json.dumps(row), flush=True)
        RESULTS.mkdir(exist_ok=True)
        result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        (RESULTS / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
