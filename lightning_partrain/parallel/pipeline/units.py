"""The modules that a stage runs or stands in for as a whole.

A list of layers (``ModuleList`` or ``Sequential`` with at least two members that hold parameters) gives *blocks*, between which
the model may be cut. The modules on the way from the LightningModule to such a list run on every stage; what hangs off that way
and holds parameters (embeddings, norms, heads) is a unit as well, but no place to cut.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import nn


class CannotCutError(ValueError):
    """The step does something that stages on several ranks cannot do; the message says what and the way out."""


@dataclass(frozen=True)
class Unit:
    """``block`` is the name of the list that the unit is a member of, or ``None``."""

    name: str
    module: nn.Module
    block: str | None

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.module.parameters())


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _members(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in module.named_children() if _holds_parameters(child)]


def _is_block_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential)) and len(_members(module)) > 1


def block_lists(root: nn.Module) -> dict[str, int]:
    """Name -> number of members of every list of layers in ``root``."""
    return {name: len(_members(module)) for name, module in root.named_modules() if _is_block_list(module)}


def find_units(root: nn.Module, blocks: str | None = None, opened: Collection[str] = ()) -> list[Unit]:
    """The units of ``root``, in the order of registration.

    Args:
        blocks: the one list whose members are blocks; by default every list that is not inside a block of another.
        opened: names of units that are to be taken apart further, because they hold a list themselves.
    """

    def leads_to_blocks(name: str, module: nn.Module) -> bool:
        if blocks is not None:
            return blocks == name or blocks.startswith(f"{name}.")
        return any(_is_block_list(m) for m in module.modules())

    def visit(prefix: str, module: nn.Module) -> Iterator[Unit]:
        listed = _is_block_list(module) if blocks is None else prefix == blocks
        for key, child in _members(module):
            name = f"{prefix}.{key}" if prefix else key
            block = prefix if listed else None
            container = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            way = leads_to_blocks(name, child) and (not listed or name in opened)
            if container or way:
                yield from visit(name, child)
            else:
                yield Unit(name, child, block)

    seen: set[nn.Module] = set()
    units = []
    for unit in visit("", root):
        if unit.module not in seen:
            seen.add(unit.module)
            units.append(unit)
    return units
