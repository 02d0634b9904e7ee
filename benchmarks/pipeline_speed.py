"""How much faster two pipeline stages are than one process, one core a process.

`python -m benchmarks.pipeline_speed [--pairs 7]`: the benchmark GPT (6 layers, width 192), 8 micro-batches of 16 (and of 4) samples of 64
bytes, beside one process that runs the same micro-batches one after the other, and beside one process that runs the batch whole. With
8 micro-batches, two stages that cost the same and no communication give 2 * 8 / 9 = 1.78.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.common import Contestant, benchmark_gpt, report
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks

MICRO_BATCHES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[128, 32], help="samples of 64 bytes")
    arguments = parser.parse_args()

    def median_step(ranks: int, strategy: Callable[[], Any], samples: int) -> float:
        contestant = Contestant(benchmark_gpt, strategy)
        fit = run_ranks(ranks, lambda _: contestant.median_step(ranks, arguments.steps, samples), 600)
        return max(fit)

    def stages(schedule: Any) -> Callable[[], Any]:
        return lambda: Hybrid3DStrategy(
            pipeline_parallel_size=2, num_microbatches=MICRO_BATCHES, zero_stage=0, schedule=schedule
        )

    def one_after_the_other() -> Any:
        return Hybrid3DStrategy(num_microbatches=MICRO_BATCHES, zero_stage=0)

    rows = []
    contests: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = [
        ("pp2 1f1b / same micro-batches", "1.5", stages("1f1b"), one_after_the_other),
        ("pp2 1f1b / whole batch", "1.4", stages("1f1b"), lambda: "auto"),
        ("pp2 gpipe / same micro-batches", "", stages("gpipe"), one_after_the_other),
    ]
    for samples, (name, limit, ours, theirs) in itertools.product(arguments.batch_sizes, contests):
        pairs = []
        for number in range(arguments.pairs):
            order = ("ours", "theirs") if number % 2 == 0 else ("theirs", "ours")
            seconds = {
                who: median_step(2, ours, samples) if who == "ours" else median_step(1, theirs, samples)
                for who in order
            }
            pairs.append((seconds["ours"], seconds["theirs"]))
        faster = [b / a for a, b in pairs]
        rows.append(
            {
                "row": name,
                "batch": samples,
                "at_least": limit,
                "ours_ms": round(statistics.median(a for a, _ in pairs) * 1e3, 1),
                "theirs_ms": round(statistics.median(b for _, b in pairs) * 1e3, 1),
                "times_faster": round(statistics.median(faster), 3),
                "range": [round(min(faster), 3), round(max(faster), 3)],
                "pairs": arguments.pairs,
            }
        )
        print(rows[-1], flush=True)
    report("pipeline_speed", rows)


if __name__ == "__main__":
    main()
