"""Compressors whose codes add up: 16 bits, PowerSGD and random-k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_partrain.sync.compressors import make
from lightning_partrain.sync.compressors.base import Compressor
from lightning_partrain.sync.compressors.cast import Cast
from lightning_partrain.sync.compressors.powersgd import PowerSGD
from lightning_partrain.sync.compressors.randomk import RandomK
from lightning_partrain.sync.feedback import NoFeedback
from tests.compression import Ranks

ODD = [(7, 5), (13,), (3, 2, 5), (), (5, 7), (7, 5)]
ALL = [Cast("bf16"), Cast("fp16"), PowerSGD(2), RandomK(0.3)]
LOSSLESS = [PowerSGD(10**6, min_compression_rate=0), RandomK(1.0)]


def draw(
    shapes: Sequence[Sequence[int]], ranks: int, seed: int = 0, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """A gradient for each rank."""
    generator = torch.Generator().manual_seed(seed)
    numel = sum(math.prod(shape) for shape in shapes)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(ranks)]


def mean(gradients: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(gradients)).mean(0)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative to the size of all."""
    return float((got - wanted).norm() / wanted.norm())


# -- all -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", [*ALL[2:], *LOSSLESS], ids=repr)
def test_ledger_of_error_feedback(compressor: Compressor) -> None:
    ranks, owed = Ranks(compressor, ODD, 3), torch.zeros(1, dtype=torch.float64)
    for step in range(5):
        gradients = draw(ODD, 3, step)
        got = ranks.reduce(gradients)
        torch.testing.assert_close(got + ranks.withheld(), mean(gradients) + owed, rtol=0, atol=1e-12)
        owed = ranks.withheld()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("feedback", [None, NoFeedback()], ids=["feedback", "none"])
@pytest.mark.parametrize("compressor", LOSSLESS, ids=repr)
def test_lossless(compressor: Compressor, feedback: NoFeedback | None, dtype: torch.dtype) -> None:
    ranks = Ranks(compressor, ODD, 3, feedback)
    for step in range(4):
        gradients = draw(ODD, 3, step, dtype)
        got = ranks.reduce(gradients)
        assert got.dtype == dtype
        assert error(got, mean(gradients)) < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("compressor", [*ALL, *LOSSLESS], ids=repr)
def test_any_size_and_number_of_ranks(compressor: Compressor, count: int) -> None:
    """Zero, tiny and huge gradients, of few entries; a matrix of the rank that is sent is right as well."""
    tolerance = {"bf16": 0.02, "fp16": 0.002}.get(getattr(compressor, "dtype", ""), 1e-6)
    sampled = isinstance(compressor, RandomK) and compressor.density < 1
    for shapes in ([(2, 9), (4,)], [(1,)]):
        for size in (0.0, 1e-30, 1e30):
            group = Ranks(compressor, shapes, count, NoFeedback() if isinstance(compressor, Cast) else None)
            for step in range(2):
                gradients = [g * size for g in draw(shapes, count, step, torch.float32)]
                got = group.reduce(gradients)
                assert got.isfinite().all()
                if not sampled:
                    largest = max(float(g.abs().max()) for g in gradients)
                    assert float((got - mean(gradients)).abs().max()) <= tolerance * largest


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("compressor", [*ALL, PowerSGD(), RandomK()], ids=repr)
def test_measured_bytes(compressor: Compressor, ranks: int) -> None:
    shapes = [(300, 201), (300, 201), (64, 32, 3), (128, 333)]
    group = Ranks(compressor, shapes, ranks)
    group.reduce(draw(shapes, ranks, dtype=torch.float32))
    assert group.sent == pytest.approx(compressor.sent_bytes([torch.Size(s) for s in shapes], ranks), rel=1e-12)


