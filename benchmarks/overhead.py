"""What a step of `hybrid_3d` costs beside Lightning's own strategies, on two CPU ranks of one thread each.

`python -m benchmarks.overhead [--pairs 9]`: stages 0 and 1 beside `ddp`, stages 2 and 3 beside `ModelParallelStrategy` with
FSDP2 as its documentation shows it (each block and the whole model `fully_shard`-ed in `configure_model`).
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from benchmarks.common import Contestant, benchmark_gpt, paired, report
from examples.gpt import GPTModule
from lightning_partrain.strategies import Hybrid3DStrategy


class FSDP2GPT(GPTModule):
    """The benchmark GPT as a user of ModelParallelStrategy writes it."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def fsdp2_gpt() -> GPTModule:
    module = benchmark_gpt()
    module.__class__ = FSDP2GPT
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of 64 bytes a rank")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    arguments = parser.parse_args()

    def ours(stage: Any, module: Any = benchmark_gpt) -> Contestant:
        return Contestant(module, lambda: Hybrid3DStrategy(zero_stage=stage))

    def ddp(module: Any = benchmark_gpt) -> Contestant:
        return Contestant(module, lambda: DDPStrategy())

    def fsdp2() -> Contestant:
        return Contestant(fsdp2_gpt, lambda: ModelParallelStrategy(2, 1))

    small = partial(benchmark_gpt, 2, 48)
    rows = []
    for name, limit, steps, pair in (
        ("stage 0 / ddp", "1.05", arguments.steps, (ours(0), ddp())),
        ("stage 0 / ddp, small step", "1 ms more", 5 * arguments.steps, (ours(0, small), ddp(small))),
        ("stage 1 / ddp", "1.10", arguments.steps, (ours(1), ddp())),
        ("stage 2 / FSDP2", "1.0", arguments.steps, (ours(2), fsdp2())),
        ("stage 3 / FSDP2", "1.0", arguments.steps, (ours(3), fsdp2())),
    ):
        if arguments.only in name:
            rows.append({"row": name, "at_most": limit, **paired(*pair, arguments.pairs, steps, arguments.batch_size)})
            print(rows[-1], flush=True)
    report("overhead", rows)


if __name__ == "__main__":
    main()
