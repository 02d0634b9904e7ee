"""Weights from files of others: blocks of them, which of them are for what, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_partrain.checkpoint import pretrained, sharded
from lightning_partrain.checkpoint.pretrained import Match, match, open_weights
from lightning_partrain.parallel.placement import Entry, Stored
from tests.models import HuggingFace

LLAMA = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
GPT2 = {"vocab_size": 96, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}


class Holder(pl.LightningModule):
    """Modules under names of the user's, with dots for those further down."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            *path, last = name.split("__")
            place: nn.Module = self
            for word in path:
                if not hasattr(place, word):
                    place.add_module(word, nn.Module())
                place = place.get_submodule(word)
            place.add_module(last, part)


def llama(head: str = "ForCausalLM", seed: int = 0, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return getattr(transformers, f"Llama{head}")(transformers.LlamaConfig(**{**LLAMA, "pad_token_id": 0, **changed}))


def gpt2(head: str = "LMHeadModel", seed: int = 0, **changed: Any) -> Any:
    torch.manual_seed(seed)
    return getattr(transformers, f"GPT2{head}")(transformers.GPT2Config(**{**GPT2, "pad_token_id": 0, **changed}))


def read(module: nn.Module, path: Path, submodule: str | None = None) -> Match:
    """Every matched tensor in two blocks, cut along its longest dimension."""
    weights = open_weights(path)
    found = match(module, weights, submodule)
    state = module.state_dict()
    for name, stored in found.names.items():
        with torch.no_grad():
            state[name].copy_(in_halves(weights[stored]))
    return found


def in_halves(stored: Stored) -> Tensor:
    if not stored.shape:
        return stored.part([], [])
    dim = max(range(len(stored.shape)), key=lambda dim: stored.shape[dim])
    half, length = stored.shape[dim] // 2, stored.shape[dim]
    parts = []
    for begin, size in ((0, half), (half, length - half)):
        offsets, sizes = [0] * len(stored.shape), list(stored.shape)
        offsets[dim], sizes[dim] = begin, size
        parts.append(stored.part(offsets, sizes))
    return torch.cat(parts, dim)


def same(one: nn.Module, other: nn.Module) -> None:
    theirs = other.state_dict()
    assert theirs
    for name, value in one.state_dict().items():
        assert torch.equal(value, theirs[name]), name


# Blocks of files


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "layer.weight": torch.randn(6, 5),
        "layer.half": torch.randn(4, 3, 2).bfloat16(),
        "count": torch.tensor(7),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
    }


def write_index(folder: Path, kind: str, save: Callable[[dict[str, Tensor], Path], None]) -> Path:
    folder.mkdir()
    names = sorted(tensors())
    places = {}
    for number, mine in enumerate((names[:2], names[2:])):
        file = f"{kind.partition('.')[0]}-{number}.{kind.rpartition('.')[2]}"
        save({name: tensors()[name] for name in mine}, folder / file)
        places.update(dict.fromkeys(mine, file))
    (folder / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def write_one(folder: Path, name: str) -> Path:
    folder.mkdir()
    save_file(tensors(), folder / name)
    return folder


def write_several(folder: Path) -> Path:
    folder.mkdir()
    for name, value in tensors().items():
        save_file({name: value}, folder / f"{name}.safetensors")
    return folder


def write_torch(value: Any, file: Path, old: bool = False) -> Path:
    torch.save(value, file, _use_new_zipfile_serialization=not old)
    return file


def write_safetensors(file: Path) -> Path:
    save_file(tensors(), file)
    return file


def write_sharded(path: Path) -> Path:
    entries = {f"model.{name}": Entry.of(value) for name, value in tensors().items()}
    entries["optimizer.0.0.exp_avg"] = Entry.of(torch.zeros(3))

    def everyone(value: Any) -> list[Any]:
        return [value]

    sharded.begin(path, entries, {}, {}, 0, everyone, False)(everyone)
    return path


def write_cache(folder: Path) -> Path:
    """As in Hugging Face's cache: links to files that are named for what they contain."""
    made = write_index(folder / "made", "model.safetensors", save_file)
    (folder / "blobs").mkdir()
    snapshot = folder / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for file in made.iterdir():
        os.replace(file, folder / "blobs" / f"{abs(hash(file.name))}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{abs(hash(file.name))}"))
    return snapshot


