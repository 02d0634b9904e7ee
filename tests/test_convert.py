"""`lightning-partrain convert`: every format from every other, in bounded memory, complete or absent, and nothing in a file is run."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import resource
import signal
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_dcp
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_partrain.checkpoint import convert, foreign, full, sharded, stored, torch_file
from lightning_partrain.cli import main
from lightning_partrain.parallel.placement import Entry
from lightning_partrain.strategies import Hybrid3DStrategy
from tests.harness import run_ranks, trainer

# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints to convert
# ---------------------------------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    """Two groups of parameters, the second of which are earlier in the module; a buffer; an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 17), nn.BatchNorm1d(17), nn.Tanh(), nn.Linear(17, 3))
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self._device_mesh is not None:
            fully_shard(self.net, mesh=self._device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        params = list(self.net.parameters())
        optimizer = torch.optim.AdamW([{"params": params[3:]}, {"params": params[:3], "lr": 0.01}], lr=0.03)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


STEPS = 3


def fit(strategy: Any, devices: int, folder: Path, resume: Path | None = None, **options: Any) -> list[float]:
    """Losses of two epochs, or of the second; what the first left is in ``folder / "epoch=0.ckpt"``."""
    module, saving = Net(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1)
    data = torch.randn(4 * STEPS, 8, generator=torch.Generator().manual_seed(1))
    options = {"callbacks": [saving], "enable_checkpointing": True, "max_epochs": 2, **options}
    trainer(strategy, devices, **options).fit(module, DataLoader(data, batch_size=4), ckpt_path=resume)
    return module.losses


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A `full` checkpoint of a strategy of ours, and the losses that come next."""
    folder = tmp_path_factory.mktemp("ours")
    (losses,) = run_ranks(1, lambda rank: fit(Hybrid3DStrategy(), 1, folder))
    return folder / "epoch=0.ckpt", losses[STEPS:]


@pytest.fixture(scope="module")
def model_parallel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder of Lightning's ModelParallelStrategy on two ranks, and the losses that come next."""
    folder = tmp_path_factory.mktemp("model_parallel")

    def train(rank: int) -> list[float]:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
        return fit(strategy, 2, folder, precision="32-true")

    losses, _ = run_ranks(2, train)
    return folder / "epoch=0.ckpt", losses[STEPS:]


@pytest.fixture
def dcp(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder as Lightning's FSDPStrategy writes it, and what one device would have."""
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).double()
    optimizer = torch.optim.AdamW(
        [{"params": [module[1].weight]}, {"params": [module[1].bias, *module[0].parameters()]}]
    )
    module(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()
    names = ["1.weight", "1.bias", "0.weight", "0.bias"]
    expected = {"epoch": 3, "state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    by_number = optimizer.state_dict()
    by_name = {
        "state": {names[number]: values for number, values in by_number["state"].items()},
        "param_groups": [{**g, "params": [names[p] for p in g["params"]]} for g in by_number["param_groups"]],
    }
    path = tmp_path / "fsdp"
    torch_dcp.save({"model": module.state_dict(), "optimizer_0": by_name}, checkpoint_id=path)
    torch.save({"epoch": 3}, path / "meta.pt")
    return path, expected


def converted(source: Path, target: Path, to: str, *options: str) -> Path:
    assert main(["convert", str(source), str(target), "--to", to, *options]) == 0
    return target


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=True, map_location="cpu")


def assert_same(found: Any, expected: Any, where: str = "") -> None:
    """Bit by bit, with the types of what is no tensor."""
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype and torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{where}/{number}")
    else:
        assert type(found) is type(expected) and found == expected, where


# ---------------------------------------------------------------------------------------------------------------------
# What comes out is what went in
# ---------------------------------------------------------------------------------------------------------------------


def test_there_and_back(ours: Any, tmp_path: Path) -> None:
    source, _ = ours
    folder = converted(source, tmp_path / "folder", "sharded")
    assert len(stored.Reader(folder).names("optimizer.0.")) == 3 * 6
    back = converted(folder, tmp_path / "back.ckpt", "full")
    expected = loaded(source)
    assert {"loops", "callbacks", "lr_schedulers", "optimizer_states", full.KEY} <= expected.keys()
    assert expected["callbacks"] and expected["lr_schedulers"]
    assert_same(loaded(back), expected)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["back.ckpt", "folder"]


def test_lightning_s_folder_goes_on_in_plain_lightning(model_parallel: Any, tmp_path: Path) -> None:
    source, expected = model_parallel
    file = converted(source, tmp_path / "one.ckpt", "full")
    assert fit("auto", 1, tmp_path, resume=file) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("to", ["full", "sharded"])
def test_lightning_s_folder_goes_on_with_our_strategies(model_parallel: Any, tmp_path: Path, to: str) -> None:
    source, expected = model_parallel
    target = converted(source, tmp_path / "target", to)
    (losses,) = run_ranks(1, lambda rank: fit(Hybrid3DStrategy(), 1, tmp_path, resume=target))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_fsdp_s_folder(dcp: Any, tmp_path: Path) -> None:
    source, expected = dcp
    found = loaded(converted(source, tmp_path / "one.ckpt", "full"))
    own = found.pop(full.KEY)
    assert own["optimizer_parameters"] == [[["1.weight"], ["1.bias", "0.weight", "0.bias"]]]
    assert_same(found, expected)


def test_a_file_as_torch_writes_it(tmp_path: Path) -> None:
    """Every dtype, ties, views, what is empty, and plain data; with and without mmap; aligned as torch does."""
    tied = torch.randn(5, 3)
    value = {
        "tied": [tied, tied],
        "transposed": tied.t(),
        "row": tied[1],
        "empty": torch.empty(0, 3),
        "number": torch.tensor(1.5),
        "plain": {"a": (1, 2.5, None, True), "size": torch.Size([1, 2]), "dtype": torch.bfloat16},
        "state": nn.BatchNorm1d(2).state_dict(),
        **{str(d): torch.ones(3, dtype=d) for d in (torch.bfloat16, torch.bool, torch.uint16, torch.complex64)},
        "float8": torch.ones(2).to(torch.float8_e4m3fn).view(torch.uint8),
    }
    torch.save(value, tmp_path / "theirs")
    torch_file.save(torch_file.load(tmp_path / "theirs"), tmp_path / "ours")
    with zipfile.ZipFile(tmp_path / "ours") as archive:
        assert archive.testzip() is None
    for mmap in (False, True):
        found = torch.load(tmp_path / "ours", weights_only=True, mmap=mmap)
        assert_same(found, value)
        one, other = found["tied"]
        assert one.data_ptr() == other.data_ptr()
        assert found["state"]._metadata == value["state"]._metadata  # type: ignore[attr-defined]
        if mmap:
            assert all(each.data_ptr() % 64 == 0 for each in (one, found["number"], found["torch.uint16"]))


def test_large_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_file, "LARGE", 64)
    value = {"a": torch.randn(40), "b": torch.randn(3)}
    torch_file.save(value, tmp_path / "file")
    assert (tmp_path / "file").read_bytes().count(b"\x01\x00\x10\x00") >= 1  # the 64-bit sizes
    for mmap in (False, True):
        found = torch.load(tmp_path / "file", weights_only=True, mmap=mmap)
        assert_same(found, value)
        assert not mmap or found["a"].data_ptr() % 64 == 0
    assert_same(torch_file.load(tmp_path / "file")["a"].read(), value["a"])


@pytest.mark.parametrize("kind", ["pt", "old", "bin", "safetensors"])
def test_a_state_dict(tmp_path: Path, kind: str) -> None:
    from safetensors.torch import load_file, save_file

    state = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).state_dict()
    source = tmp_path / f"source.{kind}"
    if kind == "safetensors":
        save_file(state, source)
    else:
        torch.save(state, source, _use_new_zipfile_serialization=kind != "old")
    assert_same(dict(loaded(converted(source, tmp_path / "full", "full"))["state_dict"]), dict(state))
    assert_same(load_file(converted(source, tmp_path / "st", "safetensors", "--dtype", "float16")), half(dict(state)))
    folder = converted(source, tmp_path / "folder", "sharded")
    assert_same(loaded(converted(folder, tmp_path / "again", "full"))["state_dict"], dict(state))


