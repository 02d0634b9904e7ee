"""What a user of Lightning does with a Trainer, on two ranks, beside the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    LearningRateMonitor,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import BATCH, CASES, Base, OddSizes
from tests.parity import Run, assert_same_as_one_process, hybrid, shares

STAGES = [0, 1, 2, 3]


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return CASES["odd"].data(dtype)


def states(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def same_everywhere(
    build: Callable[[int, int, Any], dict[str, Tensor]], stage: int, ranks: int = 2, **options: Any
) -> None:
    """``build(rank, ranks, strategy)`` trains and returns tensors; those of all ranks equal those of one process."""
    expected = run_ranks(1, lambda _: build(0, 1, "auto"))[0]
    for got in run_ranks(ranks, lambda rank: build(rank, ranks, Hybrid3DStrategy(zero_stage=stage, **options))):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


# -- optimization by hand and in other forms ---------------------------------------------------------------------------


class GAN(pl.LightningModule):
    """Two optimizers, manual optimization, toggled, with several forward and backward passes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 7), nn.LeakyReLU(), nn.Linear(7, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        noise = real[:, :4] * 0.5
        generator, discriminator = self.optimizers()
        ones, zeros = real.new_ones(len(real), 1), real.new_zeros(len(real), 1)

        self.toggle_optimizer(generator)
        loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        self.manual_backward(loss)
        self.clip_gradients(generator, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        loss_real = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        self.manual_backward(loss_real)
        loss_fake = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise).detach()), zeros)
        self.manual_backward(loss_fake)
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        self.log("generator_loss", loss)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=1e-2),
        ], []


@pytest.mark.parametrize("stage", STAGES)
def test_gan_with_manual_optimization(stage: int) -> None:
    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = GAN()
        trainer(strategy, ranks, precision="64-true", max_epochs=2).fit(module, shares(data(), rank, ranks))
        return states(module)

    same_everywhere(build, stage)


class Alternating(pl.LightningModule):
    """One loss through two layers, of which one is frozen in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(12, 9), nn.Linear(9, 5)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = F.cross_entropy(self.second(torch.tanh(self.first(batch[0]))), batch[1])
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(layer.parameters(), lr=1e-2) for layer in (self.first, self.second)]


@pytest.mark.parametrize("stage", STAGES)
def test_layers_of_one_loss_that_are_frozen_in_turn(stage: int) -> None:
    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Alternating()
        trainer(strategy, ranks, precision="64-true", max_epochs=2).fit(module, shares(data(), rank, ranks))
        return states(module)

    same_everywhere(build, stage)


class ManualAccumulation(OddSizes):
    """Accumulates by hand without sync, and throws away what it accumulated every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        last = batch_idx % 2 == 1
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 3 == 2:
            optimizer.zero_grad()
        elif last:
            optimizer.step()
            self.zero_grad()


@pytest.mark.parametrize("stage", STAGES)
def test_manual_accumulation_without_sync(stage: int) -> None:
    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = ManualAccumulation()
        trainer(strategy, ranks, precision="64-true", max_epochs=1).fit(module, shares(data(), rank, ranks))
        return states(module)

    same_everywhere(build, stage)


