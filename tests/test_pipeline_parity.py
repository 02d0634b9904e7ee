"""Contract 1 for pipelines: hard modules on every layout, against one process."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from tests.models import CASES
from tests.pairwise import pairwise, small_by_default
from tests.parity import Run, assert_same_as_one_process, hybrid
from tests.pipeline_models import PIPELINE_CASES

#: (data-parallel ranks, stages)
LAYOUTS = [(1, 2), (1, 3), (1, 4), (2, 2), (2, 4)]

CHOICES: dict[str, list[Any]] = {
    "layout": [*LAYOUTS, (4, 2)],
    "zero_stage": [0, 1, 2, 3],
    "replicas": [1, 2],
    "reduce": ["window", "micro_batch"],
    "accumulate": [1, 3],
    "clip": [None, ("norm", 0.1), ("value", 0.01)],
    "optimizer": ["adamw", "sgd"],
    "schedule": ["1f1b", "gpipe"],
    "micro_batches": ["auto", 4],
    "precision": ["64-true", "32-true"],
    "case": ["llama4", "tied_by_module", "class_token"],
}


def check(row: dict[str, Any]) -> None:
    replicas, stages = row["layout"]
    case = PIPELINE_CASES[row["case"]]
    micro_batches = 4 if case.random else row["micro_batches"]
    oracle = replicas * micro_batches if case.random else None
    run = Run(row["case"], row["precision"], row["optimizer"], row["accumulate"], row["clip"], micro_batches=oracle)
    strategy = hybrid(
        zero_stage=row["zero_stage"],
        data_parallel_replicate_size=row["replicas"] if replicas % row["replicas"] == 0 else 1,
        reduce=row["reduce"],
        pipeline_parallel_size=stages,
        num_microbatches=micro_batches,
        schedule=row["schedule"],
    )
    assert_same_as_one_process(run, replicas * stages, strategy, stages=stages)


def label(row: dict[str, Any]) -> str:
    clip = row["clip"][0] if row["clip"] else "none"
    return (
        f"{row['case']}-dp{row['layout'][0]}pp{row['layout'][1]}-zero{row['zero_stage']}x{row['replicas']}-{row['reduce']}"
        f"-acc{row['accumulate']}-clip_{clip}-{row['optimizer']}-{row['schedule']}-m{row['micro_batches']}-{row['precision'][:2]}"
    )


def models(layouts: list[tuple[int, int]], accumulate: list[int]) -> list[dict[str, Any]]:
    """Every module on each of ``layouts``, with the other choices in turn."""
    rows = []
    for number, (name, layout, window) in enumerate(itertools.product(PIPELINE_CASES, layouts, accumulate)):
        if name == "batch_norm_net":
            layout = (1, layout[1])  # data-parallel ranks have statistics of their own
        others = {
            key: values[number % len(values)] for key, values in CHOICES.items() if key not in ("reduce", "replicas")
        }
        optimizer = "sgd" if name in ("batch_norm_net", "gemma2") else others["optimizer"]
        rows.append(
            {
                **others, "case": name, "layout": layout, "accumulate": window, "optimizer": optimizer,
                "reduce": "window", "replicas": 1, "precision": "64-true",
            }
        )  # fmt: skip
    return rows


def one_layout_each() -> list[dict[str, Any]]:
    """Of up to four ranks."""
    small = [layout for layout in LAYOUTS if math.prod(layout) <= 4]
    every = models(small, [1, 3])
    each = 2 * len(small)
    return [every[each * number + (3 * number) % each] for number in range(len(PIPELINE_CASES))]


@pytest.mark.parametrize(
    "row", [*small_by_default(pairwise(CHOICES), lambda row: math.prod(row["layout"])), *one_layout_each()], ids=label
)
def test_same_as_one_process(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", models(LAYOUTS, [1, 3]), ids=label)
def test_every_module_on_every_layout(row: dict[str, Any]) -> None:
    check(row)


@pytest.mark.parametrize("case", ["gpt", "encoder", "odd", "tied", "llama"])
def test_modules_of_the_data_parallel_table(case: str) -> None:
    assert case in CASES
    strategy = hybrid(zero_stage=1, pipeline_parallel_size=2)
    assert_same_as_one_process(Run(case, accumulate=3, clip=("norm", 0.1)), 4, strategy, stages=2)


@pytest.mark.parametrize(("micro_batches", "stages"), [(5, 3), (3, 2), (1, 2), (7, 1)])
def test_uneven_micro_batches_weigh_by_their_size(micro_batches: int, stages: int) -> None:
    strategy = hybrid(zero_stage=0, pipeline_parallel_size=stages, num_microbatches=micro_batches, schedule="gpipe")
    assert_same_as_one_process(Run("class_token"), stages, strategy, stages=stages)