def half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: each.half() if each.is_floating_point() else each for name, each in state.items()}


def test_ties_are_kept_where_a_format_has_them(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weight = torch.randn(3, 2)
    torch.save({"state_dict": {"m.a": weight, "m.b": weight}}, tmp_path / "source")
    again = loaded(converted(tmp_path / "source", tmp_path / "full", "full"))["state_dict"]
    assert again["m.a"].data_ptr() == again["m.b"].data_ptr()
    for to in ("safetensors", "sharded"):
        target = converted(tmp_path / "source", tmp_path / to, to)
        names = load_file(target) if to == "safetensors" else stored.Reader(target).names("model.")
        assert set(names) == {"m.a", "m.b"}


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[Path, Path, Any]]:
    """A checkpoint whose ``model`` is a Llama, whose weights are tied or not; its folder of Hugging Face's; and itself."""
    transformers = pytest.importorskip("transformers")

    def make(tied: bool) -> tuple[Path, Path, Any]:
        folder = tmp_path_factory.mktemp("llama")
        config = transformers.LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        model.save_pretrained(folder / "like")
        (folder / "like" / "tokenizer.json").write_text("{}")
        (folder / "like" / "modeling_own.py").write_text("code")
        module = pl.LightningModule()
        module.model = model
        with torch.no_grad():
            for param in model.parameters():
                param.add_(torch.randn_like(param))
        torch.save({"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6"}, folder / "a.ckpt")
        return folder / "a.ckpt", folder / "like", model

    return make


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("options", [["--max-shard-size", "8kB"], ["--submodule", "model"]])
def test_from_pretrained(llama: Any, tmp_path: Path, tied: bool, options: list[str]) -> None:
    from transformers import AutoModelForCausalLM

    source, like, model = llama(tied)
    folder = converted(source, tmp_path / "hf", "hf", "--like", str(like), *options)
    files = {each.name for each in folder.iterdir()}
    parts = sorted(each for each in files if each.endswith(".safetensors"))
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= files and "modeling_own.py" not in files
    if options[0] == "--submodule":
        assert parts == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert len(parts) > 2 and parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
        assert ("lm_head.weight" in index["weight_map"]) == (not tied)
        assert max((folder / each).stat().st_size for each in parts) < 11_000
    again, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.arange(10)[None]
    assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_tie_that_nobody_knows_of_stays(llama: Any, tmp_path: Path) -> None:
    """Without a configuration, a name that is missing could be initialized anew."""
    source, _, _ = llama(True)
    folder = converted(source, tmp_path / "hf", "hf", "--dtype", "bfloat16")
    found = foreign.read_safetensors(folder / "model.safetensors")
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= found.keys()
    assert {each.dtype for each in found.values()} == {torch.bfloat16}