KINDS: dict[str, Callable[[Path], Path]] = {
    "safetensors": lambda at: write_safetensors(at / "x.safetensors"),
    "folder": lambda at: write_one(at / "folder", "model.safetensors"),
    "several": lambda at: write_several(at / "folder"),
    "sharded-safetensors": lambda at: write_index(at / "folder", "model.safetensors", save_file),
    "cache": lambda at: write_cache(at),
    "pt": lambda at: write_torch(tensors(), at / "x.pt"),
    "old": lambda at: write_torch(tensors(), at / "x.bin", old=True),
    "lightning": lambda at: write_torch({"epoch": 1, "state_dict": tensors(), "callbacks": {}}, at / "x.ckpt"),
    "under-module": lambda at: write_torch({"module": tensors(), "step": torch.tensor(1)}, at / "x.pth"),
    "sharded-bin": lambda at: write_index(at / "folder", "pytorch_model.bin", torch.save),
    "our-own": lambda at: write_sharded(at / "checkpoint"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_those_of_the_tensors(kind: str, tmp_path: Path) -> None:
    weights = open_weights(KINDS[kind](tmp_path))
    assert set(weights) == set(tensors()) and len(weights) == len(tensors())
    for name, value in tensors().items():
        stored = weights[name]
        assert (stored.shape, stored.dtype) == (tuple(value.shape), value.dtype)
        whole = stored.part([0] * value.ndim, value.shape)
        assert torch.equal(whole, value) and whole.dtype == value.dtype
    block = weights["layer.weight"].part([2, 1], [3, 2])
    assert torch.equal(block, tensors()["layer.weight"][2:5, 1:3])
    assert block.is_contiguous() and block.untyped_storage().nbytes() == block.nbytes
    assert torch.equal(weights["layer.half"].part([1, 0, 1], [2, 3, 1]), tensors()["layer.half"][1:3, :, 1:])
    assert weights["layer.weight"].part([6, 0], [0, 5]).shape == (0, 5)
    block.fill_(9)
    assert torch.equal(weights["layer.weight"].part([0, 0], [6, 5]), tensors()["layer.weight"])


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize(("offsets", "sizes"), [([4, 0], [3, 5]), ([-1, 0], [1, 5]), ([0, 0], [-1, 5]), ([0], [6])])
def test_a_block_that_is_not_there(kind: str, offsets: list[int], sizes: list[int], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no block of"):
        open_weights(KINDS[kind](tmp_path))["layer.weight"].part(offsets, sizes)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("kind", ["sharded-safetensors", "sharded-bin"])
def test_files_are_mapped_once_and_not_held_per_tensor(kind: str, tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    weights = open_weights(KINDS[kind](tmp_path))
    for stored in weights.values():
        stored.part([0] * len(stored.shape), stored.shape)
    assert len(os.listdir("/proc/self/fd")) - before <= 2
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) <= 2 * 2
    del weights, stored
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_a_large_file_only_the_block_is_read(tmp_path: Path) -> None:
    large = torch.zeros(1 << 14, 1 << 10)  # 64 MiB
    save_file({"x": large}, tmp_path / "x.safetensors")
    torch.save({"x": large}, tmp_path / "x.pt")
    del large

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for file in ("x.safetensors", "x.pt"):
        before = resident()
        weights = open_weights(tmp_path / file)
        block = weights["x"].part([5000, 0], [100, 1 << 10])
        assert block.shape == (100, 1 << 10) and resident() - before < 16 << 20, file


# Models


@pytest.mark.parametrize("build", [llama, lambda **k: llama(tie_word_embeddings=True, **k), gpt2])
@pytest.mark.parametrize("place", ["model", "backbone__encoder"])
@pytest.mark.parametrize("shard", ["4KB", "1GB"])
def test_a_whole_model_into_a_submodule(build: Any, place: str, shard: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    module = Holder(**{place: build(seed=1)}, head=nn.Linear(16, 3))
    found = read(module, tmp_path)
    same(module.get_submodule(place.replace("__", ".")), build())
    assert (found.module_prefix, found.file_prefix) == (f"{place.replace('__', '.')}.", "")
    assert found.untouched == ["head.weight", "head.bias"] and found.unused == []


def test_a_tied_parameter_has_all_of_its_names(tmp_path: Path) -> None:
    model = gpt2()
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    names = match(Holder(model=gpt2(seed=1)), open_weights(tmp_path)).names
    assert names["model.lm_head.weight"] == names["model.transformer.wte.weight"] == "transformer.wte.weight"
    torch.save(model.state_dict(), tmp_path / "both.bin")  # the same numbers under both names
    found = match(Holder(model=gpt2(seed=1)), open_weights(tmp_path / "both.bin"))
    assert found.names == names and found.unused == []


@pytest.mark.parametrize(("file", "module"), [("ForCausalLM", "Model"), ("Model", "ForCausalLM")])
def test_between_a_model_and_its_base(file: str, module: str, tmp_path: Path) -> None:
    llama(file).save_pretrained(tmp_path)
    holder = Holder(net=llama(module, seed=1), head=nn.Linear(16, 2))
    found = read(holder, tmp_path)
    prefixes = ("net.", "model.") if module == "Model" else ("net.model.", "")
    assert (found.module_prefix, found.file_prefix) == prefixes
    assert found.unused == (["lm_head.weight"] if module == "Model" else [])
    assert ("net.lm_head.weight" in found.untouched) == (module == "ForCausalLM")
    same(holder.net if module == "Model" else holder.net.model, llama("Model" if file == "Model" else file).base_model)


@pytest.mark.parametrize("build", [llama, gpt2])
@pytest.mark.parametrize("head", ["Model", None])
def test_a_base_model_into_a_classifier(build: Any, head: str | None, tmp_path: Path) -> None:
    source = build(head) if head else build()
    source.save_pretrained(tmp_path)
    module = Holder(model=build("ForSequenceClassification", seed=1))
    before = module.model.score.weight.clone()
    found = read(module, tmp_path)
    same(module.model.base_model, source.base_model)
    assert torch.equal(module.model.score.weight, before) and found.untouched == ["model.score.weight"]


def test_a_checkpoint_of_lightning_and_one_of_ours(tmp_path: Path) -> None:
    source = Holder(net=llama())
    torch.save({"state_dict": source.state_dict(), "epoch": 3}, tmp_path / "x.ckpt")
    entries = {f"model.{name}": Entry.of(value) for name, value in source.state_dict().items()}
    sharded.begin(tmp_path / "ours", entries, {}, {}, 0, lambda value: [value], False)(lambda value: [value])
    for path in (tmp_path / "x.ckpt", tmp_path / "ours"):
        module = Holder(backbone=llama(seed=1), head=nn.Linear(4, 4))
        found = read(module, path)
        same(module.backbone, source.net)
        assert (found.module_prefix, found.file_prefix) == ("backbone.", "net.")


def test_a_bfloat16_file(tmp_path: Path) -> None:
    llama().bfloat16().save_pretrained(tmp_path)
    module = Holder(model=llama(seed=1))
    read(module, tmp_path)
    assert open_weights(tmp_path)["lm_head.weight"].dtype == torch.bfloat16
    same(module.model, llama().bfloat16().float())


def test_a_base_model_under_the_name_it_has_in_the_file() -> None:
    found = match(Holder(model=llama("Model")), shapes(llama()))
    assert (found.module_prefix, found.file_prefix, found.unused) == ("model.", "model.", ["lm_head.weight"])


def test_a_module_on_the_meta_device(tmp_path: Path) -> None:
    llama(tie_word_embeddings=True).save_pretrained(tmp_path)
    with torch.device("meta"):
        module = Holder(model=llama(tie_word_embeddings=True))
    assert not match(module, open_weights(tmp_path)).untouched


# Which tensors are for what


class Shape:
    """Of a tensor of which no number is asked for."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype = shape, torch.float32

    def part(self, offsets: Any, sizes: Any) -> Tensor:
        raise AssertionError("to match needs no numbers")


def shapes(module: nn.Module, prefix: str = "") -> dict[str, Stored]:
    return {f"{prefix}{name}": Shape(*value.shape) for name, value in module.state_dict().items()}


def test_a_missing_buffer_is_left_alone_and_a_missing_parameter_is_not() -> None:
    module = Holder(net=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    weights = shapes(module.net)
    del weights["1.running_var"]
    found = match(module, weights)
    assert found.untouched == ["net.1.running_var"] and len(found.names) == 6
    del weights["1.bias"]
    with pytest.raises(ValueError, match=r"Missing in the file \(1\): net.1.bias \(4,\)"):
        match(module, weights)


def test_buffers_that_are_no_more_are_told_and_more_is_refused() -> None:
    weights = shapes(gpt2("Model"))
    weights |= {f"h.{layer}.attn.bias": Shape(1, 1, 16, 16) for layer in range(2)}
    module = Holder(net=gpt2("Model"))
    assert match(module, weights).unused == ["h.0.attn.bias", "h.1.attn.bias"]
    weights |= {f"h.{layer}.attn.masked_bias{n}": Shape() for layer in range(2) for n in range(3)}
    with pytest.raises(ValueError, match=r"Not in the module \(8\): h.0.attn.bias \(1, 1, 16, 16\)"):
        match(module, weights)
    assert len(match(module, weights, "net").unused) == 8


def test_a_deeper_model_is_not_cut_to_fit() -> None:
    """Its embedding, or one of its layers, would fit by itself."""
    weights = shapes(llama(num_hidden_layers=4))
    module = Holder(net=llama())
    with pytest.raises(ValueError, match=r"Tensors alike in .*: 2\d\.\n  Not in the module \(18\): model.layers.2"):
        match(module, weights)
    assert len(match(module, weights, "net").names) == len(module.state_dict())
    with pytest.raises(ValueError, match=r"Missing in the file \(18\): net.model.layers.2"):
        match(Holder(net=llama(num_hidden_layers=4)), shapes(llama()))


def test_shapes_that_differ_are_shown() -> None:
    with pytest.raises(ValueError) as error:
        match(Holder(net=llama(vocab_size=128)), shapes(llama()))
    assert "Of another shape (2): net.model.embed_tokens.weight (128, 16), in the file (96, 16);" in str(error.value)
    assert 'load_pretrained={"model.backbone": "path"}' in str(error.value)
    with pytest.raises(ValueError) as error:
        match(Holder(net=llama("ForSequenceClassification", vocab_size=128)), shapes(llama()))
    assert "Of another shape (1)" in str(error.value) and "Missing" not in str(error.value)
    # A new head of another size is no reason to leave all else alone without a word.
    module = Holder(net=llama("ForSequenceClassification", num_labels=5))
    weights = shapes(llama("ForSequenceClassification", num_labels=3))
    with pytest.raises(ValueError, match=r"Of another shape \(1\): net.score.weight \(5, 16\), in the file \(3, 16\)"):
        match(module, weights)
    found = match(module, weights, "net.model")
    assert found.untouched == ["net.score.weight"] and found.file_prefix == "model."


def test_two_models_with_little_in_common_are_not_for_each_other() -> None:
    with pytest.raises(ValueError, match=r"Tensors alike in .*: 1\.\n  Missing in the file"):
        match(Holder(net=llama(), norm=nn.LayerNorm(7)), {**shapes(gpt2()), "norm.weight": Shape(7)})
    with pytest.raises(ValueError, match="No name with the same shape is in both"):
        match(Holder(net=nn.Linear(3, 4)), shapes(nn.Linear(4, 3, bias=False)))


def test_several_places_that_fit_alike() -> None:
    module = Holder(query=llama("Model"), document=llama("Model"))
    with pytest.raises(ValueError, match=r"several ways: .*for the module's (query|document), or "):
        match(module, shapes(llama("Model")))
    found = match(module, shapes(llama("Model")), "document")
    assert found.module_prefix == "document." and all(name.startswith("document.") for name in found.names)
    assert all(name.startswith("query.") for name in found.untouched)
    shared = Holder(one=module.query, two=module.query)
    assert set(match(shared, shapes(llama("Model"))).names) == set(shared.state_dict())


def test_of_layers_alike_the_one_with_the_name() -> None:
    weights = shapes(llama())
    module = Holder(model=llama("Model"))
    found = match(module, weights, "model.layers.1.mlp")
    assert found.file_prefix == "model.layers.1.mlp." and len(found.names) == 3
    with pytest.raises(ValueError, match="several ways"):
        match(Holder(mlp=module.model.layers[0].mlp), weights, "mlp")


def test_a_submodule_is_filled_as_a_whole() -> None:
    module = Holder(net=llama("ForSequenceClassification"))
    assert match(module, shapes(llama())).module_prefix == "net.model."
    with pytest.raises(ValueError, match=r"Missing in the file \(1\): net.score.weight"):
        match(module, shapes(llama()), "net")


def test_a_submodule_that_is_not_there() -> None:
    with pytest.raises(ValueError, match=r"names 'encoder', .* It has head, net \(2\)"):
        match(Holder(net=llama(), head=nn.Linear(2, 2)), shapes(llama()), "encoder")


def test_what_people_are_told() -> None:
    weights = {**shapes(llama("Model"), "model."), "lm_head.weight": Shape(96, 16)}
    module = Holder(net=llama("Model"), head=nn.Linear(16, 7))
    count = len(llama("Model").state_dict())
    assert match(module, weights).describe() == (
        f"{count} tensors of the module's net from the file's model; as they were: head.weight, head.bias (2); not used of the file: "
        "lm_head.weight (1)"
    )


class Named(nn.Module):
    """A state dict, and nothing else."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = state

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.state


def test_ten_thousand_names_take_no_time() -> None:
    names = [f"layers.{i}.mlp.experts.{e}.w{w}.weight" for i in range(26) for e in range(128) for w in range(3)]
    parameter = nn.Parameter(torch.empty(4, 4, device="meta"))
    state: dict[str, Tensor] = {f"net.{name}": nn.Parameter(parameter.detach()) for name in names}
    state["head.weight"] = nn.Parameter(parameter.detach())
    weights: dict[str, Stored] = {f"model.{name}": Shape(4, 4) for name in names}
    begun = os.times().user
    found = match(Named(state), {**weights, "lm_head.weight": Shape(9, 9)})
    assert os.times().user - begun < 15
    assert found.names == {f"net.{name}": f"model.{name}" for name in names}


# What is refused


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


@pytest.mark.parametrize("kind", ["zip", "old", "pickle", "index"])
def test_a_hostile_file_runs_nothing(kind: str, tmp_path: Path) -> None:
    mark, file = tmp_path / "ran", tmp_path / "x.bin"
    value = {"x": torch.zeros(3), "attack": Attack(mark)}
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"attack": Attack(mark)}, protocol=2))
    else:
        write_torch(value, file, old=kind == "old")
    where = file
    if kind == "index":
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "x.bin"}}))
        where = tmp_path
    with pytest.raises(ValueError) as error:
        open_weights(where)
    message = str(error.value)
    assert str(file) in message and "safetensors.torch.save_file" in message
    assert "weights_only" not in message and not mark.exists()
    if kind != "pickle":
        assert "mkdir" in message
    torch.load(file, weights_only=False) if kind != "pickle" else pickle.loads(file.read_bytes())
    assert mark.exists()  # it would have run


