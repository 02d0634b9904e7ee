"""Contract 1: the numbers of one process, over a table of layouts that covers every pair of choices."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.models import CASES
from tests.pairwise import pairwise, small_by_default
from tests.parity import Run, assert_same_as_one_process, hybrid

CHOICES: dict[str, list[Any]] = {
    "ranks": [2, 4, 8],
    "zero_stage": [0, 1, 2, 3],
    "replicas": [1, 2],
    "reduce": ["window", "micro_batch"],
    "accumulate": [1, 3],
    "clip": [None, ("norm", 0.1), ("value", 0.01)],
    "optimizer": ["adamw", "sgd"],
    "precision": ["64-true", "32-true"],
    "case": list(CASES),
}


#: Every model with every stage; by default each with two of them.
MODELS_BY_STAGE = [
    pytest.param(
        {
            **{name: values[0] for name, values in CHOICES.items()},
            "case": case,
            "zero_stage": stage,
            "ranks": 2 + 2 * (stage % 2),
            "accumulate": 3,
        },
        marks=pytest.mark.slow if (number + stage) % 2 else (),
    )
    for number, case in enumerate(CASES)
    for stage in CHOICES["zero_stage"]
]


def check(row: dict[str, Any]) -> None:
    if row["case"] == "batch_norm" and row["precision"] == "32-true":
        # AdamW turns the rounding noise of a bias before a batch norm into steps of its own, which shift running means
        row = {**row, "optimizer": "sgd"}
    run = Run(row["case"], row["precision"], row["optimizer"], row["accumulate"], row["clip"])
    strategy = hybrid(zero_stage=row["zero_stage"], data_parallel_replicate_size=row["replicas"], reduce=row["reduce"])
    assert_same_as_one_process(run, row["ranks"], strategy)


def label(row: dict[str, Any]) -> str:
    clip = row["clip"][0] if row["clip"] else "none"
    return (
        f"{row['case']}-dp{row['ranks']}x{row['replicas']}-zero{row['zero_stage']}-{row['reduce']}-acc{row['accumulate']}"
        f"-clip_{clip}-{row['optimizer']}-{row['precision'][:2]}"
    )


@pytest.mark.parametrize(
    "row", [*small_by_default(pairwise(CHOICES), lambda row: row["ranks"]), *MODELS_BY_STAGE], ids=label
)
def test_same_as_one_process(row: dict[str, Any]) -> None:
    check(row)


def full_cross() -> list[dict[str, Any]]:
    """Every layout with every way to step on the odd sizes, and every model on every stage."""
    layouts = {**CHOICES, "case": ["odd"], "precision": ["64-true"]}
    models = {
        **CHOICES,
        "ranks": [2, 4],
        "replicas": [1],
        "clip": [("norm", 0.1)],
        "reduce": ["window"],
        "optimizer": ["adamw"],
    }
    return [
        dict(zip(cross, values, strict=True))
        for cross in (layouts, models)
        for values in itertools.product(*cross.values())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("row", full_cross(), ids=label)
def test_full_cross(row: dict[str, Any]) -> None:
    check(row)