class OwnBackward(OddSizes):
    """An overridden backward, and two forward passes in one step, one of them through ``self(...)``."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + 0.1 * F.cross_entropy(self(batch[0] * 0.9), batch[1])
        self.log("train_loss", loss)
        return loss

    def backward(self, loss: Tensor) -> None:
        (2.0 * loss).backward()


@pytest.mark.parametrize("stage", STAGES)
def test_overridden_backward_and_two_forwards(stage: int) -> None:
    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = OwnBackward()
        trainer(strategy, ranks, precision="64-true", accumulate_grad_batches=2).fit(
            module, shares(data(), rank, ranks)
        )
        return states(module)

    same_everywhere(build, stage)


class PrebuiltOptimizer(OddSizes):
    """As LightningCLI does it: the optimizer exists before the Trainer replaces the parameters. Adagrad has state already."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.double()
        if kind == "adagrad":
            self.prebuilt = torch.optim.Adagrad(self.parameters(), lr=0.05)
        else:
            self.prebuilt = torch.optim.AdamW(self.parameters(), lr=0.01)

    def configure_optimizers(self) -> Any:
        return {
            "optimizer": self.prebuilt,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(self.prebuilt, 3, 0.5), "interval": "step"},
        }


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", ["adamw", "adagrad"])
def test_optimizer_built_before_the_parameters_were_replaced(stage: int, kind: str) -> None:
    """Twice with the same optimizer object: its state goes on."""

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = PrebuiltOptimizer(kind)
        for _ in range(2):
            run = trainer(strategy, ranks, precision="64-true")
            run.fit(module, shares(data(), rank, ranks))
            strategy = strategy if strategy == "auto" else Hybrid3DStrategy(zero_stage=stage)
        return states(module)

    same_everywhere(build, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", ["rmsprop", "custom"])
def test_other_optimizers(stage: int, optimizer: str) -> None:
    """Another element-wise one, and a subclass of unknown behaviour, which is given DTensors."""

    class Custom(torch.optim.AdamW):
        pass

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = CASES["odd"].build()
        kind = torch.optim.RMSprop if optimizer == "rmsprop" else Custom
        module.configure_optimizers = lambda: kind(module.parameters(), lr=1e-3)
        trainer(strategy, ranks, precision="64-true").fit(module, shares(data(), rank, ranks))
        return states(module)

    same_everywhere(build, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_backbone_unfrozen_in_the_middle(stage: int) -> None:
    """A callback unfreezes layers and adds a parameter group after the strategy has laid the model out."""

    class Frozen(Base):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
            self.head = nn.Linear(7, 5)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Frozen()
        finetune = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.0, verbose=False)
        trainer(strategy, ranks, precision="64-true", max_epochs=3, callbacks=[finetune]).fit(
            module, shares(data(), rank, ranks)
        )
        return states(module)

    same_everywhere(build, stage)


# -- loops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "options",
    [
        {"overfit_batches": 2, "max_epochs": 3},
        {"limit_train_batches": 3, "limit_val_batches": 2, "max_epochs": 2},
        {"val_check_interval": 2, "accumulate_grad_batches": 3, "num_sanity_val_steps": 2},
        {"max_steps": 3, "accumulate_grad_batches": 2},
    ],
    ids=lambda options: "-".join(options),
)
def test_trainer_options(stage: int, options: dict[str, Any]) -> None:
    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = CASES["odd"].build()
        loader = shares(data(), rank, ranks)
        run = trainer(strategy, ranks, precision="64-true", **options)
        run.fit(module, loader, loader)
        validated = run.callback_metrics.get("val_loss", torch.zeros(()))  # max_steps ends before the epoch
        return {**states(module), "step": torch.tensor(run.global_step), "val": validated.double()}

    same_everywhere(build, stage)


@pytest.mark.parametrize("stage", [1, 3])
def test_fast_dev_run(stage: int) -> None:
    def build(rank: int) -> int:
        loader = shares(data(torch.float32), rank, 2)
        run = trainer(Hybrid3DStrategy(zero_stage=stage), 2, fast_dev_run=True)
        run.fit(CASES["odd"].build(), loader, loader)
        return run.global_step

    assert run_ranks(2, build) == [1, 1]


