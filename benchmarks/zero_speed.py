"""What a step of ZeRO costs by engine, on two CPU ranks of one thread each.

`python -m benchmarks.zero_speed [--pairs 9]`: each native stage beside the same stage of DeepSpeed's engine (`zero_N_deepspeed`, the user's
torch AdamW in both) and of FairScale, and beside Lightning's `ModelParallelStrategy` with FSDP2. DeepSpeed's ops have to be built
(`lightning-partrain doctor --build-deepspeed`).
"""

from __future__ import annotations

import argparse
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy

from benchmarks.common import Contestant, benchmark_gpt, paired, report
from benchmarks.overhead import fsdp2_gpt
from lightning_partrain.strategies import DeepSpeedZeroStrategy, FairScaleZeroStrategy, ZeroStrategy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of 64 bytes a rank")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    arguments = parser.parse_args()

    def native(stage: Any) -> Contestant:
        return Contestant(benchmark_gpt, lambda: ZeroStrategy(zero_stage=stage))

    others = {
        "DeepSpeed": lambda stage: Contestant(benchmark_gpt, lambda: DeepSpeedZeroStrategy(zero_stage=stage)),
        "FSDP2": lambda stage: Contestant(fsdp2_gpt, lambda: ModelParallelStrategy(2, 1)),
        "FairScale": lambda stage: Contestant(benchmark_gpt, lambda: FairScaleZeroStrategy(zero_stage=stage)),
    }
    rows = []
    for stage in (1, 2, 3):
        for name, other in others.items():
            row = f"zero_{stage} / {name}"
            if arguments.only in row and not (name == "FairScale" and stage == 3):
                limit = "-" if name == "FairScale" else "1.0"
                pair = paired(native(stage), other(stage), arguments.pairs, arguments.steps, arguments.batch_size)
                rows.append({"row": row, "at_most": limit, **pair})
                print(rows[-1], flush=True)
    report("zero_speed", rows)


if __name__ == "__main__":
    main()
