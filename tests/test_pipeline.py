"""A pipeline inside the Trainer: what every rank sees, saves and gets back."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer
from tests.models import Base
from tests.pipeline_models import Checkpointed


def samples(count: int = 48, width: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, width, generator=generator), torch.randint(0, 5, (count,), generator=generator)


class Layers(Base):
    """Logs in every way there is, keeps a metric, and returns things from each step."""

    optimizer = "sgd"

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 5)
        self.drop = nn.Dropout(dropout)
        self.accuracy = MulticlassAccuracy(5, average="micro")
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.seen: list[Any] = []
        self.outputs: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.drop(x + torch.tanh(block(x)))
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        logits = self(batch[0])
        self.steps += 1
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("count", float(len(batch[1])), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log_dict({"largest": logits.max()}, reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("smallest", logits.min(), reduce_fx="min", on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach(), "names": ["x"] * len(batch[1]), "size": len(batch[1])}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(batch[0].sum()))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append((float(outputs["loss"]), outputs["logits"].shape, len(outputs["names"]), outputs["size"]))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
        logits = self(batch[0])
        self.log("val_loss", F.cross_entropy(logits, batch[1]))
        return {"logits": logits, "rows": len(logits)}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).softmax(-1)


def loader(batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*samples()), batch_size=batch_size, **options)


def pipeline(stages: int = 2, **options: Any) -> Hybrid3DStrategy:
    return Hybrid3DStrategy(pipeline_parallel_size=stages, **{"num_microbatches": 4, **options})


def build() -> Layers:
    torch.manual_seed(0)
    return Layers()


def one_process(function: Any) -> Any:
    return run_ranks(1, lambda _: function(lambda: "auto", 1))[0]


def test_logs_outputs_metrics_and_buffers_are_those_of_one_process() -> None:
    def fit(strategy: Any, devices: int) -> Any:
        module = build()
        run = trainer(strategy(), devices, max_epochs=2)
        run.fit(module, loader(), loader())
        values = {k: float(v) for k, v in run.callback_metrics.items()}
        return values, module.seen, module.outputs

    expected = one_process(fit)
    for values, seen, outputs in run_ranks(3, lambda _: fit(lambda: pipeline(3), 3)):
        assert values.keys() == expected[0].keys()
        for key, value in expected[0].items():
            assert values[key] == pytest.approx(value, rel=2e-5), key
        assert seen == expected[1], "no batch is lost or doubled"
        for ours, theirs in zip(outputs, expected[2], strict=True):
            assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
            assert ours[1:] == theirs[1:]


def test_evaluation_and_prediction_alone() -> None:
    def run(strategy: Any, devices: int) -> Any:
        module = build()
        each = [trainer(strategy(), devices) for _ in range(3)]
        validated = each[0].validate(module, loader(7), verbose=False)
        tested = each[1].test(module, loader(7), verbose=False)
        predicted = each[2].predict(module, loader(7))
        return validated, tested, torch.cat(predicted)  # type: ignore[arg-type]

    validated, tested, predicted = one_process(run)
    for ours in run_ranks(2, lambda _: run(pipeline, 2)):
        assert ours[0][0]["val_loss"] == pytest.approx(validated[0]["val_loss"], rel=1e-5)
        assert ours[1][0]["test_loss"] == pytest.approx(tested[0]["test_loss"], rel=1e-5)
        torch.testing.assert_close(ours[2], predicted)


class Evaluates(pl.Callback):
    """Gradients, buffers and random states before and after each validation."""

    def _state(self, run: Any) -> Any:
        grads = {n: p.grad.clone() for n, p in run.lightning_module.named_parameters() if p.grad is not None}
        buffers = {n: b.clone() for n, b in run.lightning_module.named_buffers()}
        return grads, buffers, torch.get_rng_state()

    def on_validation_start(self, run: Any, module: Any) -> None:
        self.before = self._state(run)

    def on_validation_end(self, run: Any, module: Any) -> None:
        for ours, theirs in zip(self._state(run)[:2], self.before[:2], strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[k], theirs[k]) for k in ours)
        assert torch.equal(self._state(run)[2], self.before[2])


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_validation_in_the_middle_of_a_window_changes_nothing(zero_stage: int) -> None:
    def fit(validate: bool) -> Any:
        module = build()
        options: dict[str, Any] = (
            {"num_sanity_val_steps": 2, "val_check_interval": 2} if validate else {"limit_val_batches": 0}
        )
        callbacks = [Evaluates()] if validate else []
        run = trainer(pipeline(zero_stage=zero_stage), 2, accumulate_grad_batches=4, callbacks=callbacks, **options)
        run.fit(module, loader(), loader(5))
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    for with_validation, without in run_ranks(2, lambda _: (fit(True), fit(False))):
        for name, value in without.items():
            assert torch.equal(with_validation[name], value), name


def test_the_module_is_whole_again_and_goes_on() -> None:
    def steps(strategy: Any, devices: int) -> Any:
        module = build()
        for _ in range(2):
            trainer(strategy(), devices).fit(module, loader())
            trainer(strategy(), devices).validate(module, loader(), verbose=False)
        module.eval()
        assert all("forward" not in vars(m) for m in module.modules())
        with torch.no_grad():
            return module(samples()[0]), {k: v.clone() for k, v in module.state_dict().items()}

    output, state = one_process(steps)
    for ours, whole in run_ranks(2, lambda _: steps(pipeline, 2)):
        torch.testing.assert_close(ours, output, rtol=1e-4, atol=1e-5)
        assert whole.keys() == state.keys()
        for name, value in whole.items():
            if name != "steps":  # counted once a micro-batch
                torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("count", "batch_size"), [(41, 8), (35, 16)])
def test_a_smaller_last_batch(count: int, batch_size: int) -> None:
    def fit(strategy: Any, devices: int) -> Any:
        module = build()
        data = DataLoader(TensorDataset(*(t[:count] for t in samples())), batch_size=batch_size)
        run = trainer(strategy(), devices, max_epochs=2)
        run.fit(module, data, data)
        return {n: p.detach().clone() for n, p in module.named_parameters()}, float(run.callback_metrics["val_loss"])

    parameters, loss = one_process(fit)
    for ours, ours_loss in run_ranks(2, lambda _: fit(pipeline, 2)):
        assert ours_loss == pytest.approx(loss, rel=1e-5)
        for name, value in parameters.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


class Lengths(Base):
    """Reads sequences whose length changes from batch to batch."""

    optimizer = "sgd"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.embed = nn.Embedding(20, 8)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stream(batches: list[Any]) -> DataLoader:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def test_sequence_lengths_that_change() -> None:
    batches = [[torch.randint(0, 20, (8, n), generator=torch.Generator().manual_seed(n))] for n in (6, 9, 6, 4, 9)]

    def fit(strategy: Any, devices: int) -> Any:
        torch.manual_seed(0)
        module = Lengths()
        trainer(strategy(), devices).fit(
            module, stream(batches), stream([[torch.ones(3, 5, dtype=torch.int64)], batches[0]])
        )
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    expected = one_process(fit)
    for ours in run_ranks(2, lambda _: fit(pipeline, 2)):
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


class Stream(IterableDataset):
    """Gives every sample once; a second iterator would go on where the first one was."""

    def __init__(self) -> None:
        self._source = iter(zip(*samples(), strict=True))

    def __iter__(self) -> Any:
        return self._source


def test_a_stream_loses_no_sample() -> None:
    def fit(strategy: Any, devices: int) -> Any:
        module = build()
        trainer(strategy(), devices).fit(module, DataLoader(Stream(), batch_size=8))
        return module.seen

    expected = one_process(fit)
    assert len(expected) == 6
    assert run_ranks(2, lambda _: fit(pipeline, 2)) == [expected] * 2


def test_the_recording_run_leaves_no_trace() -> None:
    """Random states, metrics, lists and buffers are as if nobody had looked at a step."""

    def check(rank: int) -> Any:
        module = build()
        random = []

        class Looks(pl.Callback):
            def on_fit_start(self, run: Any, module: Any) -> None:
                random.append(torch.get_rng_state())
                assert module.accuracy._update_count == 0
                assert int(module.steps) == 0
                assert all(not buffer.is_meta for buffer in module.buffers())

        torch.manual_seed(5)
        trainer(pipeline(), 2, callbacks=[Looks()], max_steps=1).fit(module, loader(shuffle=True))
        torch.manual_seed(5)
        torch.randint(1 << 62, ())  # the seed of the micro-batches is all that was drawn
        return torch.equal(torch.get_rng_state(), random[0])

    assert run_ranks(2, check) == [True] * 2


@pytest.mark.parametrize(("stages", "replicas"), [(2, 1), (3, 1), (2, 2)])
def test_random_numbers_do_not_depend_on_the_layout(stages: int, replicas: int) -> None:
    def fit(strategy: Any, devices: int, rank: int = 0, ranks: int = 1) -> Any:
        torch.manual_seed(0)
        module = Layers(dropout=0.3)
        x, y = samples()
        index = torch.arange(48).view(-1, ranks, 16 // ranks)[:, rank].reshape(-1)
        trainer(strategy(), devices).fit(module, DataLoader(TensorDataset(x[index], y[index]), batch_size=16 // ranks))
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    def again(strategy: Any) -> Any:
        return lambda rank: fit(strategy, stages * replicas, rank % replicas, replicas)

    alone = run_ranks(1, lambda _: fit(lambda: Hybrid3DStrategy(num_microbatches=4 * replicas), 1))[0]
    first = run_ranks(stages * replicas, again(lambda: pipeline(stages)))
    second = run_ranks(stages * replicas, again(lambda: pipeline(stages)))
    for ours, repeated in zip(first, second, strict=True):
        for name, value in alone.items():
            assert torch.equal(ours[name], repeated[name]), "the same run twice, bit for bit"
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_16_bit_formats_cross_the_boundary_as_they_are(precision: Any) -> None:
    """What autocast makes of each output is seen when the model is cut; token numbers stay whole numbers."""

    def fit(strategy: Any, devices: int) -> list[float]:
        torch.manual_seed(0)
        module = Lengths()
        losses = Losses()
        tokens = stream([[torch.arange(48).view(8, 6) % 20]] * 3)
        trainer(strategy(), devices, precision=precision, callbacks=[losses]).fit(module, tokens)
        return losses.seen

    expected = run_ranks(1, lambda _: fit(lambda: Hybrid3DStrategy(num_microbatches=4), 1))[0]
    for ours in run_ranks(2, lambda _: fit(pipeline, 2)):
        assert ours == pytest.approx(expected, rel=1e-6)


class Losses(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, run: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.seen.append(float(outputs["loss"]))


class Recurrent(Base):
    """Blocks that return tuples, of which a part is handed on; one frozen until the second epoch."""

    optimizer = "sgd"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(6, 6, batch_first=True) for _ in range(3))
        self.layers[0].requires_grad_(False)
        self.head = nn.Linear(6, 5)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].requires_grad_(True)

    def loss(self, batch: Any) -> Tensor:
        x, state = batch[0].unflatten(1, (2, 6)), None
        for layer in self.layers:
            x, state = layer(x, state)
        return F.cross_entropy(self.head(x[:, -1] + state[0][0]), batch[1])


def test_gradients_follow_when_a_frozen_layer_is_released() -> None:
    def fit(strategy: Any, devices: int) -> Any:
        torch.manual_seed(0)
        module = Recurrent()
        trainer(strategy(), devices, precision="64-true", max_epochs=3).fit(module, loader())
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    expected = one_process(fit)
    for ours in run_ranks(3, lambda _: fit(lambda: pipeline(3), 3)):
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-10, atol=1e-12)


def test_what_is_computed_again_draws_the_same_numbers() -> None:
    def fit(again: bool) -> Any:
        torch.manual_seed(0)
        module = Checkpointed()
        module.again = again
        trainer(pipeline(), 2, precision="64-true", max_steps=3).fit(module, loader())
        return {n: p.detach().clone() for n, p in module.named_parameters()}

    for with_checkpointing, without in run_ranks(2, lambda _: (fit(True), fit(False))):
        for name, value in without.items():
            torch.testing.assert_close(with_checkpointing[name], value, rtol=1e-12, atol=1e-14)


def test_a_logger_used_inside_a_step_says_that_it_is_elsewhere(tmp_path: Path) -> None:
    class Writes(Layers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
            output = super().training_step(batch, batch_idx)
            self.logger.log_metrics({"mine": float(output["loss"])})  # type: ignore[union-attr]
            return output

    def fit(rank: int) -> list[str]:
        torch.manual_seed(0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer(pipeline(), 2, max_steps=1, logger=CSVLogger(str(tmp_path / str(rank)))).fit(Writes(), loader())
        return [str(w.message) for w in caught if "nothing is logged" in str(w.message)]

    first, last = run_ranks(2, fit)
    assert not first
    assert "self.logger.log_metrics on the last stage, which is rank 1" in last[0]


class Talkative(Layers):
    """Logs a metric at each step and one name twice, and asks training to stop."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("twice", loss, on_step=False, on_epoch=True)
        self.log("twice", 3 * loss, on_step=False, on_epoch=True)
        if batch_idx == 3:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        pass


