"""The optimizer's files of all of DeepSpeed's ranks together: parameters and state by name, and groups as torch has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_partrain.checkpoint.deepspeed_flat import (
    File,
    Place,
    as_given,
    joined,
    lay_in_a_row,
    lay_in_parts,
    state_of,
)
from lightning_partrain.checkpoint.torch_file import Unread

#: The option of ``lightning-partrain convert`` that puts frozen parameters into the optimizer's groups.
FROZEN = "--frozen-in-optimizer"
WEIGHTS_ALONE = "Only the weights can be converted: --to safetensors or hf."


@dataclass
class Sharded:
    """What the ranks hold of the parameters in the optimizer, by name.

    Attributes:
        places: of every parameter.
        flats: of each rank, of each flat tensor, its float32 parameters.
        states, groups: of each rank's optimizer, and the groups that are the same on all.
        sizes: numbers in each flat tensor, with and without padding.
        given: names in each flat tensor, in the order of the optimizer.
    """

    files: list[File]
    places: dict[str, Place]
    flats: list[list[Tensor]]
    states: list[Mapping[int, Mapping[str, Any]]]
    groups: list[Mapping[str, Any]] | None
    sizes: list[set[int]]
    given: list[list[str]]

    def weight(self, name: str) -> Unread:
        place = self.places[name]
        flats = [each[place.flat] for each in self.flats]
        return joined(self.files, flats, place, (str(self.files[0].path), "weight", name))

    def optimizer(self, everything: list[str] | None) -> tuple[dict[str, Any], list[list[str]]]:
        """As torch has it, and the parameters' names in each group.

        Args:
            everything: names of all parameters in the module's order, if the group has those that DeepSpeed left out.

        Raises:
            ValueError: for what is not known, and for state that does not go by elements.
        """
        if self.groups is None:
            raise ValueError(
                f"{self.files[0].path.parent} was written with elastic_checkpoint, without options. {WEIGHTS_ALONE}"
            )
        names = [[name for flat in group["params"] for name in self.given[flat]] for group in self.groups]
        if everything is not None:
            names = [_with_frozen(names, everything, self.files[0].path.parent)]
        index = {name: number for number, name in enumerate(name for group in names for name in group)}
        state: dict[int, Any] = {}
        groups = []
        for of_group, group in zip(names, self.groups, strict=True):
            options = self.files[0].plain(
                {k: v for k, v in group.items() if k != "_ds_source_param_group_id"}, "param_groups"
            )
            step = options.pop("step", None)  # where DeepSpeed's FusedAdam counts
            groups.append({**options, "params": [index[name] for name in of_group]})
            for name in of_group:
                place = self.places.get(name)
                held = [] if place is None else [each.get(place.flat, {}) for each in self.states]
                if place is None or not any(held):
                    continue
                values = [each if step is None or "step" in each else {"step": step, **each} for each in held]
                state[index[name]] = state_of(self.files, values, place, name, self.sizes[place.flat])
        return {"state": dict(sorted(state.items())), "param_groups": groups}, names


def _with_frozen(names: list[list[str]], order: list[str], tag: Path) -> list[str]:
    """The names of the only group, with the parameters in their places that DeepSpeed left out."""
    trained = {name for group in names for name in group}
    if len(names) != 1 or [name for name in order if name in trained] != names[0]:
        raise ValueError(
            f"{FROZEN}: the optimizer in {tag} has {len(names)} groups, or its parameters are not in the module's order, and so it is not "
            "known where the frozen ones belong. Give the optimizer of the run that goes on only parameters that require gradients."
        )
    return order


def sharded(files: list[File], model: File) -> Sharded:
    """What the optimizer's files of all ranks say together.

    Args:
        files: one a rank.
        model: the file with the module's state, whose ``param_shapes`` name the parameters.

    Raises:
        ValueError: when they do not fit each other or the module's file.
    """
    inner = [file.value["optimizer_state_dict"] for file in files]
    shapes, third = model.value["param_shapes"], inner[0].get("zero_stage") == 3
    flats = [each["fp32_flat_groups" if third else "single_partition_of_fp32_groups"] for each in inner]
    base = [each["optimizer_state_dict" if third else "base_optimizer_state"] for each in inner]
    places: dict[str, Place] = {}
    sizes: list[set[int]] = []
    given: list[list[str]] = []
    try:
        if any(len(each) != len(shapes) for each in flats):
            raise ValueError(f"ranks have {[len(each) for each in flats]} flat tensors, and there are {len(shapes)}")
        for flat, of_flat in enumerate(shapes):
            counts = [each[flat].numel() for each in flats]
            if third:
                found, size = lay_in_parts(flat, of_flat, len(files))
                if counts != [size] * len(files):
                    offloaded = " (they are offloaded to NVMe, perhaps: not supported)" if not any(counts) else ""
                    raise ValueError(f"flat tensors {flat} have {counts} numbers, and should have {size}{offloaded}")
                order = list(of_flat)
            else:
                found, size, order = _in_a_row(files, inner, flat, of_flat, counts, list(model.value["module"]))
            places.update(found)
            sizes.append({size, *counts})
            given.append(order)
    except ValueError as error:
        raise ValueError(f"{files[0].path.parent}: {error}.") from None
    elastic = isinstance(base[0], list)
    states = [dict(enumerate(each)) if elastic else each["state"] for each in base]
    return Sharded(files, places, flats, states, None if elastic else base[0]["param_groups"], sizes, given)


def _in_a_row(
    files: list[File], inner: list[Any], flat: int, shapes: Mapping[str, Any], counts: list[int], module: list[str]
) -> tuple[dict[str, Place], int, list[str]]:
    """Of a group in stages 1 and 2: where its parameters lie, the size of a partition, and the order in the optimizer."""
    lean = "zero_stage" in inner[0]  # without padding; DeepSpeed's BF16_Optimizer leaves it there
    whole = {count + (each["group_paddings"][flat] if lean else 0) for count, each in zip(counts, inner, strict=True)}
    if len(whole) != 1:
        raise ValueError(f"ranks' partitions of group {flat} have {sorted(whole)} numbers")
    size, paddings = whole.pop(), inner[0].get("param_alignment_paddings")
    found = lay_in_a_row(flat, shapes, paddings[flat] if paddings else [0] * len(shapes), size, len(files))
    order = as_given(list(shapes), len(files), _round_robin(files[0], lean), module)
    if order == list(shapes):
        _compare(found, flat, inner)
    return found, size, order


def _round_robin(file: File, reorders: bool) -> bool | None:
    if not reorders:
        return False
    config = file.value.get("ds_config")
    if not isinstance(config, dict):
        return None
    return bool((config.get("zero_optimization") or {}).get("round_robin_gradients", False))


def _compare(places: Mapping[str, Place], flat: int, inner: list[Any]) -> None:
    """With what the files themselves say of stages 1 and 2, which is wrong for gradients that go round robin (DeepSpeed 0.19)."""
    for rank, each in enumerate(inner):
        said = each.get("param_slice_mappings") or []
        for name, fragment in (said[flat] if flat < len(said) else {}).items():
            here = [(begin, count) for of, begin, count in places[name].parts if of == rank]
            if here != [(fragment.start, fragment.numel)]:
                raise ValueError(f"{name} is at {here} of rank {rank}'s partition, and said to be at {vars(fragment)}")
