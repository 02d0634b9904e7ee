"""Where the numbers of a model come from that has none yet, or not the right ones: each rank gets those of its part only.

A model is born without numbers under ``trainer.init_module(empty_init=True)`` or on the meta device. It gets those of its own
initialisation, of files (``load_pretrained``), or of the run before, whose ranks hold them still; a checkpoint goes before all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_partrain.checkpoint.pretrained import match, open_weights
from lightning_partrain.checkpoint.stored import Everyone
from lightning_partrain.parallel import deferred
from lightning_partrain.parallel.hollow import is_hollow, is_touched, replace_meta
from lightning_partrain.parallel.materialize import fill_attributes, initial_values
from lightning_partrain.parallel.placement import Entry, Piece, Stored, whole_of
from lightning_partrain.parallel.replicate import ReplicatedModel

#: Types of numbers that can be asked whether they are any.
_WITH_NAN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Pretrained = str | dict[str, str] | None
Maker = Callable[[], Tensor | Stored]

#: What this rank holds of models that stay in pieces between runs.
_HELD: WeakKeyDictionary[nn.Module, dict[str, Entry]] = WeakKeyDictionary()

#: The ``load_pretrained`` of which models have had the numbers last.
_PRETRAINED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def check_pretrained(value: Pretrained) -> None:
    """Raises ValueError for what can be no ``load_pretrained``."""
    paths = value.values() if isinstance(value, Mapping) else [value]
    if value is not None and not (paths and all(isinstance(path, str) and path for path in paths)):
        raise ValueError(
            f"load_pretrained={value!r} must be a path, or a mapping from submodules to paths such as {{'model.backbone': 'path'}}."
        )


def hold(module: nn.Module, state: Mapping[str, object]) -> None:
    """Keep what this rank holds of ``module``, on the host, for its next run and for checkpoints until then."""
    _HELD[module] = {
        name: Entry(entry.shape, entry.dtype, [Piece(p.offsets, p.tensor.detach().cpu()) for p in entry.pieces])
        for name, entry in state.items()
        if isinstance(entry, Entry)
    }


def held(module: nn.Module) -> dict[str, Entry]:
    """What :func:`hold` has kept."""
    return _HELD.get(module, {})


class _HeldTensor:
    """The pieces that this rank has of a tensor: for the same layout."""

    def __init__(self, name: str, entry: Entry) -> None:
        self._name, self._pieces = name, entry.pieces
        self.shape, self.dtype = entry.shape, entry.dtype

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        for piece in self._pieces:
            here = list(zip(piece.offsets, piece.tensor.shape, offsets, sizes, strict=True))
            if all(a <= b and b + m <= a + n for a, n, b, m in here):
                return piece.tensor[tuple(slice(b - a, b - a + m) for a, _, b, m in here)]
        raise ValueError(
            f"{self._name!r} lies in pieces on the ranks, as the layout of the run before had it, and this run has another. Save a checkpoint "
            "after that run, and give it as ckpt_path."
        )


class InitialValues:
    """Of one module, for one run.

    Args:
        module: before precision, device and layout change it. Parameters on the meta device are replaced by hollow ones, buffers
            without numbers get theirs.
        pretrained: the strategy's ``load_pretrained``.
        from_first: gives rank 0's tensor of bytes. Collective.
        everyone: what all ranks gave it.

    Raises:
        ValueError: for a tensor that nothing gives numbers to, and for weights that do not suit; see :func:`match`.
    """

    def __init__(
        self, module: nn.Module, pretrained: Pretrained, from_first: Callable[[Tensor], Tensor], everyone: Everyone
    ) -> None:
        self._module = module
        before = {name: is_hollow(p) for name, p in module.named_parameters()}
        self._refuse_touched()
        makers = self._makers(from_first, everyone)
        replace_meta(module)
        for name, buffer in module.named_buffers():
            if name in makers:
                buffer.data = whole_of(makers[name]())
        fill_attributes(module)
        self.held = set(held(module))
        for name, entry in held(module).items():
            if before.get(name) and name not in makers:
                makers[name] = partial(_HeldTensor, name, entry)
        names: dict[Tensor, list[str]] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(name)
        self.born = [aliases[0] for aliases in names.values() if aliases[0] in makers]
        self._lost = [name for name, without in before.items() if without and name not in makers]
        self._pretrained = "" if pretrained is None else repr(pretrained)
        files = self._files(pretrained)
        self._values: dict[str, Maker] = {name: maker for name, maker in files.items() if name not in before}
        for name, *aliases in names.values():
            found = next((files[each] for each in (name, *aliases) if each in files), makers.get(name))
            if found is not None:
                self._values[name] = found

    def _makers(self, from_first: Callable[[Tensor], Tensor], everyone: Everyone) -> dict[str, Maker]:
        """Those of the model's own initialisation, with the random numbers that rank 0 would draw."""
        states = deferred.random_states(self._module)
        digest = hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()
        if len({tuple(each) for each in everyone([len(states), digest])}) > 1:
            deferred.set_random_states(self._module, [from_first(state) for state in states])
        own = torch.get_rng_state()
        common = from_first(own.clone())
        torch.set_rng_state(common)
        makers: dict[str, Maker] = dict(initial_values(self._module))
        if not torch.equal(own, common):
            torch.set_rng_state(own)
        return makers

    def _files(self, pretrained: Pretrained) -> dict[str, Maker]:
        if pretrained is None or _PRETRAINED.get(self._module) == self._pretrained:
            return {}
        found: dict[str, Maker] = {}
        pairs = list(pretrained.items()) if isinstance(pretrained, Mapping) else [(None, pretrained)]
        for submodule, path in sorted(
            pairs, key=lambda pair: len(pair[0] or "")
        ):  # what is for a part goes before the whole
            try:
                weights = open_weights(path)
                matched = match(self._module, weights, submodule)
            except ValueError as error:
                raise ValueError(f"load_pretrained={path!r} cannot be read. {error}") from error
            rank_zero_info(f"Pretrained weights from {path}: {matched.describe()}")
            tensors = self._module.state_dict(keep_vars=True)
            for name, theirs in matched.names.items():
                if weights[theirs].dtype.is_complex and not tensors[name].is_complex():
                    raise ValueError(f"load_pretrained={path!r}: {theirs!r} is complex, and {name!r} is not.")
                found[name] = partial(weights.__getitem__, theirs)
        return found

    def _refuse_touched(self) -> None:
        """Numbers that were written where there are none would be lost."""
        for name, tensor in (*self._module.named_parameters(), *self._module.named_buffers()):
            if is_hollow(tensor) and is_touched(tensor):
                raise ValueError(
                    f"{name!r} was written to while it had no numbers: after the model was built under trainer.init_module(empty_init=True), or "
                    "between the runs of a model that stays in pieces. Do it inside of that block, or in a hook of a run (on_fit_start)."
                )
            plain = type(tensor) is nn.Parameter and tensor.dtype in _WITH_NAN and not tensor.is_meta
            if plain and tensor.numel() and not is_hollow(tensor):
                values = tensor.detach()
                if values[(0,) * tensor.ndim].isnan() and values.isnan().all():
                    raise ValueError(
                        f"{name!r} has no numbers (NaN everywhere): it was copied, moved or converted outside of the block "
                        "trainer.init_module(empty_init=True) that it was built in, or outside of a run. Do it inside of the block; types and "
                        "devices are the Trainer's matter."
                    )

    @torch.no_grad()
    def fill(self, model: ReplicatedModel, elsewhere: Collection[str]) -> None:
        """Give every part its numbers, one tensor after the other, but for those that come from ``elsewhere``.

        Raises:
            ValueError: for parameters that have none.
        """
        lost = [name for name in self._lost if name not in elsewhere]
        if lost:
            raise ValueError(
                f"{len(lost)} parameters have no numbers ({', '.join(lost[:3])}, ...): the model was born in pieces, which its ranks held in an "
                "earlier run only. Give a checkpoint of that run as ckpt_path, or build the model again."
            )
        here = {name: maker for name, maker in self._values.items() if name not in elsewhere}
        model.load_state_dict(here, lambda name: here[name](), strict=False, plainly=True)
        if self._pretrained:
            _PRETRAINED[self._module] = self._pretrained
        _HELD.pop(self._module, None)
        self._values.clear()  # and with them what they keep in memory: files, pieces, numbers that went into them