def test_metrics_of_a_step_names_logged_twice_and_stopping() -> None:
    def fit(strategy: Any, devices: int) -> Any:
        torch.manual_seed(0)
        module, accuracies = Talkative(), []

        class Reads(pl.Callback):
            def on_train_batch_end(self, run: Any, *_: Any) -> None:
                accuracies.append(float(run.callback_metrics["accuracy_step"]))

        run = trainer(strategy(), devices, callbacks=[Reads()], max_epochs=5)
        run.fit(module, loader())
        return accuracies, float(run.callback_metrics["twice"]), run.global_step

    expected = one_process(fit)
    assert expected[2] < 30
    for accuracies, twice, steps in run_ranks(2, lambda _: fit(pipeline, 2)):
        assert accuracies == pytest.approx(expected[0], abs=1e-6)
        assert twice == pytest.approx(expected[1], rel=1e-5)
        assert steps == expected[2]


@pytest.mark.parametrize("step", ["validate", "predict"])
def test_evaluation_of_a_stream_loses_no_sample(step: str) -> None:
    def evaluate(strategy: Any, devices: int) -> int:
        module, seen = build(), []

        class Counts(pl.Callback):
            def on_validation_batch_start(self, run: Any, module: Any, batch: Any, *_: Any) -> None:
                seen.append(len(batch[0]))

            on_predict_batch_start = on_validation_batch_start

        getattr(trainer(strategy(), devices, callbacks=[Counts()]), step)(module, DataLoader(Stream(), batch_size=8))
        return sum(seen)

    assert one_process(evaluate) == 48
    assert run_ranks(2, lambda _: evaluate(pipeline, 2)) == [48, 48]


def test_stages_load_the_same_samples_without_a_seed() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(12), y

    def fit(rank: int) -> list[float]:
        torch.manual_seed(rank)
        module = build()
        torch.manual_seed(100 + rank)
        trainer(pipeline(), 2).fit(module, DataLoader(Noisy(*samples()), batch_size=8, shuffle=True))
        return module.seen

    first, second = run_ranks(2, fit)
    assert first == second


def test_stages_that_load_different_samples_are_refused() -> None:
    def fit(rank: int) -> str:
        x, y = samples()
        with pytest.raises(ValueError, match="first batches differ") as caught:
            trainer(pipeline(), 2).fit(build(), DataLoader(TensorDataset(x + rank, y), batch_size=8))
        return str(caught.value)

    assert "rank 0 and rank 1 belong to one data-parallel rank" in run_ranks(2, fit)[1]
