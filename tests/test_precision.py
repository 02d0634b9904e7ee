"""16-bit formats on every layout: near one process of the same precision, with one loss scale over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.gpt import GPT
from lightning_partrain.numerics import local_tensor
from lightning_partrain.precision import MeshMixedPrecision
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.parity import shares

PRECISIONS = ("16-mixed", "bf16-mixed", "16-true", "bf16-true")
#: (tensor, pipeline, arguments) of two and of four ranks
LAYOUTS: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "dp2": (2, 1, 1, {"zero_stage": 0}),
    "dp2-zero2": (2, 1, 1, {"zero_stage": 2}),
    "dp2-zero3": (2, 1, 1, {"zero_stage": 3}),
    "tp2": (2, 2, 1, {}),
    "pp2": (2, 1, 2, {}),
    "dp4": (4, 1, 1, {}),
    "dp2-tp2": (4, 2, 1, {}),
    "dp2-pp2-zero3": (4, 1, 2, {"zero_stage": 3}),
    "tp2-pp2": (4, 2, 2, {}),
    "tp4": (4, 4, 1, {}),
    "pp4": (4, 1, 4, {}),
}
FAST = (
    ("16-mixed", "dp2-pp2-zero3"),
    ("bf16-mixed", "pp2"),
    ("16-true", "tp2"),
    ("bf16-true", "dp2-zero2"),
)


class Small(pl.LightningModule):
    """A GPT of 0.1 M parameters; in pure float16, where Adam's second moments vanish, with SGD."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(layers=4, width=48, heads=4, context=12)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        tokens = batch[0]
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        half = next(self.parameters()).dtype == torch.float16
        params = self.parameters()
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9) if half else torch.optim.AdamW(params, lr=3e-3)
        warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step"}}


class Seen(NamedTuple):
    losses: list[float]
    norms: list[float]
    states: list[tuple[int, float, float]]  # global step, learning rate, loss scale


class Watch(pl.Callback):
    """What each step did; and, on rank ``rank`` after backward pass ``at``, an infinite gradient."""

    def __init__(self, rank: int | None = None, at: int = 3) -> None:
        self.rank, self.at = rank, at
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.states: list[tuple[int, float, float]] = []

    def seen(self) -> Seen:
        return Seen(self.losses, self.norms, self.states)

    def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.global_rank == self.rank and trainer.fit_loop.epoch_loop.batch_idx == self.at:
            layout = trainer.strategy.model_parallel  # type: ignore[attr-defined]
            held = [p for p in layout.named_parameters().values() if p.grad is not None]
            local = next(g for g in (local_tensor(p.grad) for p in held) if g.numel())
            local.view(-1)[0] = float("inf")

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        self.norms.append(float(trainer.strategy.grad_norm()))  # type: ignore[attr-defined]

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        loss = trainer.strategy.reduce(outputs["loss"].detach().float(), reduce_op="mean")
        self.losses.append(float(loss))
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        rate = float(trainer.optimizers[0].param_groups[0]["lr"])
        self.states.append((trainer.global_step, rate, 0.0 if scaler is None else scaler.get_scale()))


def tokens(steps: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(256, (16, 13), generator=generator)
    return (texts[torch.randint(16, (8 * steps,), generator=generator)],)


def fit(rank: int, layout: tuple[int, int, int, dict[str, Any]], precision: str, steps: int, watch: Watch) -> Seen:
    ranks, tensor, stages, arguments = layout
    torch.manual_seed(0)
    replicas = ranks // tensor // stages
    loader = shares(tokens(steps), rank // tensor % replicas, replicas, batch=8)
    strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, **arguments)
    trainer(strategy, ranks, precision=precision, callbacks=[watch], gradient_clip_val=1.0).fit(Small(), loader)
    return watch.seen()


def on_ranks(layout: tuple[int, int, int, dict[str, Any]], precision: str, steps: int, **watch: Any) -> list[Seen]:
    return run_ranks(layout[0], lambda rank: fit(rank, layout, precision, steps, Watch(**watch)), timeout=240)


ONE = (1, 1, 1, {})
_one_process: dict[str, Seen] = {}


def one_process(precision: str) -> Seen:
    if precision not in _one_process:
        _one_process[precision] = on_ranks(ONE, precision, 50)[0]
    return _one_process[precision]


@pytest.mark.parametrize(
    ("precision", "layout"),
    [
        pytest.param(p, name, marks=() if (p, name) in FAST else pytest.mark.slow)
        for p in PRECISIONS
        for name in LAYOUTS
    ],
)
def test_fifty_steps_stay_near_one_process(precision: str, layout: str) -> None:
    expected = one_process(precision)
    assert expected.losses[-1] < expected.losses[0] / 2
    for watch in on_ranks(LAYOUTS[layout], precision, 50):
        worst = max(abs(a - b) for a, b in zip(watch.losses, expected.losses, strict=True))
        assert worst < 2e-2
        assert watch.states == expected.states
        assert watch.norms[0] == pytest.approx(expected.norms[0], rel=2e-2)


@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("dp2", 1),
        ("dp2-zero2", 1),
        ("dp2-zero3", 1),
        ("tp2", 1),
        ("pp2", 0),
        ("pp2", 1),
        pytest.param("dp2-pp2-zero3", 3, marks=pytest.mark.slow),
        pytest.param("tp2-pp2", 2, marks=pytest.mark.slow),
    ],
)
def test_an_infinite_gradient_on_one_rank_is_skipped_by_all(layout: str, rank: int) -> None:
    expected = on_ranks(ONE, "16-mixed", 8, rank=0)[0]
    steps = [step for step, *_ in expected.states]
    assert steps == [1, 2, 3, 3, 4, 5, 6, 7]  # the fourth is skipped,
    assert expected.states[3][1] == expected.states[2][1]  # the learning rate waits,
    assert [scale for *_, scale in expected.states] == [2.0**16] * 3 + [2.0**15] * 5  # and the scale is halved once
    everyone = on_ranks(LAYOUTS[layout], "16-mixed", 8, rank=rank)
    assert not torch.tensor([watch.norms[3] for watch in everyone]).isfinite().all()
    for watch in everyone:
        assert watch.states == expected.states
        assert watch.losses == pytest.approx(expected.losses, abs=2e-2)
        assert watch.norms[4:] == pytest.approx(expected.norms[4:], rel=2e-2)  # not scaled any more when they are seen


