"""What Lightning collects for a checkpoint, taken apart into tensors by name and the rest, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

from lightning_partrain.checkpoint.stored import Everyone, Reader, StoredTensor
from lightning_partrain.parallel.placement import Entry, whole_of


class Lazy(MutableMapping[Any, Any]):
    """A dictionary whose values are made when they are asked for.

    :meth:`get_stored` gives the tensor that is not read yet.
    """

    def __init__(self, makers: Mapping[Any, Callable[[], Any]]) -> None:
        self._makers: dict[Any, Callable[[], Any]] = dict(makers)

    def __getitem__(self, key: Any) -> Any:
        value = self._makers[key]()
        return whole_of(value) if isinstance(value, StoredTensor) else value

    def __setitem__(self, key: Any, value: Any) -> None:
        self._makers[key] = lambda: value

    def __delitem__(self, key: Any) -> None:
        del self._makers[key]

    def __contains__(self, key: Any) -> bool:  # a mapping's own would read the value
        return key in self._makers

    def __iter__(self) -> Iterator[Any]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def get_stored(self, key: Any) -> Any:
        return self._makers[key]()


def stored_in(state: Mapping[Any, Any], key: Any) -> Any:
    """``state[key]``, not read yet where that is possible."""
    return state.get_stored(key) if isinstance(state, Lazy) else state[key]


def take_apart(checkpoint: dict[str, Any]) -> tuple[dict[str, Entry], dict[str, Any]]:
    """What Lightning has collected, as tensors of which ranks hold pieces, by name, and the rest."""
    entries: dict[str, Entry] = {}
    rest = dict(checkpoint)
    state = rest.pop("state_dict", {})
    for name, value in state.items():
        if isinstance(value, Entry):
            entries[f"model.{name}"] = value
    rest["state_dict"] = {name: None if isinstance(value, Entry) else value for name, value in state.items()}
    optimizers = []
    for number, optimizer in enumerate(rest.pop("optimizer_states", [])):
        plain: dict[int, dict[str, Any]] = {}
        for index, values in optimizer.get("state", {}).items():
            plain[index] = {key: value for key, value in values.items() if not isinstance(value, Entry)}
            entries.update(
                {
                    f"optimizer.{number}.{index}.{key}": value
                    for key, value in values.items()
                    if isinstance(value, Entry)
                }
            )
        optimizers.append({**optimizer, "state": plain} if "state" in optimizer else optimizer)
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = optimizers
    return entries, _elsewhere(rest, "other", entries)


def merge(rest: dict[str, Any], everyone: Everyone) -> None:
    """Add what other ranks have of the plain values in optimizer states, such as counts of steps on other stages. Collective."""
    own = [optimizer.get("state", {}) for optimizer in rest.get("optimizer_states", [])]
    plain = [{str(index): values for index, values in state.items() if values} for state in own]
    for states in everyone(plain):
        for state, more in zip(own, states, strict=True):
            for index, values in more.items():
                mine = state.setdefault(int(index), {})
                mine.update({key: value for key, value in values.items() if key not in mine})


_PLACE = "lightning_partrain tensor"


def _elsewhere(value: Any, name: str, entries: dict[str, Entry]) -> Any:
    """``value`` with the names of tensors in it, which a hook has put there, in their places."""
    if isinstance(value, Entry):
        entries[name] = value
        return {_PLACE: name}
    if type(value) is dict:
        return {key: _elsewhere(each, f"{name}.{key}", entries) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_elsewhere(each, f"{name}.{number}", entries) for number, each in enumerate(value))
    return value


def _back(value: Any, reader: Reader) -> Any:
    if type(value) is dict:
        if value.keys() == {_PLACE}:
            return reader.whole(value[_PLACE])
        return {key: _back(each, reader) for key, each in value.items()}
    return type(value)(_back(each, reader) for each in value) if type(value) in (list, tuple) else value


def put_together(reader: Reader, weights_only: bool = True) -> dict[str, Any]:
    """A checkpoint as Lightning has it, whose tensors are read when they are asked for."""
    checkpoint = _back(reader.rest(weights_only), reader)
    stored = checkpoint["state_dict"]
    makers = {name: partial(reader.stored, f"model.{name}") for name in reader.names("model.")}
    checkpoint["state_dict"] = Lazy({name: makers.get(name, partial(stored.get, name)) for name in stored})
    for number, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        if "state" not in optimizer:
            continue
        keys: dict[int, list[str]] = {index: [] for index in optimizer["state"]}
        for name in reader.names(f"optimizer.{number}."):
            index, _, key = name.partition(".")
            keys.setdefault(int(index), []).append(key)

        def values(index: int, number: int = number, keys: Any = keys, plain: Any = optimizer["state"]) -> Lazy:
            found: dict[str, Callable[[], Any]] = {
                key: partial(lambda value: value, value) for key, value in plain.get(index, {}).items()
            }
            found.update({key: partial(reader.stored, f"optimizer.{number}.{index}.{key}") for key in keys[index]})
            return Lazy(found)

        optimizer["state"] = Lazy({index: partial(values, index) for index in sorted(keys)})
    return checkpoint
