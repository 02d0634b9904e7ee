"""Covering arrays: few rows in which each two choices stand together at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest


def pairwise(choices: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Rows such that each two choices of different kinds stand together in at least one (greedy, always the same)."""
    names = list(choices)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(choices[a]))
        for y in range(len(choices[b]))
    }
    rows = []
    while missing:
        row: dict[str, int] = {}
        (a, x), (b, y) = min(missing)
        row[a], row[b] = x, y
        for name in sorted(names, key=lambda n: -len(choices[n])):
            if name not in row:
                row[name] = max(
                    range(len(choices[name])),
                    key=lambda i, n=name: sum(
                        tuple(sorted([(n, i), (m, j)], key=lambda c: names.index(c[0]))) in missing
                        for m, j in row.items()
                    ),
                )
        missing -= {((p, row[p]), (q, row[q])) for p, q in itertools.combinations(names, 2)}
        rows.append({name: choices[name][row[name]] for name in names})
    return rows


def small_by_default(rows: list[dict[str, Any]], ranks: Callable[[dict[str, Any]], int]) -> list[Any]:
    """The rows as parameters; of those with eight ranks, which two cores take long for, all but the first are slow, and two of three of
    those with four."""
    large, middle = ([row for row in rows if low <= ranks(row) < high] for low, high in ((8, 1 << 30), (3, 8)))
    slow = [*large[1:], *(row for number, row in enumerate(middle) if number % 3)]
    return [pytest.param(row, marks=pytest.mark.slow if row in slow else ()) for row in rows]
