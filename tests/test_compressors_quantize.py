"""Integers, signs and 1-bit Adam against plain arithmetic, on ranks in lock-step."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_partrain.optim import onebit_adam
from lightning_partrain.sync import compressors
from lightning_partrain.sync.compressors import quantize
from lightning_partrain.sync.compressors.base import Compressor, Task
from lightning_partrain.sync.compressors.onebit import MomentumFeedback, OneBit
from lightning_partrain.sync.compressors.quantize import Quantize
from lightning_partrain.sync.compressors.signsgd import SignSGD, pack_bits, unpack_signs
from lightning_partrain.sync.feedback import MOMENTUM, NoFeedback
from tests.compression import Ranks, parts_of, together

SHAPES = [(7, 5), (13,), (3, 2, 5)]
NUMEL = 78
FEEDING_BACK = [
    Quantize(8, 16),
    Quantize(4),
    Quantize(4, 8, rounding="stochastic"),
    Quantize(8, 16, communicator="gather"),
    Quantize(4, 24, "stochastic", "gather"),
    Quantize(32),
    SignSGD(),
    SignSGD(64),
    OneBit(128),
]
ALL: list[Compressor] = [*FEEDING_BACK, SignSGD(vote=True)]


def _gradients(ranks: int, numel: int = NUMEL, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=draw, dtype=dtype) for _ in range(ranks)]


def _ranks(compressor: Compressor, shapes: Sequence[Sequence[int]], ranks: int) -> Ranks:
    return Ranks(compressor, shapes, ranks, None if compressor.feedback else NoFeedback())


# -- all of them -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", FEEDING_BACK, ids=repr)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_arrives_and_what_is_owed_is_what_was_given(compressor: Compressor, ranks: int) -> None:
    all_ranks, owed = Ranks(compressor, SHAPES, ranks), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        gradients = _gradients(ranks, seed=step)
        mean = all_ranks.reduce(gradients)
        given, owed = torch.stack(gradients).mean(0) + owed, all_ranks.withheld()
        torch.testing.assert_close(mean + owed, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", ALL, ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_every_number_of_ranks_and_entries(compressor: Compressor, ranks: int) -> None:
    for numel in (1, 2, 3, 257):
        everyone = _ranks(compressor, [(numel,)], ranks)
        for step in range(2):
            gradient = _gradients(1, numel, step, torch.float32)[0].abs_()
            mean = everyone.reduce([gradient] * ranks)
            assert mean.shape == gradient.shape and mean.dtype == gradient.dtype and mean.isfinite().all()
            if step == 0:
                assert (mean >= 0).all()  # of one sign everywhere; later what was owed may have the other
            if numel == 1 and step == 0 and compressor.feedback:
                torch.testing.assert_close(mean, gradient)


@pytest.mark.parametrize("compressor", FEEDING_BACK, ids=repr)
@pytest.mark.parametrize("magnitude", [0.0, 1e-45, 1e-39, 1e-37, 1e-30, 1e30])
def test_zero_tiny_and_huge_numbers(compressor: Compressor, magnitude: float) -> None:
    ranks = Ranks(compressor, SHAPES, 3)
    values = torch.full((NUMEL,), magnitude)
    first = ranks.reduce([values, -values * 0.5, values])
    smallest_scale = torch.finfo(torch.float32).tiny  # of integers: other numbers are as near as that
    torch.testing.assert_close(first, values * 0.5, rtol=0.15, atol=2 * smallest_scale if magnitude else 0.0)
    for _ in range(2):
        mean = ranks.reduce([values, -values * 0.5, values])
        assert mean.isfinite().all() and ranks.withheld().isfinite().all()


@pytest.mark.parametrize("compressor", FEEDING_BACK, ids=repr)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_not_finite_does_not_become_finite(compressor: Compressor, bad: float) -> None:
    gradients = _gradients(3)
    gradients[1][40] = bad
    tasks = [Task(parts_of(SHAPES), 3, rank) for rank in range(3)]
    done, _ = together([compressor.reduce(g, task) for g, task in zip(gradients, tasks, strict=True)])
    assert not any(result.mean[40].isfinite() for result in done)


@pytest.mark.parametrize("compressor", ALL, ids=repr)
def test_the_same_again_has_the_same_bits(compressor: Compressor) -> None:
    once, again = (_ranks(compressor, SHAPES, 3) for _ in range(2))
    for step in range(3):
        assert torch.equal(once.reduce(_gradients(3, seed=step)), again.reduce(_gradients(3, seed=step)))


@pytest.mark.parametrize("compressor", [*ALL, Quantize(32, communicator="gather")], ids=repr)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("shapes", [[(1,)], [(7, 5), (13,)], [(311, 401), (7,)]], ids=str)
def test_bytes_are_those_of_the_formula(compressor: Compressor, ranks: int, shapes: list[tuple[int, ...]]) -> None:
    sizes = [torch.Size(shape) for shape in shapes]
    numel = sum(size.numel() for size in sizes)
    everyone = _ranks(compressor, shapes, ranks)
    everyone.reduce([torch.ones(numel)] * ranks)
    assert everyone.sent == pytest.approx(compressor.sent_bytes(sizes, ranks))
    if numel > 100_000 and ranks > 1:
        bits = getattr(compressor, "bits", 1)
        times = ranks - 1 if getattr(compressor, "communicator", "") == "gather" else 2 * (ranks - 1) / ranks
        scales = 0 if getattr(compressor, "vote", False) else 4 / compressor.block  # type: ignore[operator]
        assert everyone.sent == pytest.approx(times * numel * (bits / 8 + scales), rel=0.05)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Quantize(5), r"bits=5 does not exist. Choose one of 4, 8, 32"),
        (lambda: Quantize(True), r"bits=True does not exist"),
        (lambda: Quantize(block=0), r"block must be a whole number of at least 2 .* not 0"),
        (lambda: Quantize(block=7), r"block must be even, not 7"),
        (lambda: Quantize(rounding="up"), r"rounding='up' does not exist. Choose one of 'nearest', 'stochastic'"),
        (
            lambda: Quantize(communicator="all"),
            r"communicator='all' does not exist. Choose one of 'two_shot', 'gather'",
        ),
        (lambda: SignSGD(12), r"block must be a multiple of 8, not 12"),
        (lambda: SignSGD(vote=1), r"vote=1 does not exist. Choose one of False, True"),  # type: ignore[arg-type]
        (lambda: OneBit(0), r"block must be a whole number of at least 8 .* not 0"),
        (lambda: OneBit(9), r"block must be a multiple of 8, not 9"),
    ],
)
def test_bad_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_names() -> None:
    assert repr(compressors.make("int8")) == repr(Quantize()) and repr(compressors.make("int4")) == repr(Quantize(4))
    assert repr(compressors.make("signsgd")) == "SignSGD(block=256, vote=False)"
    assert repr(compressors.make("onebit")) == "OneBit(block=256)"


# -- integers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("communicator", ["two_shot", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_32_bits_lose_nothing(communicator: str, dtype: torch.dtype) -> None:
    gradients = _gradients(3, dtype=dtype)
    mean = Ranks(Quantize(32, 16, communicator=communicator), SHAPES, 3).reduce(gradients)
    torch.testing.assert_close(mean, torch.stack(gradients).mean(0), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("bits", "levels"), [(4, 7), (8, 127)])
@pytest.mark.parametrize("communicator", ["two_shot", "gather"])
def test_codes_are_the_nearest(bits: int, levels: int, communicator: str) -> None:
    def nearest(vector: list[float], block: int) -> list[float]:
        out: list[float] = []
        for begin in range(0, len(vector), block):
            scale = max(abs(x) for x in vector[begin : begin + block]) / levels
            out += [round(x / scale) * scale for x in vector[begin : begin + block]]
        return out

    gradients = _gradients(3)
    told = [nearest(g.tolist(), 8) for g in gradients]
    mean = [sum(column) / 3 for column in zip(*told, strict=True)]
    expected = nearest(mean, 8) if communicator == "two_shot" else mean
    compressor = Quantize(bits, 8, communicator=communicator)
    torch.testing.assert_close(
        Ranks(compressor, SHAPES, 3).reduce(gradients), torch.tensor(expected).double(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_comes_back(bits: int) -> None:
    levels = {4: 7, 8: 127}[bits]
    codes = torch.cartesian_prod(torch.arange(-levels, levels + 1), torch.tensor([levels, 0, -1, 1])).view(-1).double()
    assert torch.equal(Ranks(Quantize(bits, 8), [codes.shape], 2).reduce([codes, codes]), codes)


@pytest.mark.parametrize("bits", [4, 8])
def test_stochastic_rounding_is_right_on_average(bits: int) -> None:
    levels, tries = {4: 7, 8: 127}[bits], 4000
    one = torch.cat([torch.tensor([float(levels), -levels]), torch.linspace(-2.9, 2.9, 14)])
    ranks = Ranks(Quantize(bits, 16, "stochastic", "gather"), [(tries, 16)], 2, NoFeedback())
    means = ranks.reduce([one.repeat(tries)] * 2).view(tries, 16)
    error = (means.mean(0) - one).abs()
    assert (error < 5 * 0.5 / (2 * tries) ** 0.5).all() and error[2:].max() > 0  # five standard deviations
    assert (means[:, 2:] != means[0, 2:]).any(0).all(), "not random"
    own = Ranks(Quantize(bits, 16, "stochastic", "gather"), [(16,)], 2, NoFeedback())
    halves = own.reduce([one, one]) * 2
    assert (halves % 2 % 1 == 0).all() and (halves % 2 == 1).any(), "ranks draw the same numbers"
    again = own.reduce([one, one]) * 2
    assert not torch.equal(halves, again), "steps draw the same numbers"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dither", [-0.5, 0.5])
def test_stochastic_rounding_stays_in_range(bits: int, dither: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "_dither", lambda like, draw: torch.full_like(like, dither))
    values = _gradients(1, 4096, dtype=torch.float32)[0]
    ranks = Ranks(Quantize(bits, 16, "stochastic", "gather"), [(4096,)], 2, NoFeedback())
    scale = values.view(-1, 16).abs().amax(1, keepdim=True) / {4: 7, 8: 127}[bits]
    error = (ranks.reduce([values, values]) - values).view(-1, 16).abs()
    assert (error <= scale * 1.0001).all()


# -- signs -------------------------------------------------------------------------------------------------------------------


def test_bits_go_eight_a_byte() -> None:
    bits = torch.rand(3, 4096, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack_bits(bits)
    assert packed.shape == (3, 512) and packed.dtype == torch.uint8
    assert packed[1, 5] == sum(int(bits[1, 40 + place]) << place for place in range(8))
    assert torch.equal(unpack_signs(packed, torch.float32), 1.0 - 2.0 * bits)


def _signs(vector: list[float], block: int) -> list[float]:
    out: list[float] = []
    for begin in range(0, len(vector), block):
        mine = vector[begin : begin + block]
        scale = sum(abs(x) for x in mine) / len(mine)
        out += [-scale if x < 0 else scale for x in mine]
    return out


class _BlockSGD:
    """dist-EF-blockSGD (arXiv 1905.10936), algorithm 1 without its momentum, with loops; of ``vectors`` with what workers owe."""

    def __init__(self, ranks: int, numel: int, block: int) -> None:
        self.block, self.owed, self.server = block, [[0.0] * numel for _ in range(ranks)], [0.0] * numel

    def reduce(self, gradients: list[list[float]]) -> list[float]:
        told = []
        for rank, gradient in enumerate(gradients):
            vector = [g + e for g, e in zip(gradient, self.owed[rank], strict=True)]
            told.append(_signs(vector, self.block))
            self.owed[rank] = [v - t for v, t in zip(vector, told[rank], strict=True)]
        mean = [sum(column) / len(told) + e for column, e in zip(zip(*told, strict=True), self.server, strict=True)]
        result = _signs(mean, self.block)
        self.server = [m - r for m, r in zip(mean, result, strict=True)]
        return result


@pytest.mark.parametrize("compressor", [SignSGD(8), SignSGD(256), OneBit(24)], ids=repr)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_signs_are_those_of_the_paper(compressor: Any, ranks: int) -> None:
    everyone, plain = Ranks(compressor, SHAPES, ranks), _BlockSGD(ranks, NUMEL, compressor.block)
    for step in range(8):
        gradients = _gradients(ranks, seed=step)
        gradients[0][::7] = 0.0
        expected = torch.tensor(plain.reduce([g.tolist() for g in gradients]), dtype=torch.float64)
        torch.testing.assert_close(everyone.reduce(gradients), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_the_majority_decides(ranks: int) -> None:
    everyone = Ranks(SignSGD(vote=True), SHAPES, ranks, NoFeedback())
    for step in range(4):
        gradients = _gradients(ranks, seed=step)
        gradients[0][::7] = 0.0
        expected = []
        for column in zip(*(g.tolist() for g in gradients), strict=True):
            against = sum(x < 0 for x in column)
            expected.append(-1.0 if against > ranks - against else 1.0)
        assert everyone.reduce(gradients).tolist() == expected


def test_a_vote_feeds_nothing_back() -> None:
    assert SignSGD().feedback and SignSGD().can_feed_back
    assert not SignSGD(vote=True).feedback and not SignSGD(vote=True).can_feed_back


# -- 1-bit Adam --------------------------------------------------------------------------------------------------------------


def test_momentum_is_what_ranks_exchange() -> None:
    rule, (gradient, momentum, residual) = MomentumFeedback(0.9), _gradients(3)
    torch.testing.assert_close(rule.before(gradient, {}), 0.1 * gradient)
    given = {MOMENTUM: momentum, "residual": residual}
    vector = rule.before(gradient, given)
    torch.testing.assert_close(vector, 0.9 * momentum + 0.1 * gradient + residual)
    assert set(rule.after(vector, gradient, given)) == {"residual"}
    plain = OneBit().own_feedback()
    assert isinstance(plain, MomentumFeedback) and torch.equal(plain.before(gradient, {}), gradient)


def _model() -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in SHAPES]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _give(params: Sequence[Tensor], flat: Tensor) -> None:
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.grad = part.view_as(param).clone()


def _compressed_step(
    ranks: Ranks, optimizer: torch.optim.Optimizer, params: list[Tensor], gradients: list[Tensor]
) -> None:
    momentum = _flat([optimizer.state[param]["exp_avg"] for param in params])
    for memory in ranks.memory:
        memory[MOMENTUM] = momentum
    _give(params, ranks.reduce(gradients))
    onebit_adam.step(optimizer)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_run_of_1_bit_adam(decay: float) -> None:
    torch.manual_seed(0)
    lr, beta1, beta2, eps, warm_up, block = 0.01, 0.8, 0.95, 1e-6, 5, 8
    curve, target = _gradients(3, seed=1), _gradients(3, seed=2)
    params = _model()
    optimizer = torch.optim.AdamW(params, lr, (beta1, beta2), eps, decay)
    ranks = Ranks(OneBit(block), SHAPES, 3, MomentumFeedback(beta1))

    weights, m, v = _flat(params).tolist(), [0.0] * NUMEL, [0.0] * NUMEL
    plain = _BlockSGD(3, NUMEL, block)
    for step in range(1, 16):
        now = _flat(params)
        gradients = [c.abs() * (now - t) for c, t in zip(curve, target, strict=True)]
        own = [
            [abs(c) * (w - t) for c, w, t in zip(curve[r].tolist(), weights, target[r].tolist(), strict=True)]
            for r in range(3)
        ]
        if step <= warm_up:
            _give(params, torch.stack(gradients).mean(0))
            optimizer.step()
            for i in range(NUMEL):
                g = (own[0][i] + own[1][i] + own[2][i]) / 3
                m[i] = beta1 * m[i] + (1 - beta1) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g * g
        else:
            _compressed_step(ranks, optimizer, params, gradients)
            m = plain.reduce([[beta1 * m[i] + (1 - beta1) * g[i] for i in range(NUMEL)] for g in own])
        for i in range(NUMEL):
            variance = v[i] / (1 - beta2 ** min(step, warm_up))
            weights[i] *= 1 - lr * decay
            weights[i] -= lr * m[i] / (1 - beta1**step) / (variance**0.5 + eps)
        torch.testing.assert_close(_flat(params), torch.tensor(weights, dtype=torch.float64), rtol=0, atol=1e-10)


def _trained(
    kind: type[torch.optim.Adam] = torch.optim.AdamW, steps: int = 3, **options: Any
) -> tuple[list[Tensor], Any]:
    torch.manual_seed(1)
    params = _model()
    optimizer = kind(params, 0.1, **options)
    for step in range(steps):
        _give(params, _gradients(1, seed=step)[0])
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_resumed_run_goes_on(kind: type[torch.optim.Adam]) -> None:
    params, optimizer = _trained(kind)
    onebit_adam.check(optimizer)
    saved_params, saved = None, None
    for step in range(4):
        if step == 2:
            saved_params, saved = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict())
        _give(params, _gradients(1, seed=10 + step)[0])
        onebit_adam.step(optimizer)
    assert saved_params is not None and saved is not None
    resumed = kind(saved_params, 0.1)
    resumed.load_state_dict(saved)
    for step in range(2, 4):
        _give(saved_params, _gradients(1, seed=10 + step)[0])
        onebit_adam.step(resumed)
    assert torch.equal(_flat(saved_params), _flat(params))
    assert {state["frozen_step"] for state in resumed.state.values()} == {3.0}
    assert {float(state["step"]) for state in resumed.state.values()} == {7.0}
    resumed.step()  # Adam's own goes on from there


def test_half_precision_keeps_the_count_of_steps() -> None:
    params, optimizer = _trained(steps=1)
    for state in optimizer.state.values():
        state["step"].fill_(1001.0)
    onebit_adam.step(optimizer)
    halves = [param.detach().bfloat16().requires_grad_() for param in params]
    resumed = torch.optim.AdamW(halves, 0.1)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {state["frozen_step"] for state in resumed.state.values()} == {1001.0}


def test_only_what_has_a_gradient_moves() -> None:
    params, optimizer = _trained(weight_decay=0.1)
    before, steps = params[1].detach().clone(), float(optimizer.state[params[1]]["step"])
    _give(params, _gradients(1)[0])
    params[1].grad = None
    onebit_adam.step(optimizer)
    assert torch.equal(params[1], before) and float(optimizer.state[params[1]]["step"]) == steps
    assert "frozen_step" not in optimizer.state[params[1]]
    onebit_adam.step(torch.optim.AdamW(_model()))  # nothing at all


def test_noise_does_not_reach_weights_that_never_had_a_gradient() -> None:
    torch.manual_seed(2)
    params = _model()
    optimizer = torch.optim.AdamW(params, 0.1, weight_decay=0.0)
    ranks = Ranks(OneBit(256), SHAPES, 3, MomentumFeedback(0.9))
    before = _flat(params)
    dead = torch.arange(NUMEL) % 3 == 0
    for step in range(10):
        gradients = [g.masked_fill(dead, 0.0) for g in _gradients(3, seed=step)]
        if step < 4:
            _give(params, torch.stack(gradients).mean(0))
            optimizer.step()
        else:
            _compressed_step(ranks, optimizer, params, gradients)
    assert torch.equal(_flat(params)[dead], before[dead])
    moved = (_flat(params) - before)[~dead].abs()
    assert moved.min() > 0 and moved.max() < 10 * 10 * 0.1


def test_a_block_of_zeros_stays_zero() -> None:
    ranks = Ranks(OneBit(8), [(4, 8)], 3)
    for step in range(3):
        gradients = [g.view(4, 8) for g in _gradients(3, 32, step)]
        for gradient in gradients:
            gradient[2] = 0.0
        mean = ranks.reduce([g.view(-1) for g in gradients]).view(4, 8)
        assert not mean[2].any() and mean[[0, 1, 3]].all()


@pytest.mark.parametrize("state", [{}, {"step": torch.tensor(0.0)}], ids=["none", "of no steps"])
def test_a_parameter_that_adam_never_trained(state: dict[str, Tensor]) -> None:
    params, optimizer = _trained()
    optimizer.add_param_group({"params": [torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)]})
    late = optimizer.param_groups[1]["params"][0]
    late.grad = torch.ones_like(late)
    optimizer.state[late] = dict(state)
    _give(params, _gradients(1)[0])
    before = _flat(params)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) in group 1 has none.* larger start_step"):
        onebit_adam.step(optimizer)
    assert torch.equal(_flat(params), before), "changed although it failed"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, 0.1), "SGD's. Use one of those"),
        (lambda p: torch.optim.NAdam(p), "NAdam's"),
        (lambda p: type("MyAdam", (torch.optim.Adam,), {})(p), "MyAdam's"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.5), r"weight_decay=0.5 in group 0.*use AdamW"),
        (
            lambda p: torch.optim.AdamW(p, amsgrad=True, maximize=True),
            r"amsgrad=True in group 0; maximize=True in group 0",
        ),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused=True in group 0"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True in group 0"),
        (
            lambda p: torch.optim.Adam([{"params": p[:1]}, {"params": p[1:], "amsgrad": True}]),
            "amsgrad=True in group 1",
        ),
    ],
)
def test_optimizers_that_it_cannot_replace(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        onebit_adam.check(make(_model()))


def test_optimizers_that_it_can_replace() -> None:
    onebit_adam.check(torch.optim.Adam(_model()))
    onebit_adam.check(torch.optim.AdamW(_model(), weight_decay=0.1, foreach=False))
    onebit_adam.check(torch.optim.Adam(_model(), weight_decay=0.1, decoupled_weight_decay=True))
