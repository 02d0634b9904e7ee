"""Models that no rank ever holds whole: born without numbers, filled in pieces, saved and resumed in pieces."""

from __future__ import annotations

import copy
import ctypes
import itertools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from examples.gpt import GPT
from lightning_partrain.checkpoint import stored
from lightning_partrain.parallel.hollow import is_hollow
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer
from tests.models import CASES, Base
from tests.parity import Recorder, shares
from tests.tensor_models import SMALL

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2-zero1": (2, {"zero_stage": 1}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "tp2-zero0": (2, {"zero_stage": 0, "tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "dp2-tp2-zero3": (4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "dp2-tp2-pp2": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
    "one": (1, {}),
}


class Born(Base):
    """A language model that is built in configure_model."""

    def __init__(self, kind: str, how: str) -> None:
        super().__init__()
        self.kind, self.how, self.model = kind, how, None

    def build_model(self) -> nn.Module:
        if self.kind == "llama":
            return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))
        return GPT(layers=4, width=32, heads=4, context=12)

    def configure_model(self) -> None:
        if self.model is not None:
            return
        if self.how == "plain":
            self.model = self.build_model()
        elif self.how == "meta":
            with torch.device("meta"):
                self.model = self.build_model()
        else:
            with self.trainer.init_module(empty_init=True):
                self.model = self.build_model()

    def loss(self, batch: Any) -> torch.Tensor:
        tokens = batch[0]
        if self.kind == "llama":
            return self.model(tokens[:, :10], labels=tokens[:, :10]).loss
        return nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(
    layout: str | None,
    kind: str = "gpt",
    how: str = "born",
    epochs: int = 1,
    resume: Any = None,
    save: Path | None = None,
    **arguments: Any,
) -> list[Any]:
    """Each rank's losses, and the weights in the file that was saved."""
    ranks, sizes = LAYOUTS[layout] if layout is not None else (1, {})

    def fit(rank: int) -> Any:
        strategy = Hybrid3DStrategy(timeout=60, **{**sizes, **arguments}) if layout is not None else "auto"
        recorder = Recorder()
        run = trainer(strategy, ranks, precision="64-true", max_epochs=epochs, callbacks=[recorder])
        torch.manual_seed(3 + rank)  # ranks need not agree: the first rank's numbers count
        module = Born(kind, how)
        tensor, stages = (sizes.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
        replicas = ranks // tensor // stages
        data = tuple(d.clamp(max=90) for d in CASES["gpt"].data(torch.float64))
        loader = shares(data, rank // tensor % replicas, replicas)
        run.fit(module, loader, ckpt_path=resume)
        again = run.validate(module, loader, verbose=False)[0] if layout is not None else {}
        if save is not None:
            run.save_checkpoint(save)
        return recorder.record.losses, {n: is_hollow(p) for n, p in module.named_parameters()}, again

    return run_ranks(ranks, fit, timeout=150)


#: By default, the one that keeps nothing whole.
BORN = [("dp2-zero3", "llama")]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *BORN,
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in itertools.product(LAYOUTS, ("gpt", "llama"))
            if pair not in BORN
        ),
    ],
)
def test_born_in_pieces_as_in_one_process(tmp_path: Path, kind: str, layout: str) -> None:
    exact = 1e-9 if kind == "gpt" else 1e-6  # transformers computes in float32 inside
    ((expected, _, _),) = train(None, kind, "plain", save=tmp_path / "whole.ckpt")
    theirs = torch.load(tmp_path / "whole.ckpt", weights_only=True)["state_dict"]
    for form in ("full", "sharded") if LAYOUTS[layout][0] < 8 else ("sharded",):
        path = tmp_path / form
        results = train(layout, kind, save=path, checkpoint_format=form)
        for losses, without, validated in results:
            assert losses == pytest.approx(expected, rel=exact)
            assert validated == results[0][2] != {}
            assert any(without.values()) == (layout not in ("dp2-zero1", "one"))
        ours = torch.load(path, weights_only=True)["state_dict"] if form == "full" else None
        for name, value in theirs.items():
            got = ours[name] if ours else stored.Reader(path).whole(f"model.{name}")
            torch.testing.assert_close(got, value, rtol=10 * exact, atol=exact / 10 if kind == "gpt" else 1e-4)


