"""The parts of a pipeline alone: cutting batches, joining outputs, finding units, choosing a cut, following sources."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_partrain.parallel.pipeline import batch
from lightning_partrain.parallel.pipeline.cut import Flow, choose_cut, extend_cut, parameter_stages
from lightning_partrain.parallel.pipeline.record import record
from lightning_partrain.parallel.pipeline.units import CannotCutError, block_lists, find_units

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Sample:
    x: Tensor
    name: str


def test_batches_are_cut_along_dimension_0() -> None:
    x = torch.arange(10).view(5, 2)
    whole = {
        "x": x, "pair": (x, [x, None]), "point": Point(x, 1.5), "record": Sample(x, "one"), "scalar": torch.tensor(3),
        "strings": list("abcde"), "other": ["p", "q"], "per_sample": [{"boxes": torch.ones(i, 4)} for i in range(5)],
        "mapping": UserDict(x=x), "flag": True,
    }  # fmt: skip
    assert batch.batch_size(whole) == 5
    sizes = batch.micro_batch_sizes(5, 2)
    assert sizes == [3, 2]
    first, second = batch.split(whole, sizes)
    assert torch.equal(first["x"], x[:3]) and torch.equal(second["pair"][1][0], x[3:])
    assert second["pair"][1][1] is None and isinstance(first["point"], Point) and first["point"].y == 1.5
    assert torch.equal(second["record"].x, x[3:]) and second["record"].name == "one"
    assert first["strings"] == ["a", "b", "c"] and second["strings"] == ["d", "e"]
    assert first["other"] == ["p", "q"], "no list of samples"
    assert [len(b["boxes"]) for b in second["per_sample"]] == [3, 4]
    assert isinstance(second["mapping"], UserDict) and torch.equal(second["mapping"]["x"], x[3:])
    assert torch.equal(whole["mapping"]["x"], x), "the batch itself is as it was"  # type: ignore[index]
    assert first["flag"] is True and first["scalar"] is whole["scalar"]


def test_outputs_are_joined() -> None:
    sizes = [3, 2]
    outputs: list[Any] = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3, 2), "n": 3, "mean": 0.5, "names": ["a"] * 3, "k": "same", "c": torch.tensor(3)},
        {"loss": torch.tensor(2.0), "rows": torch.zeros(2, 2), "n": 2, "mean": 1.0, "names": ["b"] * 2, "k": "same", "c": torch.tensor(2)},
    ]  # fmt: skip
    joined = batch.join(outputs, sizes)
    assert float(joined["loss"]) == pytest.approx(1.4)
    assert joined["rows"].shape == (5, 2) and joined["n"] == 5 and joined["mean"] == pytest.approx(0.7)
    assert joined["names"] == ["a"] * 3 + ["b"] * 2 and joined["k"] == "same" and int(joined["c"]) == 5
    assert batch.join([None, None], sizes) is None
    for bad in (
        [{"a": 1}, {"b": 1}],
        ["x", "y"],
        [1.0, None],
        [torch.ones(4, dtype=torch.int64), torch.ones(9, dtype=torch.int64)],
    ):
        with pytest.raises(ValueError, match=r"micro-batches|entries"):
            batch.join(bad, sizes)


def test_no_common_first_dimension() -> None:
    with pytest.raises(ValueError, match=r"batch\['a'\]: 2, batch\['b'\]\[0\]: 3"):
        batch.batch_size({"a": torch.ones(2), "b": [torch.ones(3)]})
    with pytest.raises(ValueError, match="no tensor at all"):
        batch.batch_size({"a": 1})
    with pytest.raises(ValueError, match=r"batch\[0\] is a object"):
        batch.batch_size([object()])


class Nested(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.ModuleDict(
            {"layers": nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))}
        )
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.ModuleList([nn.Linear(4, 2)])
        self.unused = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        first = x
        for layer in self.body["layers"]:  # type: ignore[attr-defined]
            x = layer(x) * self.scale
        best = x.argmax(-1)
        return (
            self.head[0](x).sum(-1) + nn.functional.embedding(best, self.embed.weight).detach().sum(-1)
        ).mean() + first.mean()


def test_units_and_blocks() -> None:
    module = Nested()
    assert block_lists(module) == {"body.layers": 3, "body.layers.0": 2, "body.layers.1": 2, "body.layers.2": 2}
    units = {unit.name: unit.block for unit in find_units(module)}
    assert units == {
        "embed": None, "body.layers.0": "body.layers", "body.layers.1": "body.layers", "body.layers.2": "body.layers",
        "head.0": None, "unused": None,
    }  # fmt: skip
    inner = {unit.name: unit.block for unit in find_units(module, "body.layers.1")}
    assert inner["body.layers.1.0"] == "body.layers.1" and inner["body.layers.0"] is None


def test_sources_show_what_crosses_and_what_lives_where() -> None:
    module = Nested()
    units = find_units(module)
    tokens = torch.zeros(4, 3, dtype=torch.int64)
    recording = record(module, units, "training_step", (tokens, 0))
    calls = list(recording.calls)
    assert calls == ["embed", "body.layers.0", "body.layers.1", "body.layers.2", "head.0"]
    cut = choose_cut(calls, units, 3, at=(1, 2))
    assert cut.stages == (("embed", "body.layers.0"), ("body.layers.1",), ("body.layers.2", "head.0"))
    flow = Flow(recording, cut)
    assert [[c.unit for c in crossing] for crossing in flow.crossing] == [
        [],
        ["embed", "body.layers.0"],
        ["embed", "body.layers.1"],
    ]
    assert all(c.gradient for crossing in flow.crossing for c in crossing)
    lives = parameter_stages(module, cut, units, [flow])
    assert lives["embed.weight"] == (0, 2), "also where its weight is looked up by integers, without a gradient"
    assert lives["scale"] == (1, 2), "between the blocks: on the stage of the next"
    assert lives["unused.weight"] == (0,) and lives["head.0.weight"] == (2,)
    assert module.embed.weight.grad is None and not hasattr(module.embed, "_forward")


def test_even_cut_minimizes_the_largest_stage() -> None:
    module = nn.ModuleList(nn.Linear(n, n, bias=False) for n in (8, 2, 2, 2, 6, 2))
    root = nn.Module()
    root.layers = module
    units = find_units(root)
    names = [unit.name for unit in units]
    assert [len(stage) for stage in choose_cut(names, units, 2).stages] == [1, 5]
    assert [len(stage) for stage in choose_cut(names, units, 3).stages] == [1, 3, 2]
    with pytest.raises(CannotCutError, match="needs 7 blocks"):
        choose_cut(names, units, 7)


def test_units_of_another_step_join_the_stage_before_them() -> None:
    module = Nested()
    units = find_units(module)
    cut = choose_cut(["embed", "body.layers.0", "body.layers.1"], units, 2)
    longer = extend_cut(cut, ["embed", "body.layers.0", "body.layers.1", "unused"])
    assert longer.stages[-1][-1] == "unused"