@pytest.mark.parametrize("name", ["../x.safetensors", "{outside}/x.safetensors", "a/../../x.safetensors", ".."])
def test_an_index_that_points_out_of_its_folder(name: str, tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    folder = write_index(tmp_path / "folder", "model.safetensors", save_file)
    (folder / "a").mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": name.format(outside=tmp_path)}}))
    with pytest.raises(ValueError, match=r"index.json names '.*', which is not in its folder"):
        open_weights(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"x": 3}}', "\xff{", "[" * 100_000]
)
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is no index of weights"):
        open_weights(tmp_path)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_missing_shard_and_one_that_lacks_a_tensor(kind: str, tmp_path: Path) -> None:
    save = save_file if kind == "model.safetensors" else torch.save
    folder = write_index(tmp_path / "folder", kind, save)
    shard = folder / f"{kind.partition('.')[0]}-1.{kind.rpartition('.')[2]}"
    save({"other": torch.zeros(3)}, shard)
    with pytest.raises(ValueError, match=rf"{shard.name} does not have layer.weight"):
        open_weights(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=rf"{shard.name} is missing"):
        open_weights(folder)


@pytest.mark.parametrize("kind", ["safetensors", "pt", "old"])
@pytest.mark.parametrize("length", [0, 3, 60, -5])
def test_a_cut_file(kind: str, length: int, tmp_path: Path) -> None:
    file = KINDS[kind](tmp_path)
    file.write_bytes(file.read_bytes()[: length or 0])
    with pytest.raises(ValueError) as error:
        open_weights(file)
    assert str(file) in str(error.value)


