"""Contract 1 for layers that are cut: (data, tensor, pipeline) layouts against one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.pairwise import pairwise, small_by_default
from tests.parity import Run, assert_same_as_one_process, hybrid
from tests.tensor_models import PLANS, TENSOR_CASES

#: (data-parallel ranks, tensor-parallel ranks, stages)
LAYOUTS = [(1, 2, 1), (2, 2, 1), (1, 4, 1), (1, 2, 2), (2, 2, 2), (4, 2, 1), (2, 4, 1), (1, 4, 2), (1, 2, 4)]

CHOICES: dict[str, list[Any]] = {
    "layout": LAYOUTS[:5],
    "zero_stage": [0, 1, 2, 3],
    "replicas": [1, 2],
    "reduce": ["window", "micro_batch"],
    "accumulate": [1, 3],
    "clip": [None, ("norm", 0.1), ("value", 0.01)],
    "optimizer": ["adamw", "sgd"],
    "precision": ["64-true", "32-true"],
    "case": ["gpt8", "gpt2h4", "encoder8", "mlp"],
}


def check(row: dict[str, Any]) -> None:
    replicas, tensor, stages = row["layout"]
    case = row["case"]
    strategy = hybrid(
        zero_stage=row["zero_stage"],
        data_parallel_replicate_size=row["replicas"] if replicas % row["replicas"] == 0 else 1,
        reduce=row["reduce"],
        tensor_parallel_size=tensor,
        tensor_parallel_plan=PLANS.get(case, "auto"),
        pipeline_parallel_size=stages,
    )
    run = Run(case, row["precision"], row["optimizer"], row["accumulate"], row["clip"])
    assert_same_as_one_process(run, replicas * tensor * stages, strategy, stages=stages, tensor=tensor)


def label(row: dict[str, Any]) -> str:
    clip = row["clip"][0] if row["clip"] else "none"
    dp, tp, pp = row["layout"]
    return (
        f"{row['case']}-dp{dp}tp{tp}pp{pp}-zero{row['zero_stage']}x{row['replicas']}-{row['reduce']}-acc{row['accumulate']}"
        f"-clip_{clip}-{row['optimizer']}-{row['precision'][:2]}"
    )


def models(layouts: list[tuple[int, int, int]]) -> list[dict[str, Any]]:
    """Every module on each of ``layouts``, with the other choices in turn."""
    rows = []
    for number, (case, layout) in enumerate(itertools.product(TENSOR_CASES, layouts)):
        others = {key: values[number % len(values)] for key, values in CHOICES.items()}
        rows.append({**others, "case": case, "layout": layout, "precision": "64-true"})
    return rows


def one_layout_each() -> list[dict[str, Any]]:
    """Of up to four ranks."""
    small = [layout for layout in LAYOUTS if math.prod(layout) <= 4]
    every = models(small)
    return [every[len(small) * number + (3 * number + 3) % len(small)] for number in range(len(TENSOR_CASES))]


@pytest.mark.parametrize(
    "row", [*small_by_default(pairwise(CHOICES), lambda row: math.prod(row["layout"])), *one_layout_each()], ids=label
)
def test_same_as_one_process(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", models([*LAYOUTS, (1, 8, 1)]), ids=label)
def test_every_module_on_every_layout(row: dict[str, Any]) -> None:
    if row["layout"][1] == 8 and row["case"] not in ("gpt8", "encoder8", "mlp"):
        pytest.skip("has fewer than 8 heads")
    if row["layout"][2] == 4 and row["case"] == "fused":
        pytest.skip("has two blocks")
    check(row)
