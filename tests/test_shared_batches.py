"""One of the ranks with the same samples loads for all of them."""

from __future__ import annotations

import dataclasses
from collections import UserDict, defaultdict, namedtuple
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.parity import Run, assert_same_as_one_process, hybrid

LAYOUTS = {"tp2": (2, 2, 1), "pp2": (2, 1, 2), "dp2-tp2": (4, 2, 1), "tp2-pp2": (4, 2, 2)}

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass
class Sample:
    x: Tensor
    name: str


class Bag(UserDict):  # as Hugging Face's BatchEncoding
    pass


class Counted(Dataset):
    """Draws noise in every load, and counts them."""

    def __init__(self) -> None:
        self.loads = 0

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Any:
        self.loads += 1
        return torch.full((6,), float(index)) + torch.rand(6)


class Stream(IterableDataset):
    """Of unknown length, and of ragged batches."""

    def __init__(self, length: int = 7) -> None:
        self.length, self.loads = length, 0

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.length):
            self.loads += 1
            yield torch.rand(4 + index % 3, 6)


class Sees(pl.LightningModule):
    """Keeps what its steps got."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 6))
        self.seen: list[Any] = []
        self.drawn: list[float] = []

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.drawn.append(float(torch.rand(())))  # as augmentation of a batch on the device does

    def on_before_batch_transfer(self, batch: Any, index: int) -> Any:
        if self.trainer.state.stage is not None:
            self.seen.append(batch)
        return batch

    def training_step(self, batch: Any, _: int) -> Tensor:
        return self.layers(batch if isinstance(batch, Tensor) else batch["x"]).pow(2).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val", self.layers(batch if isinstance(batch, Tensor) else batch["x"]).pow(2).mean())

    def predict_step(self, batch: Any, _: int) -> Tensor:
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(rank: int, layout: str, data: Any, share: bool = True, **options: Any) -> Any:
    ranks, tensor, stages = LAYOUTS[layout]
    torch.manual_seed(rank)  # loading differs from rank to rank
    module = Sees()
    strategy = Hybrid3DStrategy(
        tensor_parallel_size=tensor,
        tensor_parallel_plan={"layers.0": "colwise", "layers.2": "rowwise"},
        pipeline_parallel_size=stages,
        share_batches=share,
        timeout=30,
    )
    run = trainer(strategy, ranks, max_epochs=2, use_distributed_sampler=True, **options)
    torch.manual_seed(rank)
    run.fit(module, data(), data())
    return module, run


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize("kind", [Counted, Stream])
def test_one_rank_loads(layout: str, kind: Any) -> None:
    ranks, tensor, stages = LAYOUTS[layout]

    def train(rank: int) -> Any:
        sets: list[Any] = []

        def data() -> Any:
            sets.append(kind())
            shuffle = {} if kind is Stream else {"shuffle": True}
            return DataLoader(sets[-1], batch_size=None if kind is Stream else 4, **shuffle)

        module, run = fit(rank, layout, data)
        return module.seen, module.drawn, [each.loads for each in sets], run.global_step

    found = run_ranks(ranks, train)
    replicas = ranks // tensor // stages
    place = {rank: rank // tensor % replicas for rank in range(ranks)}
    for rank, (seen, drawn, loads, steps) in enumerate(found):
        first = place[rank] * tensor
        same, drawn_alike, *_ = found[first]
        assert len(seen) == len(same) and all(torch.equal(a, b) for a, b in zip(seen, same, strict=True))
        assert drawn == drawn_alike
        assert (sum(loads) > 0) == (rank == first)
        assert steps == (14 if kind is Stream else 2 * -(-22 // replicas // 4) if replicas == 1 else 6)
    if kind is Counted:
        half = found[0][0]
        assert not torch.equal(half[1], half[-8])  # another order, and other noise, in the next epoch


def test_without_it_every_rank_loads() -> None:
    def train(rank: int) -> int:
        sets: list[Any] = []

        def data() -> Any:
            sets.append(Counted())
            return DataLoader(sets[-1], batch_size=4)

        with pytest.raises(ValueError, match="got different batches"):
            fit(rank, "tp2", data, share=False)
        return sum(each.loads for each in sets)

    # random states are shared at the start, but noise that has a seed of the rank's own is not alike
    def noisy(rank: int) -> int:
        original = Counted.__getitem__
        generator = torch.Generator().manual_seed(rank)
        Counted.__getitem__ = lambda self, i: original(self, i) + torch.rand(6, generator=generator)  # type: ignore[method-assign]
        return train(rank)

    assert all(loads > 0 for loads in run_ranks(2, noisy))


def test_batches_of_many_kinds_arrive_as_they_are() -> None:
    batches = [
        {"x": torch.ones(4, 6), "names": ["a", "b"], "flag": True, "none": None, "big": 2**60 + 1, "half": 0.5},
        Bag(x=torch.ones(4, 6), more={"ids": torch.tensor([[1, 2]], dtype=torch.int8), "y": torch.ones(1).double()}),
        {"x": torch.ones(4, 6), "pair": Pair(torch.zeros(0, 3), [torch.tensor(True)]), "tuple": (1, "c")},
        {"x": torch.ones(4, 6), "sample": Sample(torch.ones(2).bfloat16(), "d")},
        {
            "x": torch.ones(4, 6),
            "float": numpy.float64(0.5),
            "array": numpy.arange(3, dtype=numpy.int16),
            "bytes": b"e\0f",
            "default": defaultdict(list, a=[1]),
            "short": torch.tensor([[-5], [300]], dtype=torch.int16),
        },
    ]

    def train(rank: int) -> Any:
        module, _ = fit(rank, "tp2", lambda: DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        types = [type(batch).__name__ for batch in module.seen]
        last = next(b for b in module.seen if "short" in b)
        assert last["float"] == 0.5 and last["array"].tolist() == [0, 1, 2]
        assert last["bytes"] == b"e\0f" and dict(last["default"]) == {"a": [1]}
        assert last["short"].dtype == torch.int16 and last["short"].tolist() == [[-5], [300]]
        first, second, third, fourth = (
            next(b for b in module.seen if key in b) for key in ("names", "more", "pair", "sample")
        )
        plain = {key: value for key, value in first.items() if key != "x"}
        dtypes = [second["more"]["y"].dtype, second["more"]["ids"].dtype, fourth["sample"].x.dtype]
        return (
            types,
            plain,
            dtypes,
            third["pair"].x.shape,
            third["tuple"],
            type(third["pair"]).__name__,
            fourth["sample"].name,
        )

    one, other = run_ranks(2, train)
    assert one == other and other[1] == {k: v for k, v in batches[0].items() if k != "x"}
    assert set(other[0]) == {"dict", "Bag"}
    assert other[2:] == (
        [torch.float64, torch.int8, torch.bfloat16],
        (0, 3),
        [1, "c"],
        "Pair",
        "d",
    )  # torch makes lists of tuples


@pytest.mark.parametrize("layout", ["tp2", "tp2-pp2"])
def test_prediction_and_workers(layout: str) -> None:
    def predict(rank: int) -> Any:
        ranks, tensor, stages = LAYOUTS[layout]
        strategy = Hybrid3DStrategy(
            tensor_parallel_size=tensor,
            tensor_parallel_plan={"layers.0": "colwise", "layers.2": "rowwise"},
            pipeline_parallel_size=stages,
            share_batches=True,
        )
        torch.manual_seed(3)
        run = trainer(strategy, ranks)
        return run.predict(Sees(), DataLoader(Counted(), batch_size=4, num_workers=1))

    first, *others = run_ranks(LAYOUTS[layout][0], predict)
    assert sum(len(each) for each in first) == 22
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_numbers_are_those_of_one_process() -> None:
    strategy = hybrid(tensor_parallel_size=2, pipeline_parallel_size=2, share_batches=True)
    assert_same_as_one_process(Run("gpt8", accumulate=3), 4, strategy, stages=2, tensor=2)


class Broken(Counted):
    def __getitem__(self, index: int) -> Any:
        if index == 9:
            raise OSError("no such file")
        return super().__getitem__(index)


class Strange(Counted):
    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(6), "thing": object()}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: DataLoader(Broken(), batch_size=4), "no such file"),
        (lambda: DataLoader(Strange(), batch_size=None), "has a object, which cannot be sent to the others"),
        (lambda: DataLoader([torch.eye(6).to_sparse()], batch_size=None), "tensor that is torch.sparse_coo"),
    ],
)
def test_failures_of_the_one_rank_end_all(data: Any, words: str) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, lambda rank: fit(rank, "tp2", data))
    assert failure.value.codes == [1, 1] and failure.value.seconds < 20
    assert all(words in report for report in failure.value.reports)


def test_nothing_to_share_is_said() -> None:
    def train(rank: int) -> None:
        run = trainer(Hybrid3DStrategy(share_batches=True), 1)
        with pytest.warns(UserWarning, match="share_batches=True shares nothing"):
            run.fit(Sees(), DataLoader(Counted(), batch_size=4))

    run_ranks(1, train)