def pretrained(folder: Path) -> dict[str, torch.Tensor]:
    """A model as others publish it, in several files, untied."""
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return {name: value.double() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("how", ["plain", "born", "meta"])
@pytest.mark.parametrize("layout", ["tp2-zero0", "dp2-zero3"])
def test_pretrained_weights_are_read_in_pieces(tmp_path: Path, layout: str, how: str) -> None:
    theirs = pretrained(tmp_path / "published")
    ranks, sizes = LAYOUTS[layout]

    def fit(rank: int) -> Any:
        strategy = Hybrid3DStrategy(timeout=60, load_pretrained=str(tmp_path / "published"), **sizes)
        run = trainer(strategy, ranks, precision="64-true", max_steps=1)
        module = Born("llama", how)
        data = shares(tuple(d.clamp(max=90) for d in CASES["gpt"].data(torch.float64)), 0, 1)
        before = run.validate(module, data, verbose=False)  # has them
        run.save_checkpoint(tmp_path / "as loaded")
        run.fit(module, data)
        after = run.validate(module, data, verbose=False)  # trained, and not loaded again
        return before[0]["val_loss"], after[0]["val_loss"]

    assert len(set(run_ranks(ranks, fit))) == 1
    got = torch.load(tmp_path / "as loaded", weights_only=True)["state_dict"]
    assert {f"model.{name}" for name in theirs} == set(got)
    for name, value in theirs.items():
        assert torch.equal(got[f"model.{name}"], value)
    before, after = run_ranks(ranks, fit)[0]
    assert after < before


def test_a_checkpoint_goes_before_pretrained_weights(tmp_path: Path) -> None:
    pretrained(tmp_path / "published")
    ((losses, _, _),) = train(None, "llama", "plain", epochs=2)
    train("tp2-zero0", "llama", "born", save=tmp_path / "one")
    resumed = train(
        "tp2-zero0", "llama", "born", epochs=2, resume=tmp_path / "one", load_pretrained=str(tmp_path / "published")
    )
    assert resumed[0][0] == pytest.approx(losses[len(losses) // 2 :], rel=1e-6)


def test_weights_that_do_not_suit_are_refused_everywhere(tmp_path: Path) -> None:
    pretrained(tmp_path / "published")
    with pytest.raises(RankFailure, match=r"load_pretrained=\{") as failure:
        train("tp2-zero0", "gpt", "born", load_pretrained=str(tmp_path / "published"))
    assert all("ValueError" in report for report in failure.value.reports)
    with pytest.raises(RankFailure, match=r"load_pretrained=.*nothing.* There is no file or folder"):
        train("tp2-zero0", "gpt", "born", load_pretrained=str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match="must be a path, or a mapping"):
        Hybrid3DStrategy(load_pretrained=3)  # type: ignore[arg-type]


def test_modules_on_the_meta_device_initialise_themselves(tmp_path: Path) -> None:
    """In the order of the modules: the same on one rank and on several, whatever the seeds of the others."""
    ((one, _, _),) = [train("one", "llama", "meta")[0]]
    for layout in ("tp2-zero0", "dp2-zero3"):
        for losses, _, _ in train(layout, "llama", "meta"):
            assert losses == pytest.approx(one, rel=1e-6)


def test_numbers_that_are_elsewhere_are_not_made_up(tmp_path: Path) -> None:
    """A module that was born in pieces, and another strategy: only a checkpoint has the numbers."""

    def fit(rank: int) -> Any:
        data = shares(tuple(d.clamp(max=90) for d in CASES["gpt"].data(torch.float64)), 0, 1)
        module = Born("gpt", "born")
        first = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2, precision="64-true", max_steps=1)
        first.fit(module, data)
        path = tmp_path / "kept.ckpt"
        first.save_checkpoint(path)
        expected = first.validate(module, data, verbose=False)[0]["val_loss"]
        second = trainer(Hybrid3DStrategy(tensor_parallel_size=2), 2, precision="64-true")
        assert second.validate(module, data, verbose=False)[0]["val_loss"] == expected  # the same layout
        third = trainer(Hybrid3DStrategy(pipeline_parallel_size=2), 2, precision="64-true")
        got = third.validate(module, data, ckpt_path=path, verbose=False)[0]["val_loss"]
        assert got == pytest.approx(expected)
        fourth = trainer(Hybrid3DStrategy(zero_stage=0), 2, precision="64-true")
        with pytest.raises(ValueError, match="Save a checkpoint after that run"):
            fourth.validate(module, data, verbose=False)
        return True

    assert run_ranks(2, fit) == [True, True]


class Odd(Base):
    """Parameters of one element, tensors that are plain attributes, and a diagonal."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        self.empty = empty

    def configure_model(self) -> None:
        if hasattr(self, "layers"):
            return
        with self.trainer.init_module(empty_init=True) if self.empty else nullcontext():
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(40, 40), nn.PReLU()) for _ in range(3))
            self.head = nn.Linear(40, 1)
            self.scale = nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
            self.table = torch.linspace(0.5, 1.5, 1600, dtype=torch.float64).view(40, 40)
            self.tables = [self.table + 1]
            self.register_buffer("not_yet", torch.full((1,), float("nan")))  # legal
            self.register_buffer("mask", torch.ones(40, 40, dtype=torch.float64).fill_diagonal_(0.0))

    def loss(self, batch: Any) -> torch.Tensor:
        x = batch[0][:, :10].double().repeat(1, 4)
        x = x @ (self.table * self.mask) / 400 + x @ self.tables[0] / 400
        for layer in self.layers:
            x = layer(x)
        return (self.head(x) * self.scale).pow(2).mean()


@pytest.mark.parametrize("layout", ["dp2-zero3", "pp2"])
def test_odd_tensors_are_born_too(tmp_path: Path, layout: str) -> None:
    ranks, sizes = LAYOUTS[layout]

    def fit(rank: int, empty: bool) -> Any:
        torch.manual_seed(1)
        replicas = 1 if empty and layout == "pp2" else 2 if empty else 1
        data = shares(CASES["gpt"].data(torch.float64), rank % replicas, replicas)
        strategy = Hybrid3DStrategy(timeout=60, **sizes) if empty else "auto"
        run = trainer(strategy, ranks if empty else 1, precision="64-true")
        module = Odd(empty)
        run.fit(module, data)
        return [run.validate(module, data, verbose=False)[0]["val_loss"] for _ in range(2)]

    ((expected, _),) = run_ranks(1, lambda rank: fit(rank, False))
    for found in run_ranks(ranks, lambda rank: fit(rank, True)):
        assert found == pytest.approx([expected, expected], rel=1e-9)


def written_after(module: Born) -> None:
    nn.init.zeros_(module.model.head.weight)


def copied_after(module: Born) -> None:
    module.model.head.weight = nn.Parameter(module.model.head.weight.detach() * 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [(written_after, "was written to while it had no numbers"), (copied_after, "has no numbers \\(NaN everywhere\\)")],
)
def test_what_happens_outside_of_the_block_is_refused(change: Any, says: str) -> None:
    class Changed(Born):
        def configure_model(self) -> None:
            super().configure_model()
            change(self)

    def fit(rank: int) -> None:
        run = trainer(Hybrid3DStrategy(timeout=60, zero_stage=3), 2, precision="64-true")
        run.fit(Changed("gpt", "born"), shares(CASES["gpt"].data(torch.float64), rank, 2))

    with pytest.raises(RankFailure, match=says) as failure:
        run_ranks(2, fit)
    assert all("model.head.weight" in report for report in failure.value.reports)


def test_copies_of_a_model_in_pieces_and_averages_are_refused() -> None:
    def fit(rank: int) -> bool:
        data = shares(CASES["gpt"].data(torch.float64), 0, 1)
        run = trainer(Hybrid3DStrategy(timeout=60, zero_stage=3), 2, precision="64-true", max_steps=1)
        module = Born("gpt", "born")
        run.fit(module, data)
        twin = copy.deepcopy(module)
        with pytest.raises(ValueError, match="parameters have no numbers"):
            run.validate(twin, data, verbose=False)
        return True

    assert run_ranks(2, fit) == [True, True]

    def average(rank: int) -> None:
        averaging = EMAWeightAveraging()
        run = trainer(Hybrid3DStrategy(timeout=60, zero_stage=0), 2, precision="64-true", callbacks=[averaging])
        run.fit(Born("gpt", "born"), shares(CASES["gpt"].data(torch.float64), rank, 2))

    with pytest.raises(RankFailure, match="EMAWeightAveraging keeps a copy of the whole model"):
        run_ranks(2, average)


def test_other_weights_and_new_layers_between_runs(tmp_path: Path) -> None:
    pretrained(tmp_path / "published")

    def fit(rank: int) -> Any:
        data = shares(tuple(d.clamp(max=90) for d in CASES["gpt"].data(torch.float64)), 0, 1)
        module, found = Born("llama", "born"), []
        for path in (None, str(tmp_path / "published")):  # the second run has them for the first time
            run = trainer(
                Hybrid3DStrategy(timeout=60, zero_stage=1, tensor_parallel_size=2, load_pretrained=path),
                2,
                precision="64-true",
            )
            found.append(run.validate(module, data, verbose=False)[0]["val_loss"])
        torch.manual_seed(rank)
        module.new = nn.Linear(8, 8)
        run.validate(module, data, verbose=False)
        return found, module.new.weight.detach().clone()

    (first, weight), (second, other) = run_ranks(2, fit)
    assert first == second and first[0] != first[1]
    assert torch.equal(weight, other)


def megabytes(what: str) -> float:
    """``VmRSS`` or, the most since it was forgotten, ``VmHWM``."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) / 1024


def forget_the_most() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class Wide(pl.LightningModule):
    """16 layers of two matrices each, 256 MB of numbers when ``width`` is 1024."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def configure_model(self) -> None:
        with self.trainer.init_module(empty_init=True):
            self.layers = nn.Sequential(*(self.block() for _ in range(8)))

    def block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, 4 * self.width), nn.ReLU(), nn.Linear(4 * self.width, self.width))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Weighs(pl.Callback):
    """The most that a phase has needed, beyond what there was before the run or, while saving, before that."""

    def __init__(self) -> None:
        self.most: dict[str, float] = {}
        forget_the_most()
        self.before = megabytes("VmRSS")

    def note(self, name: str) -> None:
        self.most[name] = megabytes("VmHWM") - self.before
        forget_the_most()

    def on_fit_start(self, *_: Any) -> None:
        self.note("set up")

    def on_train_end(self, *_: Any) -> None:
        self.note("trained")
        self.before = megabytes("VmRSS")


def weighed(folder: Path, width: int, stages: int, zero_stage: int, resume: bool) -> list[dict[str, float]]:
    """On two data-parallel ranks of two tensor-parallel ones each, and so many stages."""

    def fit(rank: int) -> dict[str, float]:
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is given back
        torch.use_deterministic_algorithms(
            True, warn_only=True
        )  # memory that torch.empty gives is written to, and so there
        torch.manual_seed(0)
        weighs = Weighs()
        strategy = Hybrid3DStrategy(
            tensor_parallel_size=2,
            pipeline_parallel_size=stages,
            zero_stage=zero_stage,
            checkpoint_format="sharded",
            timeout=120,
        )
        run = trainer(strategy, 4 * stages, callbacks=[weighs], max_steps=4 if resume else 2, max_epochs=-1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, width)), batch_size=4)
        run.fit(Wide(width), loader, ckpt_path=folder if resume else None)
        run.save_checkpoint(folder)
        weighs.note("saved")
        assert run.global_step == (4 if resume else 2)
        return weighs.most

    return run_ranks(4 * stages, fit, timeout=200)


@pytest.mark.parametrize(
    ("stages", "zero_stage", "times"),
    [(1, 3, 1), pytest.param(2, 1, 2, marks=pytest.mark.slow), pytest.param(2, 3, 2, marks=pytest.mark.slow)],
)
def test_no_rank_ever_holds_more_than_its_share(tmp_path: Path, stages: int, zero_stage: int, times: int) -> None:
    """Beyond what processes need for themselves, as those of a small model do."""
    model, largest = 256.0, 16.0
    share = model / stages / (4 if zero_stage == 3 else 2)
    for resume in (False, True)[:times]:
        small = weighed(tmp_path / "small", 16, stages, zero_stage, resume)
        for found in weighed(tmp_path / "large", 1024, stages, zero_stage, resume):
            own = {name: max(each[name] for each in small) for name in found}
            assert found["set up"] - own["set up"] < 1.1 * share + largest
            assert found["saved"] - own["saved"] < 0.1 * share + 2 * largest  # a tensor, and what is written of it
            # a whole replica has parameters, gradients and momentum; here, blocks are whole while they are compared with their cut ones
            assert found["trained"] - own["trained"] < 0.45 * 3 * model