class Linears(pl.LightningModule):
    """Blocks whose values are 16 bits wide between them under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.kinds: list[tuple[torch.dtype, torch.dtype | None]] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x = batch[0]
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 2 and x.requires_grad and not isinstance(x, torch._subclasses.FakeTensor):
                x.register_hook(lambda grad, sent=x.dtype: self.kinds.append((sent, grad.dtype)))
        return x.float().pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("16-mixed", torch.float16),
        ("bf16-mixed", torch.bfloat16),
        ("16-true", torch.float16),
        ("64-true", torch.float64),
    ],
)
def test_what_crosses_a_boundary_has_one_dtype(precision: str, dtype: torch.dtype) -> None:
    def run(rank: int) -> Any:
        module = Linears()
        strategy = Hybrid3DStrategy(pipeline_parallel_size=2, num_microbatches=4)
        loader = DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=8)
        run = trainer(strategy, 2, precision=precision)
        sent = set()
        strategy_setup = strategy.setup

        def setup(trainer: Any) -> None:
            strategy_setup(trainer)
            for _, flow in strategy.pipeline._steps.values():  # type: ignore[union-attr]
                sent.update(str(c) for crossings in flow.crossing for c in crossings)

        strategy.setup = setup  # type: ignore[method-assign]
        run.fit(module, loader)
        return module.kinds, sorted(sent), {p.grad.dtype for p in module.parameters() if p.grad is not None}

    (_, sent, _), (kinds, _, _) = run_ranks(2, run)
    assert len(kinds) == 12 and set(kinds) == {(dtype, dtype)}
    assert sent and all(str(dtype) in each for each in sent)


def test_float16_is_float16_on_a_cpu_and_saved_state_goes_on_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"

    class Keep(Watch):
        def on_train_end(self, trainer: pl.Trainer, module: Any) -> None:
            if self.rank is not None:
                trainer.save_checkpoint(path)

    def train(rank: int) -> Any:
        watch = Keep(rank=1)
        fit(rank, LAYOUTS["dp2"], "16-mixed", 6, watch)
        return watch.states

    (first, second) = run_ranks(2, train)
    assert first == second and first[-1][2] == 2.0**15
    saved = torch.load(path, weights_only=True)
    assert saved["MixedPrecision"]["scale"] == 2.0**15  # plain Lightning's name for it
    assert saved["MixedPrecision"]["_growth_tracker"] == 2

    def resume(layout: Any) -> Callable[[int], Any]:
        def run(rank: int) -> Any:
            ranks, tensor, stages, arguments = layout
            strategy: Any = "auto"
            plugins: Any = [MixedPrecision("16-mixed", "cpu")]
            if arguments is not None:
                strategy = Hybrid3DStrategy(tensor_parallel_size=tensor, pipeline_parallel_size=stages, **arguments)
                plugins = None
            watch = Watch()
            loader = shares(tokens(6), 0, 1, batch=8)
            options = {"precision": "16-mixed"} if plugins is None else {"plugins": plugins}
            watch.on_before_optimizer_step = lambda *_: None  # type: ignore[method-assign]
            run = trainer(strategy, ranks, callbacks=[watch], max_epochs=2, **options)
            run.fit(Small(), loader, ckpt_path=path)
            return watch.states

        return run

    for layout in ((1, 1, 1, None), LAYOUTS["tp2"], LAYOUTS["pp2"]):
        for states in run_ranks(layout[0], resume(layout)):
            assert [scale for *_, scale in states] == [2.0**15] * 6 and states[0][0] == 6


class TwoOptimizers(pl.LightningModule):
    """Manual optimization: each optimizer steps, and may skip, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.automatic_optimization = False
        self.scales: list[float] = []

    def training_step(self, batch: Any, index: int) -> None:
        for optimizer, layer in zip(self.optimizers(), (self.a, self.b), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = layer(batch[0]).float().pow(2).mean()
            if index == 1 and layer is self.b and self.global_rank == 1:
                loss = loss * float("inf")
            self.manual_backward(loss)
            optimizer.step()
            self.scales.append(self.trainer.precision_plugin.scaler.get_scale())  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (self.a, self.b)]


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_manual_optimization_skips_one_of_two_optimizers(zero_stage: int) -> None:
    def run(rank: int) -> Any:
        torch.manual_seed(0)
        module = TwoOptimizers()
        loader = DataLoader(TensorDataset(torch.randn(12, 8)), batch_size=4)
        fitting = trainer(Hybrid3DStrategy(zero_stage=zero_stage), 2, precision="16-mixed")
        fitting.fit(module, loader)
        finite = all(bool(p.isfinite().all()) for p in module.parameters())
        return module.scales, fitting.global_step, finite

    for scales, steps, finite in run_ranks(2, run):
        assert scales == [2.0**16] * 4 + [2.0**15] * 2  # it changes when the next loss is scaled
        assert steps == 5 and finite


