"""What `share_batches=True` gains and costs: two tensor-parallel ranks on two cores, and samples that take time to decode.

`python -m benchmarks.shared_batches [--pairs 5]`. Without it, each rank decodes every sample. With workers, decoding takes cores from
the ranks; without, the ranks decode side by side, and sharing can only cost.
"""

from __future__ import annotations

import argparse
import itertools
import time
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import Contestant, benchmark_gpt, paired, report
from lightning_partrain.strategies import Hybrid3DStrategy


class Decoded(Dataset):
    """Random bytes whose decoding keeps a core busy for ``seconds`` a sample."""

    def __init__(self, samples: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 256, (samples, 65), generator=generator)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        busy_until = time.process_time() + self.seconds
        while time.process_time() < busy_until:
            pass
        return self.tokens[index, :-1], self.tokens[index, 1:]


def loader(seconds: float, workers: int, batches: int, batch_size: int) -> DataLoader:
    return DataLoader(Decoded(batches * batch_size, seconds), batch_size, num_workers=workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=4, help="samples of 64 bytes")
    arguments = parser.parse_args()

    def contestant(share: bool, data: Any) -> Contestant:
        small = partial(benchmark_gpt, 2, 48)
        return Contestant(small, lambda: Hybrid3DStrategy(tensor_parallel_size=2, share_batches=share), data)

    rows = []
    for workers, milliseconds in itertools.product((0, 1), (0, 20)):
        data = partial(loader, milliseconds * 1e-3, workers)
        result = paired(
            contestant(True, data), contestant(False, data), arguments.pairs, arguments.steps, arguments.batch_size
        )
        rows.append({"row": "shared / each rank loads", "workers": workers, "decode_ms": milliseconds, **result})
        print(rows[-1], flush=True)
    report("shared_batches", rows)


if __name__ == "__main__":
    main()
