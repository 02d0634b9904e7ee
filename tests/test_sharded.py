"""The `sharded` format: written by all ranks at once, read by every layout, complete or absent."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lightning_partrain.checkpoint import sharded, state, stored
from lightning_partrain.mesh import ParallelMesh, ParallelSizes
from lightning_partrain.parallel.placement import Entry, Fused, Piece, pieces, whole
from lightning_partrain.strategies import Hybrid3DStrategy
from lightning_partrain.sync.messages import gather_json
from tests.harness import RankFailure, run_ranks, trainer
from tests.parity import Recorder, shares
from tests.tensor_models import TENSOR_CASES
from tests.test_numerics import in_group

#: (ranks, arguments)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2-pp2": (4, {"pipeline_parallel_size": 2}),
    "tp2-pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "dp2-tp2-pp2": (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 2}),
    "dp4-zero3": (4, {"zero_stage": 3}),
    "dp2-tp2-zero3": (4, {"zero_stage": 3, "tensor_parallel_size": 2}),
    "dp4-hsdp2": (4, {"zero_stage": 2, "data_parallel_replicate_size": 2}),
    "tp2-zero0": (2, {"zero_stage": 0, "tensor_parallel_size": 2}),
}


def train(
    layout: str,
    epochs: int,
    folder: Path,
    resume: Any = None,
    case: str = "fused",
    optimizer: str = "adamw",
    kind: str = "sharded",
) -> list[list[float]]:
    """Losses of each rank; the last state is in ``folder / layout``."""
    ranks, arguments = LAYOUTS[layout]

    def fit(rank: int) -> list[float]:
        torch.manual_seed(0)
        module = TENSOR_CASES[case].build().double()
        module.optimizer = optimizer
        tensor, stages = (arguments.get(f"{axis}_parallel_size", 1) for axis in ("tensor", "pipeline"))
        replicas = ranks // tensor // stages
        strategy = Hybrid3DStrategy(checkpoint_format=kind, timeout=60, **arguments)
        recorder = Recorder()
        run = trainer(strategy, ranks, precision="64-true", max_epochs=epochs, callbacks=[recorder])
        loader = shares(TENSOR_CASES[case].data(torch.float64), rank // tensor % replicas, replicas)
        run.fit(module, loader, ckpt_path=resume)
        run.save_checkpoint(folder / layout)
        return recorder.record.losses

    return run_ranks(ranks, fit, timeout=150)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_chain_of_layouts_is_the_run_that_was_never_stopped(tmp_path: Path, optimizer: str) -> None:
    chain = ["dp2-pp2", "tp2-pp2", "dp2-tp2-pp2", "dp4-zero3", "one", "dp2-tp2-zero3", "dp4-hsdp2", "tp2-zero0"]
    chain = chain if optimizer == "adamw" else chain[2:4]
    (expected,) = train("one", len(chain), tmp_path / "whole", optimizer=optimizer)
    steps = len(expected) // len(chain)
    before = None
    for number, layout in enumerate(chain):
        for losses in train(layout, number + 1, tmp_path, before, optimizer=optimizer):
            assert losses == pytest.approx(expected[number * steps : (number + 1) * steps], rel=1e-9)
        before = tmp_path / layout
        assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]
    theirs = state.put_together(stored.Reader(tmp_path / "whole" / "one"))
    ours = state.put_together(stored.Reader(before))
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    for name, value in theirs["state_dict"].items():
        torch.testing.assert_close(ours["state_dict"][name], value, rtol=1e-8, atol=1e-11)
    (a,), (b,) = ours["optimizer_states"], theirs["optimizer_states"]
    assert a["param_groups"] == b["param_groups"] and list(a["state"]) == list(b["state"])
    for index, values in b["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(a["state"][index][key], value, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(("source", "target"), [("full", "sharded"), ("sharded", "full")])
def test_either_format_is_read(tmp_path: Path, source: str, target: str) -> None:
    (expected,) = train("one", 2, tmp_path / "whole", case="mlp")
    train("tp2-zero0", 1, tmp_path, case="mlp", kind=source)
    for losses in train("dp4-zero3", 2, tmp_path, tmp_path / "tp2-zero0", case="mlp", kind=target):
        assert losses == pytest.approx(expected[len(expected) // 2 :], rel=1e-9)


def test_each_rank_writes_a_part(tmp_path: Path) -> None:
    train("dp2-tp2-zero3", 1, tmp_path)
    path = tmp_path / "dp2-tp2-zero3"
    manifest = stored.Reader(path).manifest
    sizes = [manifest["files"][part_of(path, rank).name]["bytes"] for rank in range(4)]
    assert min(sizes) > 0.8 * max(sizes) > 0
    for entry in manifest["tensors"].values():  # every number once
        count = sum(torch.Size(block["sizes"]).numel() for block in entry["blocks"])
        assert count == torch.Size(entry["shape"]).numel()


def test_torch_s_own_tools_read_it(tmp_path: Path) -> None:
    train("dp2-tp2-zero3", 1, tmp_path)
    path = tmp_path / "dp2-tp2-zero3"
    dcp_to_torch_save(path, tmp_path / "torch.pt")
    theirs = torch.load(tmp_path / "torch.pt", weights_only=True)
    ours = stored.Reader(path)
    names = ours.names("")
    assert set(theirs) == set(names) and len(ours.names("model.")) == 10
    assert all(torch.equal(theirs[name], ours.whole(name)) for name in names)


def test_pieces_are_the_model_s_own_order() -> None:
    fused = Fused(0, (8, 4, 4), 2)

    def check(rank: int) -> bool:
        from torch.distributed.tensor import DTensor, Shard

        mesh = ParallelMesh.create(ParallelSizes(tp=2), "cpu")
        full = torch.arange(48.0).view(16, 3)
        local = fused.by_rank(full).chunk(2)[rank].clone()
        tensor = DTensor.from_local(local, mesh.device_mesh["tp"], [Shard(0)], run_check=False)
        assert torch.equal(whole(tensor, fused), full)
        found = pieces(tensor, fused)
        assert [piece.offsets for piece in found] == [(4 * rank, 0), (8 + 2 * rank, 0), (12 + 2 * rank, 0)]
        return all(torch.equal(p.tensor, full[p.offsets[0] : p.offsets[0] + len(p.tensor)]) for p in found)

    assert in_group(2, check) == [True, True]


def part_of(path: Path, rank: int) -> Path:
    (file,) = path.glob(f"__{rank}_*.distcp")
    return file


def damaged(path: Path, how: str) -> str:
    file = part_of(path, 1)
    data = file.read_bytes()
    if how == "missing":
        file.unlink()
    elif how == "manifest":
        file = path / stored.MANIFEST
        text = file.read_text()
        place = text.index('"numbers": ') + 12  # a digit
        file.write_text(f"{text[:place]}{9 - int(text[place])}{text[place + 1 :]}")
    elif how == "cut":
        file.write_bytes(data[:-10])
    else:
        file.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    return file.name


@pytest.mark.parametrize("how", ["missing", "cut", "changed", "manifest"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, how: str) -> None:
    train("tp2-zero0", 1, tmp_path, case="mlp")
    name = damaged(tmp_path / "tp2-zero0", how)
    with pytest.raises(RankFailure) as failure:
        train("tp2-zero0", 2, tmp_path, tmp_path / "tp2-zero0", case="mlp")
    words = (
        f"is damaged: {name} "
        + {"missing": "is missing", "cut": "has ", "changed": "has changed", "manifest": "has changed"}[how]
    )
    assert all(words in report for report in failure.value.reports)


def test_a_rank_that_cannot_write_leaves_the_one_before(tmp_path: Path) -> None:
    train("tp2-zero0", 1, tmp_path, case="mlp")
    before = {file.name: file.read_bytes() for file in (tmp_path / "tp2-zero0").iterdir()}

    def fails(rank: int) -> str:
        module = TENSOR_CASES["mlp"].build().double()
        run = trainer(
            Hybrid3DStrategy(tensor_parallel_size=2, checkpoint_format="sharded"), 2, precision="64-true", max_steps=1
        )
        run.fit(module, shares(TENSOR_CASES["mlp"].data(torch.float64), 0, 1))
        if rank == 1:
            sharded._write = lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error"))  # type: ignore[assignment]
        with pytest.raises(RuntimeError) as caught:
            run.save_checkpoint(tmp_path / "tp2-zero0")
        return str(caught.value)

    first, second = run_ranks(2, fails)
    assert first == second and "rank 1: OSError: [Errno 5] Input/output error" in first
    assert {file.name: file.read_bytes() for file in (tmp_path / "tp2-zero0").iterdir()} == before


class Saves(pl.Callback):
    """After step 2, while steps go on; the files are written after step 4 only."""

    def __init__(self, folder: Path, late: threading.Event) -> None:
        self.folder, self.late = folder, late

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.folder / "at2")
        if trainer.global_step == 4:
            self.late.set()
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.folder / "at5")  # waits for the other


def saved_on_the_way(folder: Path, asynchronous: bool, broken: bool = False) -> list[int]:
    def fit(rank: int) -> int:
        torch.manual_seed(0)
        late, write = threading.Event(), sharded._write
        if asynchronous:

            def later(*arguments: Any) -> Any:
                assert late.wait(60)
                if broken and rank == 1:
                    raise OSError(5, "Input/output error")
                return write(*arguments)

            sharded._write = later
        case = TENSOR_CASES["mlp"]
        strategy = Hybrid3DStrategy(
            zero_stage=1, tensor_parallel_size=2, checkpoint_format="sharded", async_save=asynchronous, timeout=60
        )
        run = trainer(strategy, 4, precision="64-true", max_epochs=2, max_steps=8, callbacks=[Saves(folder, late)])
        with pytest.raises(RuntimeError, match="Input/output error") if broken else nullcontext():
            run.fit(case.build().double(), shares(case.data(torch.float64), rank // 2, 2))
        return run.global_step

    return run_ranks(4, fit)


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    assert saved_on_the_way(tmp_path / "now", False) == saved_on_the_way(tmp_path / "later", True) == [8] * 4
    for name in ("at2", "at5"):
        now, later = (stored.Reader(tmp_path / kind / name) for kind in ("now", "later"))
        assert sorted(now.names("")) == sorted(later.names("")) and now.rest()["global_step"] == later.rest()[
            "global_step"
        ] == int(name[2:])
        assert all(
            torch.equal(now.whole(tensor), later.whole(tensor))
            for tensor in now.names("")
            if not tensor.startswith("extra.")
        )


def test_an_error_while_writing_is_raised_at_a_later_step(tmp_path: Path) -> None:
    steps = saved_on_the_way(tmp_path, True, broken=True)
    assert all(4 <= step < 8 for step in steps)
    assert not stored.is_sharded(tmp_path / "at2")


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_is_killed_while_saving_leaves_a_complete_one(tmp_path: Path, killed: int) -> None:
    """At 15 random moments each."""
    path, found = tmp_path / "last", set()
    draw = random.Random(killed)
    for _ in range(15):
        moment = draw.uniform(0.0, 0.3)

        def save_again_and_again(rank: int, moment: float = moment) -> None:
            def everyone(value: Any) -> list[Any]:
                return gather_json(value, torch.device("cpu"))

            for step in range(100):
                if step == 1 and rank == killed:
                    threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
                entry = Entry((4, 50_000), torch.float32, [Piece((2 * rank, 0), torch.full((2, 50_000), float(step)))])
                write = sharded.begin(path, {"model.weight": entry}, {"step": step}, {}, rank, everyone, copy=False)
                write(everyone)

        with pytest.raises(RankFailure):
            in_group(2, save_again_and_again)
        reader = stored.Reader(path)
        step = reader.rest()["step"]
        found.add(step)
        assert torch.equal(reader.whole("model.weight"), torch.full((4, 50_000), float(step)))
    assert len(found) > 3


def test_model_checkpoint_keeps_the_best_folders(tmp_path: Path) -> None:
    def fit(rank: int) -> list[str]:
        torch.manual_seed(0)
        case = TENSOR_CASES["mlp"]
        callback = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=1, save_last=True)
        run = trainer(
            Hybrid3DStrategy(tensor_parallel_size=2, checkpoint_format="sharded"),
            2,
            max_epochs=3,
            callbacks=[callback],
            enable_checkpointing=True,
        )
        loader = shares(case.data(torch.float32), 0, 1)
        module = case.build()
        run.fit(module, loader, loader)
        results = run.validate(module, loader, ckpt_path="best", verbose=False)
        assert results[0]["val_loss"] == pytest.approx(float(callback.best_model_score), rel=1e-5)  # type: ignore[arg-type]
        return sorted(each.name for each in tmp_path.iterdir())

    first, second = run_ranks(2, fit)
    assert first == second and first[-1] == "latest" and len(first) == 3
    assert all(stored.is_sharded(tmp_path / name) for name in first[:2])


def test_words_that_are_no_format() -> None:
    with pytest.raises(ValueError, match="checkpoint_format='shards' does not exist"):
        Hybrid3DStrategy(checkpoint_format="shards")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs checkpoint_format='sharded'"):
        Hybrid3DStrategy(async_save=True)


class Hostile:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("/tmp/lightning_partrain_was_here"),))


def test_nothing_is_unpickled_freely(tmp_path: Path) -> None:
    train("tp2-zero0", 1, tmp_path, case="mlp")
    path = tmp_path / "tp2-zero0"
    manifest = stored.Reader(path).manifest
    file = path / manifest["rest"]
    torch.save({"state_dict": Hostile()}, file)
    data = file.read_bytes()
    manifest["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / stored.MANIFEST).write_bytes(stored.sealed(manifest))
    with pytest.raises(Exception, match=r"[Ww]eights"):
        stored.Reader(path).rest()
    assert not Path("/tmp/lightning_partrain_was_here").exists()
