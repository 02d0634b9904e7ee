"""Messages between ranks: what goes in comes out, the same on every rank; what cannot is refused everywhere at once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_partrain.sync.messages import broadcast_json, gather_json
from tests.harness import run_ranks

CPU = torch.device("cpu")

VALUES: list[Any] = [
    None,
    "",
    [],
    {},
    0,
    True,
    [-1, 2**70, 0.1, 1e-300, float("inf")],
    {"é 漢字 \U0001f600": '\n\t"\\ \x00'},
    {"a": [{"b": [[1], {"c": None}]}], "d": {"e": {"f": [Path("g")]}}},
    Path("/some where/über.ckpt"),
    "x" * 300_000,
]

REFUSED: list[tuple[Any, str]] = [
    (object(), "object"),
    ({1, 2}, "set"),
    (b"abc", "bytes"),
    (torch.zeros(2), "Tensor"),
    (torch.tensor(1j), "complex"),
    ({"a": [object()]}, "object"),
    ({1: "a"}, "int"),  # JSON would turn the key into text, on the other ranks only
]


def on_ranks(function: Callable[[int], Any], ranks: int = 2) -> list[Any]:
    def run(rank: int) -> Any:
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=10))
        result = function(rank)
        step = torch.ones(1)
        dist.all_reduce(step)  # whatever happened, the ranks are still in step
        assert step == ranks
        return result

    return run_ranks(ranks, run, timeout=30)


def error_of(function: Callable[..., Any], *args: Any) -> str:
    try:
        return f"no error, but {function(*args)!r}"
    except TypeError as error:
        return str(error)


def same(got: Any, expected: Any) -> bool:
    return got == expected and type(got) is type(expected)


def test_broadcast_gives_every_rank_the_value_of_the_source() -> None:
    def each(rank: int) -> list[Any]:
        return [broadcast_json(value if rank == 1 else "another", 1, CPU) for value in VALUES]

    for got in on_ranks(each):
        assert all(map(same, got, VALUES)), got


def test_gather_gives_every_rank_all_values_in_order() -> None:
    def each(rank: int) -> list[Any]:
        return [gather_json(VALUES[(index + rank) % len(VALUES)], CPU) for index in range(len(VALUES))]

    for got in on_ranks(each, ranks=3):
        for index, values in enumerate(got):
            expected = [VALUES[(index + rank) % len(VALUES)] for rank in range(3)]
            assert len(values) == 3 and all(map(same, values, expected)), (index, values)


def test_tuples_and_one_element_tensors_arrive_alike_on_every_rank_also_the_sender() -> None:
    value = {"tuple": (1, (2,)), "tensor": torch.tensor([3.5])}
    expected = {"tuple": [1, [2]], "tensor": 3.5}
    for sent, gathered in on_ranks(lambda _: (broadcast_json(value, 0, CPU), gather_json(value, CPU))):
        assert sent == expected and gathered == [expected, expected]


def test_in_a_group_that_is_not_all_ranks() -> None:
    def each(rank: int) -> Any:
        group = dist.new_group([1, 2])
        return (broadcast_json(rank, 2, CPU, group), gather_json(rank, CPU, group)) if rank else None

    assert on_ranks(each, ranks=3) == [None, (2, [1, 2]), (2, [1, 2])]


def test_what_json_cannot_hold_is_a_type_error_on_every_rank() -> None:
    def each(rank: int) -> list[tuple[str, str]]:
        return [
            (
                error_of(broadcast_json, value if rank == 0 else None, 0, CPU),
                error_of(gather_json, value if rank == 1 else None, CPU),
            )
            for value, _ in REFUSED
        ]

    for errors in on_ranks(each):
        for (sent, gathered), (_, kind) in zip(errors, REFUSED, strict=True):
            assert f"not {kind}" in sent and sent.startswith("Only") and "Rank 0" in sent
            assert f"not {kind}" in gathered and gathered.startswith("Only") and "Rank 1" in gathered
