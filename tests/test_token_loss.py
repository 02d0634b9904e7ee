"""Losses that are sums over tokens: the gradients of one large batch, however it is cut into ragged pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import Base
from tests.parity import Record, Recorder, complete, far, shares
from tests.pipeline_models import lm
from tests.tensor_models import NO_DROPOUT, PLANS, SMALL, EightHeads

BATCH, WINDOW, STEPS = 8, 3, 3


class Texts(Base):
    """Predicts labels of which each sample has another number; -100 stands for none."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.sums = sums
        self.build()

    def build(self) -> None:
        self.model = EightHeads().model

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(tokens)

    def sum_of_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten(), reduction="sum")

    def training_step(self, batch: Any, _: int) -> Any:
        tokens, labels = batch
        loss, count = self.sum_of_losses(tokens, labels), (labels != -100).sum()
        if self.sums:
            return {"loss": loss, "num_tokens": count, "other": loss.detach() * 0}
        return {"loss": loss / count}


class Bert(Texts):
    def build(self) -> None:
        self.model = lm("BertConfig", "AutoModelForMaskedLM", **SMALL, num_attention_heads=4, **NO_DROPOUT)(
            transformers
        )

    def logits(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens % 96).logits

    def sum_of_losses(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return super().sum_of_losses(tokens, torch.where(labels >= 0, labels % 96, labels))


class Llama(Texts):
    """Hugging Face's own loss, of one item: the sum."""

    def build(self) -> None:
        self.model = lm("LlamaConfig", **SMALL, num_attention_heads=4, num_key_value_heads=4)(transformers)

    def training_step(self, batch: Any, _: int) -> Any:
        tokens, labels = batch[0] % 96, torch.where(batch[1] >= 0, batch[1] % 96, batch[1])
        count = (labels[:, 1:] != -100).sum()  # of the shifted labels
        if self.sums:
            loss = self.model(input_ids=tokens, labels=labels, num_items_in_batch=1).loss
            return {"loss": loss, "num_tokens": count}
        return {"loss": self.model(input_ids=tokens, labels=labels).loss}


MODELS = {"gpt": Texts, "bert4": Bert, "llama8": Llama}


def data(samples: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(256, (samples, 12), generator=generator)
    lengths = torch.randint(0, 12, (samples,), generator=generator)
    lengths[0] = 11
    labels = tokens.roll(-1, 1).masked_fill(torch.arange(12) > lengths[:, None], -100)
    labels[8:12] = -100  # a data-parallel rank without any label in a pass
    return tokens, labels


def fit(model: str, layout: tuple[int, int, int, dict[str, Any]], rank: int, accumulate: int) -> Record:
    ranks, tensor, stages, arguments = layout
    torch.manual_seed(0)
    module = MODELS[model](sums=True)
    recorder = Recorder()
    replicas = ranks // tensor // stages
    strategy = Hybrid3DStrategy(
        tensor_parallel_size=tensor,
        tensor_parallel_plan=PLANS.get(model, "auto"),
        pipeline_parallel_size=stages,
        **arguments,
    )
    loader = shares(data(BATCH * (WINDOW * STEPS - 1)), rank // tensor % replicas, replicas, batch=BATCH)
    options = {"gradient_clip_val": 0.5, "accumulate_grad_batches": accumulate, "precision": "64-true"}
    trainer(strategy, ranks, callbacks=[recorder], **options).fit(module, loader)
    return recorder.record


def large_batches(model: str, accumulate: int) -> Record:
    """Plain Lightning in one process, with one batch a step."""

    def train(_: int) -> Record:
        torch.manual_seed(0)
        module = MODELS[model](sums=False)
        recorder = Recorder()
        loader = DataLoader(TensorDataset(*data(BATCH * (WINDOW * STEPS - 1))), batch_size=BATCH * accumulate)
        options = {"gradient_clip_val": 0.5, "precision": "64-true"}
        trainer("auto", 1, callbacks=[recorder], **options).fit(module, loader)
        return recorder.record

    return run_ranks(1, train)[0]


_expected: dict[tuple[str, int], Record] = {}

ROWS: list[tuple[str, int, tuple[int, int, int, dict[str, Any]], bool]] = [
    # model, accumulate, layout, whether it is run by default
    ("gpt", 3, (1, 1, 1, {}), True),
    ("gpt", 1, (2, 1, 1, {"zero_stage": 1}), True),
    ("gpt", 3, (2, 1, 1, {"zero_stage": 0}), False),
    ("gpt", 3, (2, 1, 1, {"zero_stage": 2, "reduce": "micro_batch"}), True),
    ("gpt", 3, (2, 1, 1, {"zero_stage": 3}), True),
    ("gpt", 3, (2, 2, 1, {}), False),
    ("gpt", 1, (2, 1, 2, {"num_microbatches": 4}), True),
    ("gpt", 3, (4, 1, 2, {"num_microbatches": 2, "zero_stage": 3}), True),
    ("gpt", 3, (4, 2, 2, {}), False),
    ("gpt", 3, (8, 2, 2, {"num_microbatches": 2}), False),
    ("bert4", 3, (2, 1, 1, {}), True),
    ("bert4", 1, (4, 2, 1, {}), False),
    ("bert4", 3, (4, 1, 2, {"num_microbatches": 2}), False),
    ("llama8", 3, (4, 1, 2, {"num_microbatches": 2}), True),
    ("llama8", 1, (4, 2, 2, {}), False),
]


def label(row: Any) -> str:
    model, accumulate, (ranks, tensor, stages, arguments), _ = row
    dp = ranks // tensor // stages
    return f"{model}-acc{accumulate}-dp{dp}tp{tensor}pp{stages}-zero{arguments.get('zero_stage', 1)}"


@pytest.mark.parametrize(
    "row", [pytest.param(row, id=label(row), marks=() if row[3] else pytest.mark.slow) for row in ROWS]
)
def test_ragged_pieces_give_the_gradients_of_one_large_batch(row: Any) -> None:
    model, accumulate, layout, _ = row
    if (model, accumulate) not in _expected:
        _expected[model, accumulate] = large_batches(model, accumulate)
    expected = _expected[model, accumulate]
    records = run_ranks(layout[0], lambda rank: fit(model, layout, rank, accumulate))
    complete(records, layout[2])
    limit = 1e-5 if model == "llama8" else 1e-10  # Hugging Face computes this loss in float32
    for record in records:
        assert record.norms == pytest.approx(expected.norms, rel=limit)
        assert len(record.gradients) == len(expected.gradients) == (STEPS if accumulate == WINDOW else 8)
        for got, right in zip(record.gradients, expected.gradients, strict=True):
            largest = max(float(g.abs().max()) for g in right.values())
            assert not far("gradient", got, right, limit, {}, 1e-3 * largest)
        for got, right in zip(record.parameters, expected.parameters, strict=True):
            assert not far("parameter", got, right, 100 * limit, {}, 1e-3)
        assert len(record.losses) == 8


def test_a_plain_mean_stays_a_mean_of_means() -> None:
    def train(rank: int, sums: bool) -> list[float]:
        torch.manual_seed(0)
        module, losses = Texts(sums), []
        tokens, labels = data(32)
        labels[8:12] = tokens[8:12].roll(-1, 1)
        module.on_train_batch_end = lambda outputs, *_: losses.append(float(outputs["loss"]))
        trainer(Hybrid3DStrategy(), 2, precision="64-true").fit(module, shares((tokens, labels), rank, 2, batch=BATCH))
        return losses

    means = run_ranks(2, lambda rank: train(rank, False))
    sums = run_ranks(2, lambda rank: train(rank, True))
    for ours, theirs in zip(means, sums, strict=True):
        assert ours[0] == pytest.approx(theirs[0], rel=1e-12)  # the same loss is shown,
        assert ours[-1] != pytest.approx(theirs[-1], rel=1e-6)  # and another gradient follows


class Wrong(Texts):
    """Returns what ``wrong(rank, step, loss)`` says."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(True)
        self.wrong = wrong

    def training_step(self, batch: Any, index: int) -> Any:
        return self.wrong(self.global_rank, index, self.sum_of_losses(*batch))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda rank, step, loss: {"num_tokens": 3}, "without a 'loss'"),
        (
            lambda rank, step, loss: {"loss": loss, "num_tokens": "many"},
            "num_tokens='many'; it has to be a whole number",
        ),
        (lambda rank, step, loss: {"loss": loss, "num_tokens": 0}, "must be positive"),
        (lambda rank, step, loss: {"loss": loss, "num_tokens": loss * float("inf")}, "must be positive and finite"),
        (lambda rank, step, loss: {"loss": loss, "num_tokens": 9 - 12 * rank}, "1 of them a negative number"),
        (lambda rank, step, loss: {"loss": loss, "num_tokens": 3} if rank else loss, "on rank 1 only"),
        (
            lambda rank, step, loss: {"loss": loss, "num_tokens": 3} if step < 2 else loss,
            "in the first step, but not now",
        ),
    ],
    ids=["no sum", "no number", "zero", "infinite", "negative", "one rank", "at times"],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_counts_that_cannot_be(wrong: Any, words: str, stages: int) -> None:
    if stages == 2 and "rank 1 only" in words:
        pytest.skip("all stages get the output of the last")

    def train(rank: int) -> None:
        strategy = Hybrid3DStrategy(pipeline_parallel_size=stages, timeout=20)
        trainer(strategy, 2).fit(Wrong(wrong), shares(data(32), 0, 1, batch=BATCH))

    if stages == 2 and "negative" in words:
        wrong, words = (lambda rank, step, loss: {"loss": loss, "num_tokens": -3}), "negative number"
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, train)
    assert failure.value.codes == [1, 1] and failure.value.seconds < 15
    assert all(words in report for report in failure.value.reports)


def test_a_dictionary_of_manual_optimization_may_have_a_count() -> None:
    class Manual(Texts):
        def __init__(self) -> None:
            super().__init__(True)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> Any:
            output = super().training_step(batch, index)
            self.optimizers().zero_grad()  # type: ignore[union-attr]
            self.manual_backward(output["loss"] / 100)
            self.optimizers().step()  # type: ignore[union-attr]
            return output

    def train(rank: int) -> bool:
        trainer(Hybrid3DStrategy(), 2).fit(Manual(), shares(data(32), rank, 2, batch=BATCH))
        return True

    assert all(run_ranks(2, train))


def test_sixteen_bits_count_too() -> None:
    def train(rank: int, layout: tuple[int, int]) -> list[float]:
        ranks, stages = layout
        torch.manual_seed(0)
        module, losses = Texts(True), []
        module.on_train_batch_end = lambda outputs, *_: losses.append(
            float(module.trainer.strategy.reduce(outputs["loss"], reduce_op="mean"))
        )
        run = trainer(Hybrid3DStrategy(pipeline_parallel_size=stages), ranks, precision="16-mixed", max_epochs=3)
        run.fit(module, shares(data(64), 0, 1, batch=BATCH))
        assert run.global_step >= 18
        return losses

    (one,) = run_ranks(1, lambda rank: train(rank, (1, 1)))
    for losses in run_ranks(2, lambda rank: train(rank, (2, 2))):
        assert losses[-1] == pytest.approx(one[-1], abs=0.2) and losses[-1] < losses[0]