def test_only_a_configuration_and_weights_beside_the_model(llama: Any, tmp_path: Path, capsys: Any) -> None:
    source, like, _ = llama(True)
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "config.json").write_bytes((like / "config.json").read_bytes())
    checkpoint = loaded(source)
    checkpoint["state_dict"]["metric"] = torch.ones(1)
    torch.save(checkpoint, tmp_path / "source")
    options = ["--like", str(tmp_path / "like"), "--submodule", "model"]
    folder = converted(tmp_path / "source", tmp_path / "hf", "hf", *options)
    expected = foreign.read_safetensors(like / "model.safetensors").keys()
    assert foreign.read_safetensors(folder / "model.safetensors").keys() == expected
    assert "1 weights outside 'model' are left out" in capsys.readouterr().out
    folder = converted(source, tmp_path / "as_it_is", "hf", "--submodule", "")
    assert loaded(source)["state_dict"].keys() == foreign.read_safetensors(folder / "model.safetensors").keys()


def test_another_model(llama: Any, tmp_path: Path, capsys: Any) -> None:
    source, like, _ = llama(False)
    state = {"state_dict": {f"x.{name}": each for name, each in loaded(source)["state_dict"].items()}}
    torch.save(state, tmp_path / "nested")
    said = refused(tmp_path / "nested", tmp_path / "hf", "hf", capsys, "--like", str(like))
    assert "model.embed_tokens.weight is missing" in said and "--submodule says which" in said
    converted(tmp_path / "nested", tmp_path / "hf", "hf", "--like", str(like), "--submodule", "x.model")
    state["state_dict"]["x.model.lm_head.weight"] = torch.ones(31, 16)
    torch.save(state, tmp_path / "smaller")
    said = refused(tmp_path / "smaller", tmp_path / "b", "hf", capsys, "--like", str(like), "--submodule", "x.model")
    assert "lm_head.weight is (31, 16) and not (32, 16)" in said
    said = refused(tmp_path / "smaller", tmp_path / "b", "hf", capsys, "--submodule", "y")
    assert "--submodule y" in said and "There are: x" in said