class Classifier(OddSizes):
    """With torchmetrics as a submodule, and every entry point of the Trainer."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(5, average="micro")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.accuracy(self(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(-1)


@pytest.mark.parametrize("stage", STAGES)
def test_fit_test_save_fit_and_a_whole_module(stage: int, tmp_path: Path) -> None:
    """After each call the module is plain and usable; the second fit goes on as in one process."""

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = Classifier().double()
        loader = shares(data(), rank, ranks)
        run = trainer(strategy, ranks, precision="64-true", max_epochs=1)
        run.fit(module, loader, loader)
        everything = data()[0].double()
        result = {"accuracy": run.callback_metrics["accuracy"].double(), "after_fit": module(everything).detach()}
        assert all(type(p) is nn.Parameter and p.shape for p in module.parameters() if p.ndim)
        result["tested"] = torch.tensor(run.test(module, loader, verbose=False)[0]["test_loss"], dtype=torch.float64)
        predictions = run.predict(module, loader)
        result["predicted"] = run.strategy.reduce(sum(p.sum() for p in predictions).double(), reduce_op="sum")
        run.save_checkpoint(tmp_path / f"{ranks}.ckpt")
        run.fit_loop.max_epochs = 2
        run.fit(module, loader, loader)
        result["after_second_fit"] = module(everything).detach()
        again = trainer("auto", 1)
        return {
            **result,
            **states(module),
            "saved": torch.tensor(len(torch.load(tmp_path / f"{ranks}.ckpt")["state_dict"]) + again.max_epochs),
        }

    same_everywhere(build, stage)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_early_stopping_schedulers_and_monitors_agree(stage: int, tmp_path: Path) -> None:
    """Each rank's own validation loss differs; all stop in the same epoch and hold the same rate."""

    def build(rank: int) -> Any:
        torch.manual_seed(0)
        module = CASES["odd"].build()

        def optimizers() -> Any:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

        module.configure_optimizers = optimizers
        logger = (
            CSVLogger(tmp_path, name="", version="run") if rank == 0 else CSVLogger(tmp_path, name="", version="other")
        )
        run = trainer(
            Hybrid3DStrategy(zero_stage=stage),
            2,
            max_epochs=30,
            callbacks=[EarlyStopping("val_loss", patience=1), LearningRateMonitor(), ModelSummary()],
            logger=logger,
            log_every_n_steps=1,
        )
        loader = shares(data(torch.float32), rank, 2)
        run.fit(module, loader, loader)
        metrics = {k: float(v) for k, v in run.callback_metrics.items() if k in ("val_loss", "train_loss_epoch")}
        return run.current_epoch, run.optimizers[0].param_groups[0]["lr"], metrics

    first, second = run_ranks(2, build)
    assert first == second
    assert first[0] < 30
    assert "lr-SGD" in (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0]
    assert not (tmp_path / "other").exists(), "one logger writes"


@pytest.mark.parametrize("stage", STAGES)
def test_learning_rate_finder(stage: int, tmp_path: Path) -> None:
    """The same suggestion on all ranks, and the weights of before."""

    class Tuned(OddSizes):
        learning_rate = 1e-3

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    def build(rank: int) -> Any:
        torch.manual_seed(0)
        module = Tuned()
        before = states(module)
        loader = shares(data(torch.float32), rank, 2)
        run = trainer(Hybrid3DStrategy(zero_stage=stage), 2, max_epochs=5, default_root_dir=tmp_path)
        found = pl.tuner.Tuner(run).lr_find(module, loader, num_training=30)
        after = states(module)
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert module.learning_rate == found.suggestion()
        run.fit(module, loader)
        return module.learning_rate, run.global_step

    first, second = run_ranks(2, build)
    assert first == second
    assert first[1] == 35
    assert not list(tmp_path.glob(".lr_find*"))


@pytest.mark.parametrize("stage", STAGES)
def test_model_summary_counts_the_whole_model(stage: int) -> None:
    class Summary(ModelSummary):
        total = 0

        def on_fit_start(self, trainer: Any, module: Any) -> None:
            self.total = self._summary(trainer, module).total_parameters

    def build(rank: int) -> int:
        summary = Summary()
        run = trainer(
            Hybrid3DStrategy(zero_stage=stage), 2, max_steps=1, callbacks=[summary], enable_model_summary=True
        )
        run.fit(CASES["gpt"].build(), shares(CASES["gpt"].data(torch.float32), rank, 2))
        return summary.total

    expected = sum(p.numel() for p in CASES["gpt"].build().parameters())
    assert run_ranks(2, build) == [expected] * 2