@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_deterministic(compressor: Compressor) -> None:
    one, two = Ranks(compressor, ODD, 3), Ranks(compressor, ODD, 3)
    for step in range(3):
        gradients = draw(ODD, 3, step, torch.float32)
        assert torch.equal(one.reduce(gradients), two.reduce(gradients))


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: Cast("fp8"), "dtype='fp8' does not exist.*'bf16', 'fp16'"),
        (lambda: PowerSGD(0), "rank must be a whole number of at least 1, not 0"),
        (lambda: PowerSGD(1.5), "rank must be a whole number of at least 1, not 1.5"),  # type: ignore[arg-type]
        (lambda: PowerSGD(2, -1.0), "min_compression_rate must be a number of at least 0, not -1.0"),
        (lambda: RandomK(0.0), "density must be a number of more than 0 and at most 1, not 0.0"),
        (lambda: RandomK(1.5), "density must be a number of more than 0 and at most 1, not 1.5"),
    ],
)
def test_bad_options(make_it: type[Compressor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_it()


def test_names() -> None:
    assert repr(make("bf16")) == "Cast(dtype='bf16')"
    assert repr(make("fp16")) == "Cast(dtype='fp16')"
    assert repr(make("powersgd")) == "PowerSGD(rank=4, min_compression_rate=2.0)"
    assert repr(make("randomk")) == "RandomK(density=0.01)"


# -- 16 bits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cast_ledger(dtype: str, ranks: int) -> None:
    """What was told of each rank, summed in 16 bits, is what was applied."""
    group = Ranks(Cast(dtype), ODD, ranks)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    owed = [torch.zeros(1, dtype=torch.float64)] * ranks
    for step in range(5):
        vectors = [g + o for g, o in zip(draw(ODD, ranks, step), owed, strict=True)]
        got = group.reduce(draw(ODD, ranks, step))
        owed = [memory["residual"] for memory in group.memory]
        told = [vector - each for vector, each in zip(vectors, owed, strict=True)]
        # By any power of two: these magnitudes are far from both ends.
        total = (told[0] * 64).to(kind)
        torch.testing.assert_close(total.double() / 64, told[0], rtol=0, atol=1e-12)  # they are numbers of 16 bits
        for each in told[1:]:
            total = total + (each * 64).to(kind)
        torch.testing.assert_close(got, total.double() / 64 / ranks, rtol=0, atol=1e-12)
        assert 0 < float(mean(owed).abs().max()) < {"bf16": 2**-7, "fp16": 2**-10}[dtype]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_fp16_neither_overflows_nor_vanishes(ranks: int) -> None:
    for size in (1e-32, 1e-8, 1.0, 3e4, 65504.0, 1e38):
        gradient = torch.tensor([size, -size, size / 1000, size / 100_000])
        got = Ranks(Cast("fp16"), [(4,)], ranks, NoFeedback()).reduce([gradient] * ranks)
        torch.testing.assert_close(got, gradient, rtol=2e-3, atol=0)


def test_fp16_ends_of_its_range() -> None:
    """The largest magnitude is of a negative number, or next to the smallest of float32, whose scale would have no reciprocal."""
    for gradient in (torch.tensor([-1e6, 1.0]), torch.tensor([1e-38, -1e-38]), torch.tensor([0.0, -3e38])):
        got = Ranks(Cast("fp16"), [(2,)], 3, NoFeedback()).reduce([gradient] * 3)
        torch.testing.assert_close(got, gradient, rtol=2e-3, atol=0)


def test_fp16_scale_is_shared() -> None:
    """A rank with small gradients uses the scale of the one with large ones."""
    gradients = [torch.tensor([1e6, 1.0]), torch.tensor([1e-3, 2.0])]
    got = Ranks(Cast("fp16"), [(2,)], 2, NoFeedback()).reduce(gradients)
    torch.testing.assert_close(got, mean(gradients), rtol=2e-3, atol=0)


# -- PowerSGD --------------------------------------------------------------------------------------------------------------


def test_powersgd_fits() -> None:
    assert PowerSGD(4).fits(torch.Size((64, 64))) and PowerSGD(4).fits(torch.Size((64, 16, 3, 3)))
    assert not PowerSGD(16).fits(torch.Size((64, 64)))  # exactly half
    assert not PowerSGD(4).fits(torch.Size((1000,))) and not PowerSGD(4).fits(torch.Size((4, 1000)))
    assert PowerSGD(10**6, 0).fits(torch.Size((1000,))) and PowerSGD(10**6, 0).fits(torch.Size(()))


def test_powersgd_warm_start_finds_the_best_of_its_rank() -> None:
    """Power iteration over the steps: the truncated singular value decomposition of the mean."""
    shapes, ranks = [(30, 20), (20, 30), (30, 20)], 3
    gradients = draw(shapes, ranks)
    group = Ranks(PowerSGD(3), shapes, ranks, NoFeedback())
    best = []
    for shape, matrix in zip(shapes, mean(gradients).split(600), strict=True):
        u, s, v = torch.linalg.svd(matrix.view(shape), full_matrices=False)
        best.append((u[:, :3] * s[:3] @ v[:3]).reshape(-1))
    errors = []
    for _ in range(300):
        errors.append(error(group.reduce(gradients), torch.cat(best)))
    assert errors[0] > 0.1 and errors[-1] < 1e-3


def test_powersgd_low_rank_is_exact_at_once() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(40, 2, generator=generator), torch.randn(2, 50, generator=generator)
    gradients = [(left @ torch.diag(torch.tensor([1.0, rank])) @ right).reshape(-1) for rank in range(3)]
    for rank in (2, 4):  # 4: more columns than there is to span
        assert error(Ranks(PowerSGD(rank), [(40, 50)], 3).reduce(gradients), mean(gradients)) < 1e-6


def test_powersgd_does_not_depend_on_what_else_is_in_the_vector() -> None:
    shapes = [(8, 6), (9, 4), (8, 6), (4, 9)]
    together = Ranks(PowerSGD(2), shapes, 2)
    alone = [Ranks(PowerSGD(2), [shape], 2) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    for step in range(3):
        pieces = [g.split(sizes) for g in draw(shapes, 2, step)]
        each = [ranks.reduce([rank[i].clone() for rank in pieces]) for i, ranks in enumerate(alone)]
        got = together.reduce([torch.cat(rank) for rank in pieces])
        torch.testing.assert_close(got, torch.cat(each), rtol=0, atol=1e-12)
    assert set(together.states[0]["q"]) == {"p0", "p1", "p2", "p3"}
    assert together.states[0]["q"]["p1"].shape == (2, 4)


def test_powersgd_recovers_from_zero_gradients() -> None:
    shapes = [(20, 30), (15, 10)]
    group = Ranks(PowerSGD(2), shapes, 2, NoFeedback())
    low_rank = []
    for vectors in draw([(75,)], 2):
        a, b, c, d = vectors.split([20, 30, 15, 10])
        low_rank.append(torch.cat([torch.outer(a, b).reshape(-1), torch.outer(c, d).reshape(-1)]))
    assert error(group.reduce(low_rank), mean(low_rank)) < 1e-9
    for _ in range(3):
        assert not group.reduce([torch.zeros(750, dtype=torch.float64)] * 2).any()
    assert error(group.reduce(low_rank), mean(low_rank)) < 1e-9


def test_powersgd_follows_gradients_to_other_rows_and_columns() -> None:
    """As where other tokens or experts turn up: nothing of the new gradient is in what Q spans, nor in the first rows."""
    first, second = torch.zeros(20, 20), torch.zeros(20, 20)
    first[:8, :8], second[12:, 12:] = 1.0, 1.0
    group = Ranks(PowerSGD(2), [(20, 20)], 2, NoFeedback())
    for _ in range(3):
        group.reduce([first.reshape(-1)] * 2)
    for _ in range(2):
        got = group.reduce([second.reshape(-1)] * 2)
    assert error(got, second.reshape(-1)) < 1e-5


def test_powersgd_of_another_rank_begins_anew() -> None:
    gradients = draw([(9, 8)], 2)
    one, two = Ranks(PowerSGD(2), [(9, 8)], 2), Ranks(PowerSGD(3), [(9, 8)], 2)
    one.reduce(gradients)
    two.states = one.states
    two.reduce(gradients)
    assert two.states[0]["q"]["p0"].shape == (3, 8)


# -- random-k --------------------------------------------------------------------------------------------------------------


class Ramp(RandomK):
    def density_at(self, step: int) -> float | None:
        return 0.5 if step == 0 else None if step == 1 else 1.0


def test_randomk_density_of_the_schedule() -> None:
    group = Ranks(Ramp(0.1), [(100,)], 2, NoFeedback())
    got = [int((group.reduce([torch.ones(100)] * 2) != 0).sum()) for _ in range(3)]
    assert got == [50, 10, 100]


def test_randomk_sends_other_places_every_step() -> None:
    group, seen = Ranks(RandomK(0.1), [(200,)], 2, NoFeedback()), torch.zeros(200)
    for _ in range(120):
        places = group.reduce([torch.ones(200)] * 2) != 0
        assert int(places.view(20, 10).sum(1).eq(1).sum()) == 20  # one of each stretch
        seen += places
    assert seen.min() > 0 and seen.max() < 40


def test_randomk_is_unbiased_without_feedback() -> None:
    """Also where stretches are of unequal length: 3 of 10."""
    group, gradients = Ranks(RandomK(0.3), [(10,)], 2, NoFeedback()), draw([(10,)], 2)
    average = mean([group.reduce(gradients) for _ in range(2500)])
    assert float(((average - mean(gradients)).abs() / mean(gradients).abs()).max()) < 0.12


def test_randomk_is_not_scaled_with_feedback() -> None:
    got = Ranks(RandomK(0.1), [(100,)], 2).reduce([torch.ones(100)] * 2)
    assert got.unique().tolist() == [0.0, 1.0]