# ---------------------------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------------------------

TENSOR, COUNT = 2 << 20, 96


def growth(source: Path, target: Path, to: str) -> int:
    """Bytes by which the most memory that a process had grows when it converts, in a process that has done it before."""

    def child(rank: int) -> int:
        def status(field: str) -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

        small = target.with_name("small")
        torch.save({"state_dict": {"a": torch.ones(3)}}, small)
        converted(small, target.with_name("warm"), to)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
        before = status("VmRSS")
        converted(source, target, to)
        return status("VmHWM") - before

    return int(run_ranks(1, child)[0])


@pytest.mark.parametrize("path", [("full", "full"), ("full", "sharded"), ("sharded", "full"), ("dcp", "safetensors")])
def test_memory_is_bounded(tmp_path: Path, path: tuple[str, str]) -> None:
    kind, to = path
    source = tmp_path / "source"

    def make(rank: int) -> None:  # elsewhere, so that no memory is free here
        state = {f"layer.{number}": torch.full((TENSOR // 4,), float(number)) for number in range(COUNT)}
        if kind == "dcp":
            torch_dcp.save({"state_dict": state}, checkpoint_id=source)
            torch.save({}, source / "meta.pt")
            return
        torch.save({"state_dict": state}, tmp_path / "file")
        converted(tmp_path / "file", source, kind)

    run_ranks(1, make)
    assert growth(source, tmp_path / "target", to) < 2 * TENSOR + (40 << 20)  # 32 MB to look at check sums
    found = convert.read(tmp_path / "target")["state_dict"]
    assert len(found) == COUNT and found[f"layer.{COUNT - 1}"].read()[-1] == COUNT - 1


# ---------------------------------------------------------------------------------------------------------------------
# Hostile files
# ---------------------------------------------------------------------------------------------------------------------


def touch(path: str) -> None:
    Path(path).touch()


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return touch, (str(self.marker),)


def in_block(folder: Path, name: str, value: Any) -> None:
    """Put ``value`` in the place of an item of a distributed checkpoint."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    where = next(each for index, each in metadata.storage_data.items() if index.fqn == name)
    file = folder / where.relative_path
    where.offset = file.stat().st_size
    with open(file, "ab") as out:
        torch.save(value, out)
    where.length = file.stat().st_size - where.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hostile(kind: str, value: Any, tmp_path: Path, ours: Path, dcp: Path) -> Path:
    """A checkpoint with ``value`` in a file of that kind; manifests agree with it."""
    if kind in ("ckpt", "bin", "old"):
        torch.save(
            {"state_dict": {"a": torch.ones(1)}, "x": value},
            tmp_path / kind,
            _use_new_zipfile_serialization=kind != "old",
        )
        return tmp_path / kind
    if kind == "rest.pt":
        folder = converted(ours, tmp_path / "folder", "sharded")
        manifest = stored.Reader(folder).manifest
        name = manifest["rest"]
        torch.save({**loaded(folder / name), "x": value}, folder / name)
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        (folder / stored.MANIFEST).write_bytes(stored.sealed(manifest))
        return folder
    if kind == "meta.pt":
        torch.save({"x": value}, dcp / "meta.pt")
    elif kind == ".metadata":
        metadata = pickle.loads((dcp / ".metadata").read_bytes())
        metadata.storage_meta = value
        (dcp / ".metadata").write_bytes(pickle.dumps(metadata))
    else:
        in_block(dcp, kind, value)
    return dcp


KINDS = {
    "ckpt": "ckpt", "bin": "bin", "old": "old", "rest.pt": "rest_", "meta.pt": "meta.pt", ".metadata": ".metadata",
    "model.0.weight": ".distcp", "optimizer_0.param_groups": ".distcp",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_run(tmp_path: Path, ours: Any, dcp: Any, kind: str, capsys: Any) -> None:
    names = pickle.loads((dcp[0] / ".metadata").read_bytes()).state_dict_metadata
    item = next((name for name in names if name.startswith(kind)), kind)
    marker = tmp_path / "marker"
    source = hostile(item, Hostile(marker), tmp_path, ours[0], dcp[0])
    said = refused(source, tmp_path / "target", "full", capsys)
    assert "touch" in said and KINDS[kind] in said and "run" in said
    assert not marker.exists()
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()  # it would have been


@pytest.mark.parametrize(
    "what", ["builtins.eval", "builtins.getattr", "os.system", "torch.load", "torch.distributed.checkpoint.metadata.os"]
)
def test_metadata_asks_for_something_else(dcp: Any, tmp_path: Path, capsys: Any, what: str) -> None:
    module, _, name = what.rpartition(".")
    (dcp[0] / ".metadata").write_bytes(f"c{module}\n{name}\n(V1+1\ntR.".encode())
    assert f"it asks for {what}" in refused(dcp[0], tmp_path / "target", "full", capsys)


def test_classes_of_torch_are_not_made(dcp: Any) -> None:
    """Nor changed: what is built has nothing but data."""
    name = "torch.distributed.checkpoint.metadata\nMetadata"
    before = dict(vars(torch_dcp.Metadata))
    data = f"c{name}\n(N(dVversion\nV5\nstb.".encode()  # sets an attribute of the class itself
    (dcp[0] / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        foreign.read(dcp[0])
    assert dict(vars(torch_dcp.Metadata)) == before


def test_a_folder_does_not_point_outside(dcp: Any, tmp_path: Path, capsys: Any) -> None:
    metadata = pickle.loads((dcp[0] / ".metadata").read_bytes())
    (tmp_path / "secret").write_bytes((dcp[0] / "__0_0.distcp").read_bytes())
    for where in metadata.storage_data.values():
        where.relative_path = "../secret"
    (dcp[0] / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "'../secret', which is not in the folder" in refused(dcp[0], tmp_path / "target", "full", capsys)


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


def refused(source: Path, target: Path, to: str, capsys: Any, *options: str) -> str:
    """What is said, in one line; nothing is there that was not before."""
    before = sorted(source.parent.rglob("*")) + sorted(target.parent.glob("*"))
    capsys.readouterr()
    assert main(["convert", str(source), str(target), "--to", to, *options]) != 0
    assert sorted(source.parent.rglob("*")) + sorted(target.parent.glob("*")) == before
    said = str(capsys.readouterr().err)
    assert said.startswith("lightning-partrain: error: ") and said.count("\n") == 1
    return said


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    torch.save({"state_dict": {"m.a": torch.arange(3000.0), "m.b": torch.ones(3)}}, tmp_path / "plain.ckpt")
    return tmp_path / "plain.ckpt"


def test_places(plain: Path, tmp_path: Path, capsys: Any) -> None:
    target = tmp_path / "target"
    assert "missing does not exist" in refused(tmp_path / "missing", target, "full", capsys)
    assert f"DST {plain} is, lies in, or holds SRC" in refused(plain, plain, "full", capsys, "--force")
    folder = converted(plain, tmp_path / "folder", "sharded")
    for inside in (folder / "x", folder, tmp_path):
        assert "lies in, or holds SRC" in refused(folder, inside, "full", capsys, "--force")
    data = {each: each.read_bytes() for each in folder.iterdir()}
    assert "exists. --force replaces it" in refused(plain, folder, "full", capsys)
    assert {each: each.read_bytes() for each in folder.iterdir()} == data
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "photo").touch()
    assert "is a folder with other things in it" in refused(plain, tmp_path / "home", "full", capsys, "--force")
    assert "--dtype goes with --to safetensors or hf" in refused(plain, target, "full", capsys, "--dtype", "float16")
    assert "--like goes with --to hf" in refused(plain, target, "full", capsys, "--like", "x")
    for to in ("full", "sharded", "safetensors", "full", "hf"):  # each in the place of the one before
        converted(plain, folder, to, "--force")
    assert (folder / "model.safetensors").is_file()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "home", "plain.ckpt"]


def test_sizes(capsys: Any) -> None:
    sizes = [("5GB", 5 * 10**9), ("1.5kB", 1500), ("2GiB", 2 << 30), ("7", 7)]
    for text, size in sizes:
        assert convert.parser().parse_args(["a", "b", "--to", "hf", "--max-shard-size", text]).max_shard_size == size
    for text in ("", "GB", "0", "-1GB", "5XB"):
        with pytest.raises(SystemExit):
            convert.parser().parse_args(["a", "b", "--to", "hf", f"--max-shard-size={text}"])
        assert "is no size" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data", [b"", b"hello\n", b"PK\x03\x04" + bytes(100), b"\x02" + bytes(7) + b"{}", pickle.dumps([1])]
)
def test_no_checkpoint(data: bytes, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "source").write_bytes(data)
    assert f"{tmp_path / 'source'} is no" in refused(tmp_path / "source", tmp_path / "target", "full", capsys)


def test_no_weights(tmp_path: Path, capsys: Any) -> None:
    torch.save({"a": [1, 2]}, tmp_path / "source")
    assert "holds neither a 'state_dict' nor" in refused(tmp_path / "source", tmp_path / "target", "full", capsys)
    torch.save({"state_dict": {}, "epoch": 1}, tmp_path / "source")
    for to in ("hf", "safetensors"):
        assert "no weights of a model" in refused(tmp_path / "source", tmp_path / "target", to, capsys)
    (tmp_path / "empty").mkdir()
    assert "is a folder, but no checkpoint" in refused(tmp_path / "empty", tmp_path / "target", "full", capsys)
    torch.save({"state_dict": {"a": torch.eye(3).to_sparse()}}, tmp_path / "source")
    assert "sparse" in refused(tmp_path / "source", tmp_path / "target", "full", capsys)


@pytest.mark.parametrize("how", ["cut", "changed", "changed pickle"])
def test_a_damaged_file(plain: Path, tmp_path: Path, capsys: Any, how: str) -> None:
    data = bytearray(plain.read_bytes())
    if how == "cut":
        del data[-200:]
    else:
        at = data.index(torch.arange(3000.0).numpy().tobytes()) + 100 if how == "changed" else data.index(b"m.a")
        data[at] ^= 1
    plain.write_bytes(data)
    for to in ("full", "sharded", "safetensors"):
        said = refused(plain, tmp_path / "target", to, capsys)
        assert str(plain) in said and "damaged" in said


@pytest.mark.parametrize("how", ["cut", "missing", "changed"])
@pytest.mark.parametrize("kind", ["ours", "dcp", "safetensors"])
def test_damaged_folders_and_safetensors(
    plain: Path, dcp: Any, tmp_path: Path, capsys: Any, kind: str, how: str
) -> None:
    if kind == "safetensors":
        source = file = converted(plain, tmp_path / "source", "safetensors")
    else:
        source = converted(plain, tmp_path / "source", "sharded") if kind == "ours" else dcp[0]
        (file,) = source.glob("*.distcp")
        numbers = torch.arange(3000.0).numpy() if kind == "ours" else dcp[1]["state_dict"]["0.weight"].numpy()
    data = bytearray(file.read_bytes())
    changed = 20 if kind == "safetensors" else data.index(numbers.tobytes()) + 1
    if how == "missing" and kind != "safetensors":
        file.unlink()
    elif how == "changed":
        data[changed] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(data[:-60])
    said = refused(source, tmp_path / "target", "full", capsys)
    assert file.name in said


@pytest.mark.parametrize("key", ["files", "tensors", "rest"])
def test_a_manifest_of_something_else(plain: Path, tmp_path: Path, capsys: Any, key: str) -> None:
    source = converted(plain, tmp_path / "source", "sharded")
    manifest = stored.Reader(source).manifest
    manifest[key] = [1]
    (source / stored.MANIFEST).write_bytes(stored.sealed(manifest))
    assert str(source) in refused(source, tmp_path / "target", "full", capsys)


@pytest.mark.parametrize("to", ["full", "sharded", "safetensors", "hf"])
def test_a_full_disk(plain: Path, tmp_path: Path, to: str) -> None:
    before = converted(plain, tmp_path / "before", "full").read_bytes()

    def child(rank: int) -> tuple[int, int]:
        new, old = tmp_path / "new", tmp_path / "before"
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        codes = [main(["convert", str(plain), str(each), "--to", to, "--force"]) for each in (new, old)]
        os.truncate(1, 0)  # what was printed, lest the report itself be too long
        return codes[0], codes[1]

    assert run_ranks(1, child) == [(1, 1)]
    assert (tmp_path / "before").read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["before", "plain.ckpt"]


def test_interrupted(plain: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(value: Any, path: Path) -> None:
        path.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(torch_file, "save", save)
    assert "interrupted; nothing was converted" in refused(plain, tmp_path / "target", "full", capsys)


def test_progress(plain: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "EVERY", -1.0)
    converted(plain, tmp_path / "target", "full")
    printed = capsys.readouterr()
    assert "1/2 tensors, 0.00 of 0.00 GB" in printed.err and "2/2 tensors" in printed.err
    assert "2 tensors" in printed.out


def test_weights_come_out_of_a_folder_whose_rest_is_refused(tmp_path: Path) -> None:
    """Such as hyper-parameters that are no plain data."""
    source, value = tmp_path / "source", torch.arange(6.0).view(2, 3)
    entries = {"model.weight": Entry.of(value)}
    sharded.begin(source, entries, {"state_dict": {}, "where": Path()}, {}, 0, lambda v: [v], copy=False)(lambda v: [v])
    assert main(["convert", str(source), str(tmp_path / "no.ckpt"), "--to", "full"]) == 1
    assert main(["convert", str(source), str(tmp_path / "w.safetensors"), "--to", "safetensors"]) == 0
    assert torch.equal(load_file(tmp_path / "w.safetensors")["weight"], value)


def test_conjugates_and_negatives_that_are_only_said(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    other = value.clone()
    torch.save({"state_dict": {"a": value.conj(), "b": other.conj().imag, "c": value}}, tmp_path / "s.ckpt")
    assert main(["convert", str(tmp_path / "s.ckpt"), str(tmp_path / "t.ckpt"), "--to", "full"]) == 0
    got = torch.load(tmp_path / "t.ckpt", weights_only=True)["state_dict"]
    assert got["a"].tolist() == value.conj().tolist() and got["b"].tolist() == other.conj().imag.tolist()
    assert got["c"].tolist() == value.tolist()


def test_force_leaves_folders_with_other_things_alone(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "s.ckpt")
    target = tmp_path / "target"
    assert main(["convert", str(tmp_path / "s.ckpt"), str(target), "--to", "hf", "--submodule", ""]) == 0
    assert main(["convert", str(tmp_path / "s.ckpt"), str(target), "--to", "hf", "--submodule", "", "--force"]) == 0
    (target / "thesis.txt").write_text("mine")
    assert main(["convert", str(tmp_path / "s.ckpt"), str(target), "--to", "hf", "--submodule", "", "--force"]) == 1
    assert (target / "thesis.txt").read_text() == "mine"