def test_weight_averaging_works_without_sharding() -> None:
    def build(rank: int) -> int:
        run = trainer(Hybrid3DStrategy(zero_stage=0), 2, max_epochs=3, callbacks=[StochasticWeightAveraging(1e-2)])
        run.fit(CASES["odd"].build(), shares(data(torch.float32), rank, 2))
        return run.global_step

    assert run_ranks(2, build) == [21, 21]


def test_injected_sampler_and_uneven_validation() -> None:
    """With Lightning's own sampler the ranks share the samples out; one process with the same order sees the same."""

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        pl.seed_everything(3, verbose=False)
        module = CASES["odd"].build()
        samples = TensorDataset(*data())
        sampler = torch.utils.data.DistributedSampler(samples, 1, 0, shuffle=True, seed=3) if ranks == 1 else None
        loader = DataLoader(samples, batch_size=BATCH // ranks, sampler=sampler)
        trainer(strategy, ranks, precision="64-true", max_epochs=2, use_distributed_sampler=True).fit(module, loader)
        return states(module)

    same_everywhere(build, 1)


def test_local_batch_norm_by_default() -> None:
    """Without sync_batchnorm each rank normalises by its own batch; rank 0's running statistics are everyone's at the end."""

    def build(rank: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = CASES["batch_norm"].build()
        trainer(Hybrid3DStrategy(zero_stage=1), 2).fit(module, shares(CASES["batch_norm"].data(torch.float32), rank, 2))
        return states(module)

    first, second = run_ranks(2, build)
    different = [name for name in first if not torch.equal(first[name], second[name])]
    assert not different


def test_grad_norm_in_a_hook() -> None:
    """`strategy.grad_norm()` is the whole model's, on every rank and stage, also after clipping."""
    records = assert_same_as_one_process(Run("odd", clip=("norm", 0.05)), 2, hybrid(zero_stage=3))
    assert records[0].norms == records[1].norms
    assert max(records[0].norms) > 0.05


def test_buffers_follow_rank_zero() -> None:
    """As in DDP, buffers that a step changes are those of rank 0 on every rank before the next step."""

    class Queue(OddSizes):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))
            self.history: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.history.append(float(self.seen[0]))
            self.seen += self.global_rank + 1.0
            return self.loss(batch)

    def build(rank: int) -> list[float]:
        module = Queue()
        trainer(Hybrid3DStrategy(zero_stage=1), 2).fit(module, shares(data(torch.float32), rank, 2))
        return [*module.history, float(module.seen[0])]

    assert run_ranks(2, build) == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]] * 2


def test_module_written_for_model_parallel_strategy() -> None:
    """`self.device_mesh["data_parallel"]` and `["tensor_parallel"]` exist, and fully_shard in configure_model works."""
    from torch.distributed.fsdp import fully_shard

    class Written(OddSizes):
        def configure_model(self) -> None:
            assert self.device_mesh is not None
            assert self.device_mesh["tensor_parallel"].size() == 1
            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

        def sizes(self) -> int:
            return self.device_mesh["data_parallel"].size()

    def build(rank: int) -> int:
        module = Written()
        run = trainer(Hybrid3DStrategy(zero_stage=3), 2, max_steps=2)
        run.fit(module, shares(data(torch.float32), rank, 2))
        return run.global_step

    assert run_ranks(2, build) == [2, 2]


@pytest.mark.parametrize("stage", [0, 1])
def test_backward_with_create_graph(stage: int) -> None:
    """The gradients of such a pass are part of a graph; what is averaged is their value."""

    class CreateGraph(OddSizes):
        def backward(self, loss: Tensor) -> None:
            loss.backward(create_graph=True)

    def build(rank: int, ranks: int, strategy: Any) -> dict[str, Tensor]:
        torch.manual_seed(0)
        module = CreateGraph()
        trainer(strategy, ranks, precision="64-true", accumulate_grad_batches=2).fit(
            module, shares(data(), rank, ranks)
        )
        return states(module)

    same_everywhere(build, stage)