def test_clipping_by_hand_clips_what_is_unscaled() -> None:
    class Clips(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.automatic_optimization = False

        def training_step(self, batch: Any, _: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.layer(batch[0]).float().pow(2).mean())
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    def train(rank: int, precision: str) -> float:
        torch.manual_seed(0)
        module = Clips()
        before = module.layer.weight.detach().clone()
        loader = DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=4)
        trainer(Hybrid3DStrategy(), 2, precision=precision).fit(module, loader)
        return float((module.layer.weight - before).norm())

    half, full = (run_ranks(2, lambda rank, p=p: train(rank, p)) for p in ("16-mixed", "32-true"))
    assert half == pytest.approx(full, rel=1e-2)


@pytest.mark.parametrize("clip", [False, True])
def test_two_losses_of_one_scale_and_then_two_steps(clip: bool) -> None:
    class Both(TwoOptimizers):
        def training_step(self, batch: Any, index: int) -> None:
            optimizers: Any = self.optimizers()
            for optimizer, layer in zip(optimizers, (self.a, self.b), strict=True):
                optimizer.zero_grad()
                self.manual_backward(layer(batch[0]).float().pow(2).mean())
                if clip:
                    self.clip_gradients(optimizer, 0.5, "norm")
            for optimizer in optimizers:
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(m.parameters(), lr=0.1) for m in (self.a, self.b)]

    def train(rank: int, half: bool) -> list[Tensor]:
        torch.manual_seed(0)
        module = Both()
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)  # changes at every update
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]} if half else {}
        run = trainer(Hybrid3DStrategy(), 2, **options)
        run.fit(module, DataLoader(TensorDataset(torch.randn(24, 8)), batch_size=4))
        if half:
            assert run.precision_plugin.scaler.get_scale() == 64.0 * 2**6  # type: ignore[attr-defined]
        return [p.detach() for p in module.parameters()]

    half, full = (run_ranks(2, lambda rank, h=h: train(rank, h))[0] for h in (True, False))
    for ours, theirs in zip(half, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=2e-3)


def test_a_scale_of_the_users_own_is_taken_over() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def run(rank: int) -> Any:
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        watch = Watch()
        fitting = trainer(Hybrid3DStrategy(), 1, plugins=[plugin], callbacks=[watch])
        fitting.fit(Small(), shares(tokens(6), 0, 1, batch=8))
        return watch.states, type(fitting.precision_plugin) is MeshMixedPrecision

    ((states, ours),) = run_ranks(1, run)
    assert [scale for *_, scale in states] == [8.0, 8.0, 16.0, 16.0, 16.0, 32.0] and ours


class OwnScale(MixedPrecision):
    pass


@pytest.mark.parametrize(
    ("plugin", "words"),
    [
        (lambda: FSDPPrecision("bf16-mixed"), "FSDPPrecision does not work with this strategy"),
        (lambda: OwnScale("16-mixed", "cpu"), "Derive it from lightning_partrain.precision.MeshMixedPrecision"),
    ],
)
def test_plugins_that_cannot_work_are_refused_on_all_ranks(plugin: Callable[[], Any], words: str) -> None:
    def run(rank: int) -> None:
        trainer(Hybrid3DStrategy(), 2, plugins=[plugin()]).fit(Small(), shares(tokens(2), 0, 1, batch=8))

    with pytest.raises(RankFailure) as failure:
        run_ranks(2, run)
    assert all(words in report for report in failure.value.reports)
