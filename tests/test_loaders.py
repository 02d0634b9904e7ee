"""Data loaders on several ranks: nobody waits for a batch that another rank does not have, nobody sees another's samples."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset

from lightning_partrain.mesh import ParallelMesh, ParallelSizes
from lightning_partrain.strategies import Hybrid3DStrategy
from lightning_partrain.strategies.batch_size import meaning
from tests.harness import run_ranks, trainer
from tests.models import EncoderClassifier
from tests.test_numerics import in_group

LIMIT = 40.0  # seconds for a run; a hang would last as long as the strategy's timeout


class Seen(pl.LightningModule):
    """Remembers the first number of each sample that each stage saw, and logs a value of the batch and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: dict[str, list[Any]] = {"fit": [], "validate": [], "test": [], "predict": []}

    def _look(self, stage: str, batch: Any) -> Tensor:
        first = {k: self._numbers(v) for k, v in batch.items()} if isinstance(batch, dict) else self._numbers(batch)
        self.seen[stage].append(first)
        x = next(iter(batch.values())) if isinstance(batch, dict) else batch
        x = x[0] if isinstance(x, (list, tuple)) else x
        x = x.float().reshape(len(x), -1)[:, :1]
        self.log(f"{stage}_mean", x.mean(), on_step=False, on_epoch=True, batch_size=len(x))
        self.log(f"{stage}_one", 1.0, on_step=False, on_epoch=True, batch_size=len(x))
        return self.layer(x).square().mean()

    @staticmethod
    def _numbers(batch: Any) -> list[float]:
        x = batch[0] if isinstance(batch, (list, tuple)) else batch
        return x.reshape(len(x), -1)[:, 0].tolist()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._look("fit", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._look("validate", batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._look("test", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["predict"].append(self._numbers(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Stream(IterableDataset):
    """``batches`` one-element batches' worth of numbers from ``start``, without a length."""

    def __init__(self, batches: int, start: int = 0) -> None:
        self.batches, self.start = batches, start

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(self.start, self.start + self.batches).float())


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.batches


class Augmented(Dataset):
    """Sample i comes with random numbers from each of the three generators that people use."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        import numpy as np

        return torch.tensor([torch.rand(()).item(), random.random(), np.random.rand()])


def numbers(count: int, start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + count).float().view(-1, 1))


def quiet(ranks: int, strategy: Any = None, **options: Any) -> pl.Trainer:
    return trainer(strategy or Hybrid3DStrategy(timeout=10), ranks, **options)


def through_all_stages(rank: int, loader: Any, **options: Any) -> tuple[dict[str, int], list[str]]:
    """How many batches each stage saw, and what was warned about."""
    module = Seen()
    run = quiet(2, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(module, loader)
        run.validate(module, loader, verbose=False)
        run.test(module, loader, verbose=False)
        run.predict(module, loader)
    return {stage: len(batches) for stage, batches in module.seen.items()}, [str(w.message) for w in caught]


@pytest.mark.parametrize("dataset", [Stream, SizedStream])
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5)])
def test_streams_of_unequal_length_end_together_in_every_stage(dataset: Any, lengths: tuple[int, int]) -> None:
    results = run_ranks(2, lambda rank: through_all_stages(rank, DataLoader(dataset(lengths[rank]))), LIMIT)
    for (counts, _), length in zip(results, lengths, strict=True):
        assert counts == {"fit": 5, "validate": 5, "test": 5, "predict": length}, "no prediction is lost"
    ended = [message for message in results[0][1] if "5" in message and "batches" in message and "ranks" in message]
    assert len(ended) >= 3, results[0][1]  # rank 0 says it in each stage, whoever ran out first


def test_streams_of_equal_length_end_without_a_warning() -> None:
    for counts, messages in run_ranks(2, lambda rank: through_all_stages(rank, DataLoader(Stream(3))), LIMIT):
        assert counts == {"fit": 3, "validate": 3, "test": 3, "predict": 3}
        assert not [message for message in messages if "ranks" in message]


def test_sized_loaders_of_unequal_length_stop_at_the_shortest_with_a_warning() -> None:
    def each(rank: int) -> Any:
        return through_all_stages(rank, DataLoader(numbers(10 + 4 * rank), batch_size=2))

    results = run_ranks(2, each, LIMIT)
    for rank, (counts, _) in enumerate(results):
        assert counts == {"fit": 5, "validate": 5, "test": 5, "predict": 5 + 2 * rank}
    assert sum("have 5, 7 batches; all of them stop after 5" in message for message in results[0][1]) == 3


class Predicts(EncoderClassifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_sample_is_predicted(stage: int) -> None:
    """21 samples on two ranks, whose last batch one of them does not have; before and after a fit."""

    def each(rank: int) -> Any:
        module = Predicts()
        samples = TensorDataset(torch.ones(21, 12), torch.zeros(21, dtype=torch.int64))
        loader = DataLoader(samples, batch_size=2)
        run = quiet(2, Hybrid3DStrategy(zero_stage=stage, timeout=10), use_distributed_sampler=True)
        before = sum(len(part) for part in run.predict(module, loader))
        run.fit(module, loader)
        return before, sum(len(part) for part in run.predict(module, loader))

    assert run_ranks(2, each, LIMIT) == [(11, 11), (10, 10)]


def test_a_rank_without_any_batch_ends_the_epoch_everywhere() -> None:
    def each(rank: int) -> Any:
        module = Seen()
        run = quiet(2)
        run.fit(module, DataLoader(Stream(3 * rank)), DataLoader(Stream(2 * rank)))
        return module.seen

    for seen in run_ranks(2, each, LIMIT):
        assert seen["fit"] == [] and seen["validate"] == []


@pytest.mark.parametrize("workers", ["workers end", "workers persist"])
def test_unequal_loaders_with_workers_can_be_used_again(workers: str) -> None:
    def each(rank: int) -> list[int]:
        persist = workers == "workers persist"
        loaders = [
            DataLoader(Stream(3 + rank), num_workers=1, persistent_workers=persist),
            DataLoader(numbers(4 + rank), num_workers=1, persistent_workers=persist),
        ]
        counts = []
        for loader in loaders:
            for _ in range(2):
                module = Seen()
                quiet(2, max_epochs=2).fit(module, loader)
                counts.append(len(module.seen["fit"]))
        return counts

    assert run_ranks(2, each, LIMIT) == [[6, 6, 8, 8]] * 2


COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_object",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "monitored_barrier",
    "reduce_scatter_tensor",
)


def test_equal_lengths_add_no_collective_per_batch() -> None:
    def each(rank: int) -> list[int]:
        calls = [0]
        for name in COLLECTIVES:
            plain = getattr(dist, name)

            def counted(*args: Any, plain: Any = plain, **kwargs: Any) -> Any:
                calls[0] += 1
                return plain(*args, **kwargs)

            setattr(dist, name, counted)
        counts = []
        for batches in (2, 12):
            calls[0] = 0
            quiet(2).validate(Seen(), DataLoader(numbers(batches)), verbose=False)
            counts.append(calls[0])
        return counts

    for short, long in run_ranks(2, each, LIMIT):
        assert short == long > 0


@pytest.mark.parametrize(("mode", "expected"), [("max_size_cycle", 5), ("max_size", 5), ("min_size", 3)])
def test_combined_loaders(mode: str, expected: int) -> None:
    def each(rank: int) -> Any:
        module = Seen()
        loaders = {"a": DataLoader(Stream(5 + 2 * rank)), "b": DataLoader(numbers(3 + rank, start=100))}
        quiet(2).fit(
            module, CombinedLoader(loaders, mode) if mode != "max_size" else CombinedLoader({"a": loaders["a"]}, mode)
        )
        return module.seen["fit"]

    for seen in run_ranks(2, each, LIMIT):
        assert [batch["a"] for batch in seen] == [[float(n)] for n in range(expected)]
        if mode != "max_size":
            assert [batch["b"] for batch in seen] == [[100.0 + n % 3] for n in range(expected)]


def test_several_validation_loaders_one_after_the_other() -> None:
    def each(rank: int) -> Any:
        module = Seen()
        loaders = [DataLoader(Stream(2 + rank)), DataLoader(numbers(4 - rank, start=100)), DataLoader(Stream(1, 200))]
        quiet(2).validate(module, loaders, verbose=False)
        return module.seen["validate"]

    for seen in run_ranks(2, each, LIMIT):
        assert seen == [[0.0], [1.0], [100.0], [101.0], [102.0], [200.0]]


def test_loaders_that_are_made_anew_agree_anew() -> None:
    class Reloading(Seen):
        def train_dataloader(self) -> DataLoader:
            return DataLoader(numbers(2 + self.current_epoch + self.global_rank))

        def val_dataloader(self) -> DataLoader:
            return DataLoader(Stream(1 + self.current_epoch + self.global_rank))

    def each(rank: int) -> Any:
        module = Reloading()
        quiet(2, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(module)
        return {stage: len(batches) for stage, batches in module.seen.items()}

    for counts in run_ranks(2, each, LIMIT):
        assert counts["fit"] == 2 + 3 + 4 and counts["validate"] == 1 + 2 + 3


def test_each_data_parallel_rank_gets_its_part_of_the_samples() -> None:
    def each(rank: int) -> Any:
        module = Seen()
        strategy = Hybrid3DStrategy(data_parallel_replicate_size=2, timeout=10)
        run = quiet(4, strategy, use_distributed_sampler=True)
        loader = DataLoader(numbers(32), batch_size=4, shuffle=True)
        run.fit(module, loader)
        run.validate(module, DataLoader(numbers(32), batch_size=4), verbose=False)
        run.predict(module, DataLoader(numbers(32), batch_size=4))
        return module.seen

    results = run_ranks(4, each, LIMIT)
    for stage in ("fit", "validate", "predict"):
        parts = [[n for batch in seen[stage] for n in batch] for seen in results]
        assert [len(part) for part in parts] == [8] * 4
        assert sorted(n for part in parts for n in part) == list(range(32)), stage


def test_an_epoch_reshuffles_the_parts() -> None:
    def each(rank: int) -> Any:
        module = Seen()
        quiet(2, use_distributed_sampler=True, max_epochs=2).fit(
            module, DataLoader(numbers(16), batch_size=8, shuffle=True)
        )
        return module.seen["fit"]

    (a, b), (c, d) = run_ranks(2, each, LIMIT)
    assert sorted(a + c) == sorted(b + d) == list(range(16)) and a != b


def test_workers_draw_differently_on_each_data_parallel_rank_and_alike_in_each_run() -> None:
    def each(rank: int) -> Any:
        runs = []
        for _ in range(2):
            pl.seed_everything(3, workers=True, verbose=False)
            draws: list[Any] = []
            module = Seen()
            module.predict_step = lambda batch, _, draws=draws: draws.append(batch.tolist())  # type: ignore[method-assign]
            quiet(2).predict(module, DataLoader(Augmented(), batch_size=2, num_workers=1))
            runs.append(draws)
        return runs

    (first, first_again), (second, second_again) = run_ranks(2, each, LIMIT)
    assert first == first_again and second == second_again
    for kind in range(3):
        one, two = ([sample[kind] for batch in draws for sample in batch] for draws in (first, second))
        assert len(set(one + two)) == 8, "two ranks drew the same number"


def test_workers_of_ranks_that_see_the_same_samples_draw_alike() -> None:
    from lightning_partrain.strategies.loaders import seed_workers

    draws = []
    for data_parallel_rank in (0, 0, 1):
        torch.manual_seed(3)
        loader = DataLoader(Augmented(), batch_size=4, num_workers=1)
        seed_workers(loader, data_parallel_rank)
        draws.append(next(iter(loader)).tolist())
    assert draws[0] == draws[1] != draws[2]


def test_epoch_values_of_uneven_batches_are_means_over_samples() -> None:
    """Ranks with batches of (4, 4, 2) and (4, 4, 1) samples: the mean of one process over the 19, and 1.0 for a constant."""

    def each(rank: int) -> Any:
        module = Seen()
        loader = DataLoader(numbers(10 - rank, start=100 * rank), batch_size=4)
        run = quiet(2)
        run.fit(module, loader, loader)
        fitted = {k: float(v) for k, v in run.callback_metrics.items()}
        return {**fitted, **run.test(module, loader, verbose=False)[0]}

    samples = [*range(10), *range(100, 109)]
    for metrics in run_ranks(2, each, LIMIT):
        for stage in ("fit", "validate", "test"):
            assert metrics[f"{stage}_mean"] == pytest.approx(sum(samples) / len(samples), rel=1e-6), stage
            assert metrics[f"{stage}_one"] == 1.0, stage


@pytest.mark.parametrize(
    ("sizes", "loader", "accumulate", "words"),
    [
        (
            {"dp_shard": 2},
            DataLoader(range(40), batch_size=8),
            3,
            "takes 2 data-parallel ranks x 8 samples x 3 batches = 48 samples: one device does the same with batch_size=16 and "
            "accumulate_grad_batches=3, and the same learning rate.",
        ),
        (
            {"dp_shard": 2, "tp": 2},
            DataLoader(range(40), batch_sampler=BatchSampler(range(40), 4, False)),
            1,
            "2 data-parallel ranks x 4 samples = 8 samples (the 2 ranks of each hold parts of the model, and work on the same samples): "
            "one device does the same with batch_size=8, and",
        ),
        ({"pp": 4}, [1, 2], 1, "takes 1 data-parallel rank, a batch of the loader each (the 4 ranks"),
    ],
)
def test_the_meaning_of_a_batch(sizes: dict[str, int], loader: Any, accumulate: int, words: str) -> None:
    def describe(rank: int) -> str:
        return meaning(ParallelMesh.create(ParallelSizes(**sizes), "cpu"), loader, accumulate)

    assert all(words in said for said in in_group(math.prod(sizes.values()), describe))
