"""The picture of a run: bits per byte against steps, and the byte models it has to beat."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def column(rows: list[dict[str, str]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a column of CSVLogger's table, which leaves out what was not logged in a row."""
    filled = [row for row in rows if row.get(name)]
    return [int(row["step"]) + 1 for row in filled], [float(row[name]) for row in filled]


def plot_losses(metrics: Path, byte_models: dict[str, float], title: str, files: list[Path]) -> None:
    """Draw the training and validation curves of ``metrics`` (CSVLogger's file) over the lines of ``byte_models``."""
    with metrics.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps, train = column(rows, "train_loss")
    val_steps, val = column(rows, "val_bits_per_byte")
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.plot(
        steps, [nats / math.log(2) for nats in train], color="#9db8d9", linewidth=1, label="training, a batch of rank 0"
    )
    axes.plot(val_steps, val, "o-", color="#1f4e8c", label="validation", clip_on=False, zorder=3)
    for (name, bits), style in zip(byte_models.items(), ("-.", "--", ":"), strict=True):
        axes.axhline(bits, color="#666666", linestyle=style, linewidth=1)
        place: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{name} model\n{bits:.2f}", (1, bits), (6, 0), color="#444444", **place)
    axes.set(xlabel="optimizer step", ylabel="bits per byte", title=title, xlim=(0, max(steps)))
    axes.legend(loc="upper right")
    axes.grid(alpha=0.25)
    for file_name in files:
        file_name.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file_name, dpi=130)
    plt.close(figure)