def test_safetensors_of_numbers_that_torch_lacks(tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0\0")
    with pytest.raises(ValueError, match=r"x.safetensors has x as F8_E8M0"):
        open_weights(tmp_path / "x.safetensors")


def bad_paths() -> Iterator[tuple[str, Callable[[Path], Any], str]]:
    yield "absent", lambda at: at / "none.safetensors", "There is no file or folder .*none.safetensors.$"
    yield "absent folder", lambda at: at / "none", "There is no file or folder .*none.$"
    yield "relative", lambda at: "runs/none.ckpt", "There is no file or folder runs/none.ckpt.$"
    yield "hub", lambda at: "some-org/Model-7B.v1", "downloaded.* `hf download some-org/Model-7B.v1 --local-dir FOLDER`"
    yield "short hub", lambda at: "a-model", "Nothing is downloaded"
    yield "address", lambda at: "hf://org/name", "`hf download org/name"
    yield "empty folder", lambda at: at, "The folder .* has no weights"
    yield "no tensors", lambda at: write_torch({"lr": 0.1}, at / "x.pt"), "x.pt has no state dict"
    yield "a list", lambda at: write_torch([torch.zeros(2)], at / "x.pt"), "x.pt has no state dict"
    yield "another kind", lambda at: write_torch({}, at / "x.npz"), "x.npz is not read: weights are in .safetensors"


@pytest.mark.parametrize(("make", "message"), [(m, t) for _, m, t in bad_paths()], ids=[n for n, _, _ in bad_paths()])
def test_paths_without_weights(make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_weights(make(tmp_path))


@pytest.mark.parametrize("path", ["hf://org/name", "https://example.com/model.safetensors"])
def test_nothing_is_asked_of_the_network(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "is_sharded", lambda path: pytest.fail("asked"))
    with pytest.raises(ValueError, match="Nothing is downloaded"):
        open_weights(path)


def test_files_without_tensors_and_the_same_name_twice(tmp_path: Path) -> None:
    save_file({}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"a.safetensors has no tensors"):
        open_weights(tmp_path / "a.safetensors")
    for name in "bc":
        save_file({"x": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"c.safetensors has x, as another"):
        open_weights(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "x.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match=r"pip install 'lightning-partrain\[pretrained\]'"):
        open_weights(tmp_path / "x.safetensors")
    assert pretrained.OPENERS


def test_the_models_of_the_other_tests_fit_themselves() -> None:
    for kind in ("llama", "gpt2"):
        found = match(HuggingFace(kind), shapes(HuggingFace(kind)))
        assert (found.module_prefix, found.file_prefix) == ("", "")
