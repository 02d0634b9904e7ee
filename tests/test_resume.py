"""What a resumed run goes on from: random states, positions in loaders, the newest good checkpoint, a strategy's own state."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_partrain.checkpoint import sharded, stored
from lightning_partrain.checkpoint.extra import Extra, PerRank
from lightning_partrain.checkpoint.folder import LATEST
from lightning_partrain.checkpoint.newest import problem_of
from lightning_partrain.parallel.placement import whole_of
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import RankFailure, run_ranks, trainer

FORMATS = ("full", "sharded")


class Drops(pl.LightningModule):
    """Draws in every step; remembers what it was given."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 6)) for _ in range(4)]
        self.layers = nn.Sequential(*layers, nn.Linear(6, 1))
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y, _number = batch
        loss = F.mse_loss(self.layers(x).squeeze(-1), y)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, _: int) -> None:
        self.seen.append((batch[2].tolist(), float(outputs["loss"])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def samples(number: int = 32) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(number, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x.sum(1), torch.arange(number))


class StatefulLoader(DataLoader):
    """Goes on after so many batches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.given = self.skip = 0

    def __iter__(self) -> Any:
        skip, self.skip = self.skip, 0
        self.given = 0
        for batch in super().__iter__():
            self.given += 1
            if self.given > skip:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "first": int(self.dataset.tensors[2][0])}  # type: ignore[attr-defined]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["first"] == int(self.dataset.tensors[2][0]), "another rank's"  # type: ignore[attr-defined]
        self.skip = state["given"]


def go(
    ranks: int,
    layout: dict[str, Any],
    seed: int = 0,
    resume: Any = None,
    loader: Any = None,
    callbacks: Any = (),
    strategy: type[Hybrid3DStrategy] = Hybrid3DStrategy,
    save: Path | None = None,
    **options: Any,
) -> list[Any]:
    """Each rank's batches and losses."""

    def fit(rank: int) -> Any:
        torch.manual_seed(0)
        module = Drops().double()
        torch.manual_seed(seed)
        run = trainer(
            strategy(timeout=60, **layout),
            ranks,
            precision="64-true",
            callbacks=list(callbacks),
            enable_checkpointing=bool(callbacks),
            **options,
        )
        peers = layout.get("tensor_parallel_size", 1) * layout.get("pipeline_parallel_size", 1)
        data = samples()
        replica = rank // layout.get("tensor_parallel_size", 1) % (ranks // peers)
        if loader is not None:
            tensors = [t[replica :: ranks // peers] for t in data.tensors]
            run.fit(module, loader(TensorDataset(*tensors), 4), ckpt_path=resume)
        else:
            run.fit(module, DataLoader(data, batch_size=4, shuffle=True), ckpt_path=resume)
        if save is not None:
            run.save_checkpoint(save)
        return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}

    return run_ranks(ranks, fit)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, {"checkpoint_format": "full"}),
        (2, {"pipeline_parallel_size": 2, "checkpoint_format": "sharded"}),
        pytest.param(2, {"tensor_parallel_size": 2, "checkpoint_format": "full"}, marks=pytest.mark.slow),
        pytest.param(2, {"zero_stage": 3, "checkpoint_format": "sharded"}, marks=pytest.mark.slow),
        pytest.param(1, {"checkpoint_format": "sharded"}, marks=pytest.mark.slow),
    ],
)
def test_random_numbers_go_on(tmp_path: Path, ranks: int, layout: dict[str, Any]) -> None:
    """Order of samples and dropout of the second epoch, although the resumed run has another seed."""
    straight = go(ranks, layout, max_epochs=2)
    go(ranks, layout, max_epochs=1, save=tmp_path / "one.ckpt")
    for expected, got in zip(straight, go(ranks, layout, 5, tmp_path / "one.ckpt", max_epochs=2), strict=True):
        assert got[0] == expected[0][len(expected[0]) // 2 :]


def saved_in_the_middle(folder: Path, ranks: int, layout: dict[str, Any], loader: Any) -> None:
    """After two steps of an epoch, in ``middle.ckpt``."""
    saving = ModelCheckpoint(
        folder, filename="middle", every_n_train_steps=2, save_top_k=1, enable_version_counter=False
    )
    go(ranks, layout, loader=loader, max_steps=2, callbacks=[saving])


@pytest.mark.parametrize("kind", FORMATS)
def test_loaders_go_on_where_each_rank_was(tmp_path: Path, kind: str) -> None:
    layout = {"checkpoint_format": kind}

    def loader(data: TensorDataset, batch: int) -> StatefulLoader:
        return StatefulLoader(data, batch_size=batch)

    straight = go(2, layout, loader=loader, max_steps=4)
    saved_in_the_middle(tmp_path, 2, layout, loader)
    resumed = go(2, layout, loader=loader, max_steps=4, resume=tmp_path / "middle.ckpt")
    for expected, got in zip(straight, resumed, strict=True):
        assert [batch for batch, _ in got[0]] == [batch for batch, _ in expected[0][2:]]
    with pytest.raises(RankFailure, match="positions that 2 data-parallel ranks had") as failure:
        go(4, layout, loader=loader, max_steps=4, resume=tmp_path / "middle.ckpt")
    assert all("Resume with data_parallel_size=2" in report for report in failure.value.reports)


def test_torchdata_s_loader_goes_on(tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def loader(data: TensorDataset, batch: int) -> Any:
        return stateful(data, batch_size=batch, shuffle=True)

    for layout in ({"pipeline_parallel_size": 2}, {}):
        straight = go(2, layout, loader=loader, max_steps=5)
        saved_in_the_middle(tmp_path, 2, layout, loader)
        resumed = go(2, layout, loader=loader, max_steps=5, resume=tmp_path / "middle.ckpt")
        for expected, got in zip(straight, resumed, strict=True):
            assert [batch for batch, _ in got[0]][:1] == [batch for batch, _ in expected[0][2:]][:1]


class Keeps(Hybrid3DStrategy):
    """A strategy with state of every kind; the one documented hook."""

    def extra_state(self) -> dict[str, Any]:
        rank = self.global_rank
        feedback = {"error": torch.full((3,), float(rank)), "step": [1, 2]}
        assert self.model_parallel is not None
        return {
            **super().extra_state(),
            "momentum": self.model_parallel.held_state()["layers.0.0.weight"],
            "whole": torch.arange(4),
            "feedback": PerRank(feedback, rank, self.layout()),
            "rounds": 7,
        }

    def load_extra_state(self, saved: Extra) -> None:
        super().load_extra_state(saved)
        loaded = {
            "momentum": whole_of(saved["momentum"]),
            "whole": whole_of(saved["whole"]),
            "rounds": saved["rounds"],
            "feedback": saved.of_rank("feedback", self.global_rank, self.layout()),
        }

        self.lightning_module.seen.append(loaded)  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_strategy_s_own_state(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "own.ckpt"
    layout = {"checkpoint_format": kind, "zero_stage": 3, "tensor_parallel_size": 1}
    saving = ModelCheckpoint(tmp_path, filename="own", every_n_train_steps=2)
    saved = go(2, layout, strategy=Keeps, max_steps=2, callbacks=[saving])
    same = go(2, layout, strategy=Keeps, max_steps=2, resume=path)
    other = go(2, {**layout, "zero_stage": 0, "pipeline_parallel_size": 2}, strategy=Keeps, max_steps=2, resume=path)
    go(2, {"checkpoint_format": kind}, max_steps=2, resume=path)  # by a strategy that knows nothing of it
    for rank in range(2):
        for run, feedback in ((same, True), (other, False)):
            own = run[rank][0][-1]
            assert torch.equal(own["momentum"], saved[rank][1]["layers.0.0.weight"]) and own["rounds"] == 7
            assert torch.equal(own["whole"], torch.arange(4))
            if feedback:
                assert own["feedback"]["error"].tolist() == [float(rank)] * 3 and own["feedback"]["step"] == [1, 2]
            else:
                assert own["feedback"] is None


def damage(path: Path) -> None:
    file = path if path.is_file() else next(path.glob("__0_*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_newest_good_one_is_found(tmp_path: Path, kind: str) -> None:
    def saving() -> list[Any]:
        return [ModelCheckpoint(tmp_path / "ck", every_n_train_steps=2, save_top_k=-1, filename="{step}")]

    layout = {"checkpoint_format": kind}
    first = go(2, layout, resume="last_good", callbacks=saving(), max_steps=6)  # there is none yet
    assert len(first[0][0]) == 6
    names = sorted(each.name for each in (tmp_path / "ck").iterdir())
    assert (
        names == ([LATEST] if kind == "sharded" else []) + [f"step={step}.ckpt" for step in (2, 4, 6)]
        or names == [*(f"step={step}.ckpt" for step in (2, 4, 6))]
        or set(names) == {LATEST, *(f"step={step}.ckpt" for step in (2, 4, 6))}
    )
    if kind == "sharded":
        assert (tmp_path / "ck" / LATEST).read_text().strip() == "step=6.ckpt"
    damage(tmp_path / "ck" / "step=6.ckpt")
    with pytest.raises(RankFailure, match=r"(has changed since it was written|Bad CRC-32).*step=4.ckpt") as failure:
        go(2, layout, resume=tmp_path / "ck" / "step=6.ckpt", max_steps=6)
    assert all("step=4.ckpt" in report for report in failure.value.reports)
    resumed = go(2, layout, resume="last_good", callbacks=saving(), max_steps=6)
    assert all(len(rank[0]) == 2 for rank in resumed)


@pytest.mark.parametrize(("kind", "asynchronous"), [("full", False), ("sharded", False), ("sharded", True)])
def test_a_full_disk_leaves_the_one_before_and_training_goes_on(
    tmp_path: Path, kind: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second save finds no room; the callback would remove the first one, whose place it takes."""
    from lightning_partrain.checkpoint import full
    from lightning_partrain.strategies import checkpoints

    class Fills(pl.Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step != 2:
                return

            def no_room(*_: Any) -> Any:
                raise OSError(errno.ENOSPC, "No space left on device")

            trainer.strategy.wait_for_checkpoint()  # type: ignore[attr-defined]
            if trainer.global_rank == (1 if kind == "sharded" else 0):
                sharded._write = no_room
                full.replace_when_complete = checkpoints.full.replace_when_complete = no_room

    layout = {"checkpoint_format": kind, "async_save": asynchronous}
    saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=1, filename="{step}")
    trained = go(2, layout, callbacks=[saving, Fills()], max_steps=4)
    assert all(len(rank[0]) == 4 for rank in trained)
    assert [each.name for each in tmp_path.iterdir() if each.name != LATEST and not _empty(each)] == ["step=2.ckpt"]
    resumed = go(2, layout, resume=tmp_path / "step=2.ckpt", max_steps=4)
    for expected, got in zip(trained, resumed, strict=True):
        assert len(got[0]) == 2 and {name: p.shape for name, p in got[1].items()} == {
            name: p.shape for name, p in expected[1].items()
        }


@pytest.mark.parametrize("kind", FORMATS)
def test_a_full_disk_leaves_the_other_format_and_links(tmp_path: Path, kind: str) -> None:
    """A checkpoint of the same name in the other format is still there, and no link leads to one that is not."""
    other = "full" if kind == "sharded" else "sharded"
    path = tmp_path / "one.ckpt"
    go(1, {"checkpoint_format": other}, max_steps=1, save=path)

    def fit(rank: int) -> None:
        from lightning_partrain.checkpoint import full
        from lightning_partrain.strategies import checkpoints

        saving = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_last="link", filename="{step}")

        class Fills(pl.Callback):
            def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
                def no_room(*_: Any) -> Any:
                    raise OSError(errno.ENOSPC, "No space left on device")

                if trainer.global_step == 1:
                    sharded._write = no_room
                    checkpoints.full.replace_when_complete = full.replace_when_complete = no_room

        run = trainer(
            Hybrid3DStrategy(checkpoint_format=kind),
            precision="64-true",
            max_steps=2,
            callbacks=[saving, Fills()],
            enable_checkpointing=True,
        )
        run.fit(Drops().double(), DataLoader(samples(), batch_size=4))
        run.save_checkpoint(path)

    run_ranks(1, fit)
    assert (tmp_path / "kept" / "last.ckpt").resolve().name == "step=1.ckpt"
    assert problem_of(str(tmp_path / "kept" / "last.ckpt")) is None and problem_of(str(path)) is None
    go(1, {"checkpoint_format": kind}, max_steps=2, resume=path, save=path)  # now there is room
    assert problem_of(str(path)) is None and path.is_dir() == (kind == "sharded")
    assert not [each for each in tmp_path.iterdir() if "before" in each.name or ".part" in each.name]


def test_other_files_and_links_are_left_alone(tmp_path: Path) -> None:
    """A folder with other things in it, something called `latest`, and what a link leads to."""
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "important.txt").write_text("keep")
    with pytest.raises(RankFailure, match="is a folder with other things in it"):
        go(1, {"checkpoint_format": "sharded"}, max_steps=1, save=folder)
    with pytest.raises(RankFailure, match=r"is a folder\. Give the checkpoint another name"):
        go(1, {}, max_steps=1, save=folder)
    assert (folder / "important.txt").read_text() == "keep"
    go(1, {}, max_steps=1, save=tmp_path / LATEST)
    go(1, {"checkpoint_format": "sharded"}, max_steps=1, save=tmp_path / "one.ckpt")
    assert problem_of(str(tmp_path / LATEST)) is None
    (tmp_path / "last.ckpt").symlink_to("one.ckpt")
    before = stored.Reader(tmp_path / "one.ckpt").manifest
    go(1, {"checkpoint_format": "sharded"}, max_steps=2, save=tmp_path / "last.ckpt")
    assert stored.Reader(tmp_path / "one.ckpt").manifest == before
    assert stored.Reader(tmp_path / "last.ckpt").manifest["step"] == 2


def test_what_last_good_does_not_take(tmp_path: Path) -> None:
    """Weights alone, and what lies in the folder of another experiment."""
    saving = [ModelCheckpoint(tmp_path / "a" / "checkpoints", every_n_train_steps=1, filename="{step}")]
    go(1, {}, callbacks=saving, max_steps=2)

    def weights(rank: int) -> None:
        run = trainer(Hybrid3DStrategy(), precision="64-true", max_steps=3)
        run.fit(Drops().double(), DataLoader(samples(), batch_size=4))
        run.save_checkpoint(tmp_path / "a" / "checkpoints" / "newer.ckpt", weights_only=True)

    run_ranks(1, weights)
    elsewhere = [ModelCheckpoint(tmp_path / "b" / "checkpoints", every_n_train_steps=1, filename="{step}")]
    go(1, {}, callbacks=elsewhere, max_steps=5)
    ((seen, _),) = go(1, {}, callbacks=saving, max_steps=6, resume="last_good")
    assert len(seen) == 4

    def evaluate(rank: int) -> None:
        run = trainer(Hybrid3DStrategy(), precision="64-true")
        run.validate(Validates().double(), DataLoader(samples(), batch_size=4), ckpt_path="last_good")

    with pytest.raises(RankFailure, match="ckpt_path='last_good' found no checkpoint"):
        run_ranks(1, evaluate)


class Validates(Drops):
    def validation_step(self, batch: Any, _: int) -> None:
        self.log("val_loss", F.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1]))


class Counts(torch.optim.SGD):
    """Keeps a plain number for each parameter."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["count"] = self.state[param].get("count", 0) + 1
        return result


class Unusual(Drops):
    """A parameter without elements, an optimizer with plain numbers, no optimizer at all."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layers[0][0].nothing = nn.Parameter(torch.empty(0, 3))

    def configure_optimizers(self) -> Any:
        if self.optimizer == "none":
            return None
        return Counts(self.parameters(), lr=0.01) if self.optimizer == "counts" else super().configure_optimizers()

    def on_train_end(self) -> None:
        states = [state for optimizer in self.trainer.optimizers for state in optimizer.state.values()]
        self.seen.append(sorted({state["count"] for state in states if "count" in state}))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [("counts", {"pipeline_parallel_size": 2}), ("adamw", {"zero_stage": 1}), ("none", {})],
)
def test_unusual_optimizer_state(tmp_path: Path, kind: str, optimizer: str, layout: dict[str, Any]) -> None:
    def fit(rank: int) -> Any:
        seen = []
        for steps, resume in ((2, None), (4, tmp_path / "one.ckpt")):
            torch.manual_seed(0)
            module = Unusual(optimizer).double()
            run = trainer(
                Hybrid3DStrategy(timeout=60, checkpoint_format=kind, **layout),
                2,
                precision="64-true",
                max_steps=steps if optimizer != "none" else -1,
                max_epochs=-1 if optimizer != "none" else 1,
            )
            run.fit(module, DataLoader(samples(), batch_size=4), ckpt_path=resume if optimizer != "none" else None)
            run.save_checkpoint(tmp_path / "one.ckpt")
            seen.append(module.seen[-1])
        return seen

    for first, second in run_ranks(2, fit):
        if optimizer == "counts":
            assert (first, max(second)) == ([2], 4)  # parameters of the other stage begin anew here


def test_averages_of_a_callback_come_back(tmp_path: Path) -> None:
    """It moves the state to other places in the checkpoint, and loads it by itself."""

    def fit(rank: int, strategy: Any, steps: int, resume: Path | None, save: Path | None) -> Any:
        torch.manual_seed(0)
        module = Drops().double()
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        saving = ModelCheckpoint(tmp_path, every_n_train_steps=2, filename=save.stem) if save is not None else None
        run = trainer(
            strategy() if callable(strategy) else strategy,
            precision="64-true",
            max_steps=steps,
            callbacks=[EMAWeightAveraging(decay=0.5), *([saving] if saving else [])],
            enable_checkpointing=saving is not None,
        )
        run.fit(module, DataLoader(samples(), batch_size=4), ckpt_path=resume)
        return [p.detach().clone() for p in module.parameters()]

    (expected,) = run_ranks(1, lambda rank: fit(rank, "auto", 2, None, tmp_path / "plain.ckpt"))
    (straight,) = run_ranks(1, lambda rank: fit(rank, "auto", 4, tmp_path / "plain.ckpt", None))
    for kind in FORMATS:
        strategy = lambda kind=kind: Hybrid3DStrategy(zero_stage=0, checkpoint_format=kind)  # noqa: E731
        (got,) = run_ranks(1, lambda rank: fit(rank, strategy, 2, None, tmp_path / f"{kind}.ckpt"))  # noqa: B023
        (resumed,) = run_ranks(1, lambda rank: fit(rank, strategy, 4, tmp_path / f"{kind}.ckpt", None))  # noqa: B023
        for value, right in zip([*got, *resumed], [*expected, *straight], strict=True):
            torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-12)


def test_an_address_is_not_trusted_more_than_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning takes ``weights_only=None`` for ``False`` there."""
    asked = []

    class Asks(TorchCheckpointIO):
        def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
            asked.append(weights_only)
            raise RuntimeError("enough")

    def fit(rank: int) -> Any:
        run = trainer(Hybrid3DStrategy(), plugins=[Asks()])
        with pytest.raises(RuntimeError, match="enough"):
            run.fit(Drops(), DataLoader(samples(), batch_size=4), ckpt_path="http://127.0.0.1:9/some.ckpt")
        return asked

    assert run_ranks(1, fit) == [[True]]

    def sharded_too(rank: int) -> None:
        run = trainer(Hybrid3DStrategy(checkpoint_format="sharded"), plugins=[Asks()])
        run.fit(Drops(), DataLoader(samples(), batch_size=4))

    with pytest.raises(RankFailure, match="would pass by the plugin Asks"):
        run_ranks(1, sharded_too)


def _empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def test_a_folder_in_memory(tmp_path: Path) -> None:
    def fit(rank: int) -> list[float]:
        losses = []
        for epochs, path in ((2, None), (1, None), (2, "memory://runs/first")):
            torch.manual_seed(0)
            module = Drops().double()
            run = trainer(Hybrid3DStrategy(checkpoint_format="sharded"), precision="64-true", max_epochs=epochs)
            run.fit(module, DataLoader(samples(), batch_size=4), ckpt_path=path)
            if epochs == 1:
                run.save_checkpoint("memory://runs/first")
                run.save_checkpoint("memory://runs/first")  # over the one before
            losses.append(module.seen[-1][1])
        return losses

    (losses,) = run_ranks(1, fit)
    assert losses[2] == losses[0] != losses[1]


def test_words_for_what_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    go(1, {"checkpoint_format": "sharded"}, max_steps=1, save=path)
    file = next(path.glob("__0_*.distcp"))
    with pytest.raises(RankFailure, match=r"is one file of a sharded checkpoint. Give the folder"):
        go(1, {}, resume=file, max_steps=2)
    (path / stored.MANIFEST).unlink()
    with pytest.raises(RankFailure, match=r"written by another strategy: it has no manifest.json.*convert"):
        go(1, {}, resume=path, max_steps=2)
    with pytest.raises(RankFailure, match=r"Checkpoint file not found|No such file"):
        go(1, {}, resume=tmp_path / "none.ckpt", max_steps=2)


def test_the_first_rank_says_what_is_resumed(tmp_path: Path) -> None:
    """Ranks whose folders have different names: on their own, the others would find nothing, and begin anew."""

    def fit(rank: int) -> list[int]:
        steps = []
        for most in (2, 4):
            module = Drops().double()
            saving = ModelCheckpoint(tmp_path / f"of rank {rank}", save_last=True, every_n_train_steps=2)
            run = trainer(
                Hybrid3DStrategy(timeout=60),
                2,
                precision="64-true",
                max_steps=most,
                callbacks=[saving],
                enable_checkpointing=True,
            )
            run.fit(module, DataLoader(samples(), batch_size=4), ckpt_path="last")
            steps.append(len(module.seen))
            assert saving.last_model_path == str(tmp_path / "of rank 0" / "last.ckpt")
        return steps

    assert run_ranks(2, fit) == [[2, 2], [2, 2]]


class Options:
    """What no ``weights_only`` file may hold."""

    def __init__(self) -> None:
        self.value = 3


@pytest.mark.parametrize("born", [pytest.param(False, marks=pytest.mark.slow), True])
def test_weights_only_is_honoured(tmp_path: Path, born: bool) -> None:
    class Hyper(Drops):
        def __init__(self, options: Options) -> None:
            super().__init__()
            self.save_hyperparameters()

    def fit(rank: int, resume: Path | None, only: bool | None) -> int:
        run = trainer(Hybrid3DStrategy(zero_stage=3, timeout=60), 2, max_steps=2 if resume else 1, max_epochs=-1)
        with run.init_module(empty_init=born):
            module = Hyper(Options())
        data = DataLoader(TensorDataset(*(t.float() for t in samples().tensors)), batch_size=4)
        run.fit(module, data, ckpt_path=resume, weights_only=only)
        run.save_checkpoint(tmp_path / f"{resume is None}.ckpt")
        return run.global_step

    first = tmp_path / "True.ckpt"
    run_ranks(2, lambda rank: fit(rank, None, None))
    with pytest.raises(RankFailure, match="Options was not an allowed global"):
        run_ranks(2, lambda rank: fit(rank, first, None))
    assert run_ranks(2, lambda rank: fit(rank, first, False)) == [2, 2]


@pytest.mark.parametrize(("kind", "momentum"), [("full", 0.0), ("sharded", 0.9)])
def test_optimizers_with_little_state(tmp_path: Path, kind: str, momentum: float) -> None:
    """One that keeps nothing, groups with rates of their own, a frozen parameter, and a scheduler."""

    def fit(rank: int, layout: dict[str, Any], epochs: int, resume: Path | None, save: Path | None) -> Any:
        torch.manual_seed(0)
        module = Drops().double()
        module.layers[1].requires_grad_(False)

        def optimizers() -> Any:
            first, *rest = [p for p in module.parameters() if p.requires_grad]
            groups = [{"params": [first], "lr": 0.05}, {"params": rest}]
            sgd = torch.optim.SGD(groups, lr=0.02, momentum=momentum)
            return [sgd], [torch.optim.lr_scheduler.StepLR(sgd, 1, 0.5)]

        module.configure_optimizers = optimizers  # type: ignore[method-assign,assignment]
        for layer in module.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        run = trainer(Hybrid3DStrategy(timeout=60, **layout), 2, precision="64-true", max_epochs=epochs)
        data = samples()
        share = TensorDataset(*(t[rank::2] for t in data.tensors))
        run.fit(module, DataLoader(share, batch_size=4), ckpt_path=resume)
        if save is not None:
            run.save_checkpoint(save)
        rates = [group["lr"] for group in run.optimizers[0].param_groups]
        return rates, [p.detach().clone() for p in module.parameters()]

    def ranks(*arguments: Any) -> Any:
        return run_ranks(2, lambda rank: fit(rank, *arguments))[0]

    interleaved = {"zero_stage": 1, "checkpoint_format": kind}
    rates, expected = ranks(interleaved, 2, None, None)
    ranks(interleaved, 1, None, tmp_path / "one.ckpt")
    for layout in ({"zero_stage": 3}, {"zero_stage": 1}):
        resumed = ranks({**layout, "checkpoint_format": kind}, 2, tmp_path / "one.ckpt", None)
        assert resumed[0] == rates == [0.0125, 0.005]
        for value, right in zip(resumed[1], expected, strict=True):
            torch.testing.assert_close(value, right, rtol=1e-10, atol=1e-12)
