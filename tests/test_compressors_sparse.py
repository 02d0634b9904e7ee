"""Compressors that send few entries, and Adasum: what is sent, what is owed, and that every entry has its turn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_partrain.sync.compressors.adasum import Adasum, combine
from lightning_partrain.sync.compressors.base import Compressor, State
from lightning_partrain.sync.compressors.sketch import Sketch
from lightning_partrain.sync.compressors.threshold import SAMPLE, THRESHOLD, Threshold
from lightning_partrain.sync.compressors.topk import TopK, largest
from lightning_partrain.sync.feedback import MomentumCorrection, NoFeedback
from tests.compression import Ranks, parts_of

SHAPES = [(7, 5), (13,), (3, 2, 5)]
SPARSE = [TopK(0.1), Threshold(density=0.1), Threshold(1.0, density=0.1), Sketch(compression=3.0, density=0.1)]
LOSSLESS = [TopK(1.0), Threshold(0.0, density=1.0), Sketch(density=1.0)]
EVERY = [*SPARSE, *LOSSLESS, Adasum()]


def gradients(ranks: int, numel: int, step: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1000 + step)
    return list(torch.randn(ranks, numel, generator=draw, dtype=dtype).unbind())


def numel_of(shapes: Sequence[Sequence[int]]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def mean(vectors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(vectors)).mean(0)


@pytest.mark.parametrize("compressor", [*SPARSE, *LOSSLESS], ids=repr)
def test_mean_and_what_is_owed_are_gradients_and_what_was_owed(compressor: Compressor) -> None:
    numel, ranks = numel_of(SHAPES), Ranks(compressor, SHAPES, 3)
    owed = torch.zeros(numel, dtype=torch.float64)
    for step in range(6):
        given = gradients(3, numel, step)
        got = ranks.reduce(given)
        torch.testing.assert_close(got + ranks.withheld(), mean(given) + owed, rtol=0, atol=1e-12)
        owed = ranks.withheld()
    assert bool(owed.any()) == (compressor in SPARSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("compressor", LOSSLESS, ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_all_entries_are_the_plain_mean(compressor: Compressor, ranks: int, dtype: torch.dtype) -> None:
    given = gradients(ranks, numel_of(SHAPES), dtype=dtype)
    got = Ranks(compressor, SHAPES, ranks).reduce(given)
    assert got.dtype == dtype
    torch.testing.assert_close(got, mean(given), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("ranks", [1, 3])
def test_zero_tiny_and_huge(compressor: Compressor, size: float, ranks: int) -> None:
    """As the same gradients of an ordinary size, times ``size``."""
    if isinstance(compressor, Threshold) and compressor.threshold:
        compressor = Threshold(size, density=compressor.density)
    numel = numel_of(SHAPES)
    given = gradients(ranks, numel, dtype=torch.float32)
    got = Ranks(compressor, SHAPES, ranks).reduce([vector * size for vector in given])
    if isinstance(compressor, Threshold) and compressor.threshold:
        compressor = Threshold(1.0, density=compressor.density)
    like = Ranks(compressor, SHAPES, ranks).reduce(given)
    torch.testing.assert_close(got.double(), like.double() * size, rtol=1e-5, atol=1e-6 * size)


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("numel", [1, 3])
def test_vectors_shorter_than_the_number_of_ranks(compressor: Compressor, ranks: int, numel: int) -> None:
    given = [torch.full((numel,), 3.0)] * ranks
    got = Ranks(compressor, [(numel,)], ranks).reduce(given)
    assert bool(((got - 3.0).abs() < 1e-6).logical_or(got == 0).all())
    if numel == 1 or compressor not in SPARSE:
        torch.testing.assert_close(got, given[0])
    else:
        assert int((got != 0).sum()) == 1


@pytest.mark.parametrize("compressor", [TopK(), Threshold(), Sketch(), Adasum(), Sketch(density=1.0)], ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_bytes_are_those_of_the_formula(compressor: Compressor, ranks: int) -> None:
    for shapes in ([(301, 400), (7,)], SHAPES):
        together = Ranks(compressor, shapes, ranks)
        together.reduce(gradients(ranks, numel_of(shapes), dtype=torch.float32))
        expected = compressor.sent_bytes([torch.Size(shape) for shape in shapes], ranks)
        assert together.sent == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("compressor", EVERY, ids=repr)
def test_same_seed_same_bits(compressor: Compressor) -> None:
    one, other = Ranks(compressor, SHAPES, 3), Ranks(compressor, SHAPES, 3)
    for step in range(3):
        given = gradients(3, numel_of(SHAPES), step, torch.float32)
        assert torch.equal(one.reduce(given), other.reduce(given))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: TopK(0.0), r"density must be a number of more than 0 and at most 1, not 0\.0"),
        (lambda: TopK(ramp_steps=1.5), r"ramp_steps must be a whole number of at least 0, not 1\.5"),  # type: ignore[arg-type]
        (lambda: TopK(0.5, ramp_steps=3), r"ramp_steps=3 needs a density below 0\.25, not 0\.5"),
        (lambda: TopK(momentum=1.0), r"momentum must be a number of at least 0 and at most 0\.999, not 1\.0"),
        (lambda: Threshold(-1.0), r"threshold must be a number of at least 0 and at most 1e\+38, not -1\.0"),
        (lambda: Threshold(density=2), r"density must be .* not 2"),
        (lambda: Threshold(reuse=0), r"reuse must be a whole number of at least 1, not 0"),
        (lambda: Sketch(rows=0), r"rows must be a whole number of at least 1 and at most 16, not 0"),
        (lambda: Sketch(compression=0.5), r"compression must be .* at least 1 .* not 0\.5"),
        (lambda: Sketch(density=math.nan), r"density must be .* not nan"),
    ],
)
def test_options_out_of_range(make: type[Compressor], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()


# -- the largest entries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 40, 1000, 5003])
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "one row"])
def test_largest_is_exact(count: int, kind: str) -> None:
    vector = gradients(1, 5003)[0]
    if kind == "ties":
        vector = (vector * 2).round()
    if kind == "zeros":
        vector = vector * (torch.arange(5003) % 700 == 5)
    if kind == "one row":
        vector = vector * (torch.arange(5003) < 50)
    positions = largest(vector, count)
    assert positions.unique().numel() == count
    assert torch.equal(vector[positions].abs().sort().values, vector.abs().sort().values[-count:])


def test_top_k_takes_the_largest_of_each_rank() -> None:
    given = [torch.tensor([1.0, -9.0, 2.0, 0.0]), torch.tensor([1.0, 5.0, -2.0, 7.0])]
    got = Ranks(TopK(0.5), [(2,), (2,)], 2).reduce(given)
    assert got.tolist() == [0.0, -2.0, 1.0, 3.5]


def test_ramp_falls_exponentially_from_a_quarter() -> None:
    ramp = TopK(0.01, ramp_steps=4)
    assert [ramp.density_at(step) for step in range(6)] == [
        pytest.approx(0.25),
        pytest.approx(0.25 / 25**0.25),
        pytest.approx(0.05),
        pytest.approx(0.25 / 25**0.75),
        None,
        None,
    ]
    ranks, sent = Ranks(ramp, [(1000,)], 2), []
    for step in range(5):
        ranks.reduce(gradients(2, 1000, step))
        sent.append(ranks.sent / 12)  # 4 bytes a position, and 8 bytes a value of float64
    assert sent == [250, 112, 50, 23, 10]


# -- momentum correction -------------------------------------------------------------------------------------------------


def test_ledger_of_momentum_correction() -> None:
    momentum, numel = 0.9, numel_of(SHAPES)
    compressor = TopK(0.1, momentum=momentum)
    ranks = Ranks(compressor, SHAPES, 3, compressor.own_feedback())
    u = v = torch.zeros(3, numel, dtype=torch.float64)
    for step in range(5):
        given = gradients(3, numel, step)
        got = ranks.reduce(given)
        velocity = momentum * u + torch.stack(given)
        new_u = torch.stack([memory["momentum"] for memory in ranks.memory])
        new_v = torch.stack([memory["residual"] for memory in ranks.memory])
        sent = v + velocity - new_v
        torch.testing.assert_close(got, sent.mean(0), rtol=0, atol=1e-12)
        was_sent = new_v == 0
        assert was_sent.sum(1).tolist() == [math.ceil(0.1 * numel)] * 3
        assert not new_u[was_sent].any()
        torch.testing.assert_close(new_u[~was_sent], velocity[~was_sent], rtol=0, atol=1e-12)
        u, v = new_u, new_v


def test_late_gradients_arrive_with_their_momentum() -> None:
    """What was withheld moves its weight, at last, by as much as SGD with momentum has moved it by then."""
    steps, momentum, lr = 6, 0.9, 0.1
    compressor = TopK(0.5, momentum=momentum)
    ranks = Ranks(compressor, [(2,)], 2, compressor.own_feedback())
    weight, moved = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.zeros(2, dtype=torch.float64)
    optimizer = torch.optim.SGD([weight], lr, momentum=momentum)
    for step in range(steps):
        given = gradients(2, 2, step)
        for vector in given:  # the second entry keeps the place, up to the last step
            vector[1] = 100.0 if step < steps - 1 else 0.0
        weight.grad = mean(given)
        optimizer.step()
        moved -= lr * ranks.reduce(given)
        assert bool(moved[0]) == (step == steps - 1)
    torch.testing.assert_close(moved[0], weight.detach()[0], rtol=0, atol=1e-10)


def test_all_entries_with_momentum_correction_are_plain_gradients() -> None:
    """The published rule: where an entry was sent, its momentum begins anew."""
    compressor = TopK(1.0, momentum=0.9)
    ranks = Ranks(compressor, SHAPES, 2, compressor.own_feedback())
    for step in range(3):
        given = gradients(2, numel_of(SHAPES), step)
        torch.testing.assert_close(ranks.reduce(given), mean(given), rtol=0, atol=1e-12)
    assert isinstance(compressor.own_feedback(), MomentumCorrection)
    assert TopK().own_feedback() is None


# -- a threshold ---------------------------------------------------------------------------------------------------------


def test_only_what_reaches_the_threshold_is_sent() -> None:
    given = [torch.tensor([0.5, -2.0, 0.99, 1.0]), torch.tensor([3.0, 0.1, 0.0, -0.2])]
    got = Ranks(Threshold(1.0, density=1.0), [(4,)], 2).reduce(given)
    assert got.tolist() == [1.5, -1.0, 0.0, 0.5]


@pytest.mark.parametrize("at", [0, 499, 958, 959, 960, 1002])
def test_a_single_entry_is_found_wherever_it_is(at: int) -> None:
    vector = torch.zeros(1003)
    vector[at] = -2.0
    assert torch.equal(Ranks(Threshold(1.0, density=0.05), [(1003,)], 2).reduce([vector, vector]), vector)


@pytest.mark.parametrize(("numel", "density"), [(1000, 0.01), (1003, 0.1), (13, 0.01), (97, 0.5), (50, 0.03)])
def test_no_entry_waits_for_ever_when_there_is_too_little_room(numel: int, density: float) -> None:
    """All entries reach the threshold in every step, as large ones as can be."""
    ranks = Ranks(Threshold(1e-3, density=density), [(numel,)], 2)
    room, served = math.ceil(density * numel), torch.zeros(numel)
    for _ in range(2 * math.ceil(numel / room)):
        got = ranks.reduce([torch.ones(numel)] * 2)
        assert int((got != 0).sum()) == room
        served += got != 0
    assert bool(served.all())


def test_estimate_is_near_the_density_and_follows_the_gradients() -> None:
    numel, density = 3 * SAMPLE, 0.01
    ranks = Ranks(Threshold(density=density, reuse=8), [(numel - 100,), (100,)], 1, NoFeedback())
    for step in range(12):
        size = 1.0 if step < 4 else 1.3  # so much larger that five times as many would reach the estimate
        got = ranks.reduce([gradients(1, numel, step)[0] * size])
        threshold = ranks.states[0][THRESHOLD]["p1"]
        assert torch.equal(threshold, ranks.states[0][THRESHOLD]["p0"])
        if step in (0, 3):  # 2.58 is the quantile of the normal distribution
            assert 0.97 < float(threshold) / 2.576 < 1.03
            assert 0.8 < int((got != 0).sum()) / (density * numel) <= 1.001
        if step in (7, 8):
            assert 0.95 < float(threshold) / (2.576 * 1.3) < 1.05


def test_estimate_is_reused() -> None:
    ranks = Ranks(Threshold(density=0.1, reuse=4), [(1000,)], 1, NoFeedback())
    given = gradients(1, 1000)[0]
    ranks.reduce([given])
    for _ in range(3):  # the same number as was estimated reach it: nothing to correct
        ranks.reduce([given])
        assert float(ranks.states[0][THRESHOLD]["p0"]) == pytest.approx(float(given.abs().sort().values[-100]))
    ranks.states = [{THRESHOLD: {"p0": torch.tensor(7.0, dtype=torch.float64)}}]
    ranks.reduce([given])  # the fourth: estimated again
    assert float(ranks.states[0][THRESHOLD]["p0"]) == pytest.approx(float(given.abs().sort().values[-100]))


def test_estimates_of_parameters_that_travelled_apart() -> None:
    """The one that most of them had serves for all."""
    state: State = {
        THRESHOLD: {name: torch.tensor(v, dtype=torch.float64) for name, v in zip("abc", (2, 2, 9), strict=True)}
    }
    ranks = Ranks(Threshold(density=1.0), [(5,), (5,), (5,), (5,)], 1, step=1)
    ranks.states = [{THRESHOLD: {f"p{'abc'.index(name)}": value for name, value in state[THRESHOLD].items()}}]
    got = ranks.reduce([torch.arange(20, dtype=torch.float64) / 5])
    assert torch.equal(got != 0, torch.arange(20) >= 10)


def test_zeros_take_no_room() -> None:
    vector = torch.zeros(1000)
    vector[::100] = 1.0
    got = Ranks(Threshold(density=0.1), [(1000,)], 2).reduce([vector, vector])
    assert torch.equal(got, vector)


# -- a sketch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["power law", "Cauchy", "heavy rows"])
def test_heavy_hitters_of_the_mean_are_found(kind: str) -> None:
    """Of the largest 0.1 % at least 90 %, at the defaults; also where they are neighbours."""
    numel = 200_000
    draw = torch.Generator().manual_seed(3)
    sign = torch.randn(numel, generator=draw, dtype=torch.float64).sign()
    if kind == "power law":
        total = sign / (1.0 + torch.randperm(numel, generator=draw))
    elif kind == "Cauchy":
        total = torch.tan(torch.pi * (torch.rand(numel, generator=draw, dtype=torch.float64) - 0.5))
    else:
        total = torch.randn(numel, generator=draw, dtype=torch.float64)
        total[77_000:77_200] = 50 * sign[:200]
    noise = torch.randn(numel, generator=draw, dtype=torch.float64) * total.abs()  # no rank's own are those of the mean
    given = [total + noise, total - noise]
    ranks = Ranks(Sketch(), [(numel,)], 2, NoFeedback())
    heavy = total.abs().topk(numel // 1000).indices
    found = []
    for _ in range(4):
        got = ranks.reduce(given)
        sent = got != 0
        assert int(sent.sum()) <= numel // 100
        torch.testing.assert_close(got[sent], total[sent], rtol=1e-12, atol=1e-12)  # their values are exact
        found.append(float(sent[heavy].double().mean()))
    assert sum(found) / len(found) >= 0.9, found


def test_hash_is_new_in_every_step() -> None:
    """Else whoever shares a place with something large would share it for ever."""
    ranks = Ranks(Sketch(compression=20.0, density=0.02), [(2000,)], 2, NoFeedback())
    given = gradients(1, 2000)[0]
    sent = [ranks.reduce([given, given]) != 0 for _ in range(2)]
    assert not torch.equal(*sent)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_few_large_entries_are_found_exactly_by_any_number_of_rows(rows: int) -> None:
    vector = torch.zeros(997)
    vector[[3, 500, 996]] = torch.tensor([4.0, -5.0, 6.0])
    got = Ranks(Sketch(rows=rows, compression=4.0, density=0.2), [(997,)], 2).reduce([vector, vector])
    assert torch.equal(got, vector)


# -- Adasum --------------------------------------------------------------------------------------------------------------


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """As published, of one parameter."""
    of_a = 1.0 if not a.any() else 1 - float(a @ b / (2 * a @ a))
    of_b = 1.0 if not b.any() else 1 - float(a @ b / (2 * b @ b))
    return of_a * a + of_b * b


def simulated(given: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Tensor:
    results = []
    for part in parts_of(shapes):
        nodes = [vector[part.start : part.start + part.numel] for vector in given]
        while len(nodes) > 1:
            odd = nodes[-1:] if len(nodes) % 2 else []
            nodes = [adasum(a, b) for a, b in zip(nodes[::2], nodes[1::2], strict=False)] + odd
        results.append(nodes[0])
    return torch.cat(results)


@pytest.mark.parametrize("shapes", [SHAPES, [(1,)], [(3,), (1,), (2, 2), (1,), (301,)]], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_adasum_is_its_recursive_rule(ranks: int, shapes: list[tuple[int, ...]]) -> None:
    given = gradients(ranks, numel_of(shapes))
    got = Ranks(Adasum(), shapes, ranks, NoFeedback()).reduce(given)
    torch.testing.assert_close(got, simulated(given, shapes), rtol=0, atol=1e-10)


def test_adasum_of_zeros_is_the_others_sum() -> None:
    given = gradients(3, numel_of(SHAPES))
    given[1].zero_()
    given[2][:35] = 0.0
    got = Ranks(Adasum(), SHAPES, 3, NoFeedback()).reduce(given)
    torch.testing.assert_close(got, simulated(given, SHAPES), rtol=0, atol=1e-10)
    assert torch.equal(got[:35], given[0][:35])


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_adasum_of_equal_and_of_orthogonal_gradients(ranks: int) -> None:
    vector = gradients(1, 40)[0]
    got = Ranks(Adasum(), [(40,)], ranks, NoFeedback()).reduce([vector] * ranks)
    torch.testing.assert_close(got, vector)
    orthogonal = [vector * (torch.arange(40) % ranks == rank) for rank in range(ranks)]
    got = Ranks(Adasum(), [(40,)], ranks, NoFeedback()).reduce(orthogonal)
    torch.testing.assert_close(got, vector)


def test_adasum_of_what_cancels() -> None:
    """Nothing but rounding is left of the first two: no share of the others may be computed from that."""
    a, b = gradients(2, 40)
    got = Ranks(Adasum(), [(40,)], 4, NoFeedback()).reduce([a, -a, 1e6 * b, 1e6 * b])
    torch.testing.assert_close(got, 1e6 * b, rtol=0, atol=1e-6)
    almost = torch.tensor([[1, 2**-52 - 1, 1e-9], [2**-52 - 1, 1, 0], [1e-9, 0, 1]], dtype=torch.float64)
    torch.testing.assert_close(combine(almost[None]), torch.tensor([[1.5, 1.5, 1.0]], dtype=torch.float64))


def test_adasum_remembers_nothing() -> None:
    assert not Adasum.feedback and Adasum.least_dim == 0 and Adasum.takes_embeddings
    ranks = Ranks(Adasum(), SHAPES, 2)
    ranks.reduce(gradients(2, numel_of(SHAPES)))
    assert not ranks.withheld().any()
