"""What compressed gradients gain on a slow link.

``python -m benchmarks.comm`` measures two things and multiplies them. ``--part curves``: the loss of each row as it trains, by seed, on
two ranks and the loopback. ``--part speed``: seconds and bytes of a step, on hosts with links of 100 Mbit/s and 1 Gbit/s, which are network
namespaces of this machine (needs root and iproute2), one core a rank. ``--part report``: how soon, and with how many bytes, each row is at
the loss that ``ddp`` has after 500 steps; tables, JSON and two plots. What was measured is kept and not measured again.

"compute" is a step of the same ranks at the same time without any communication. "/ ideal" is the step beside computing plus the row's own
bytes, with the headers of frames, at the rate of the link.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.comm.measure import Link, curves, say, speeds
from benchmarks.comm.plots import plot
from benchmarks.comm.product import Curves, loss_rows, markdown, speed_of, speed_rows
from benchmarks.comm.rows import ALONE, select
from benchmarks.comm.store import Store
from benchmarks.comm.train import RANKS, Work, read_text
from benchmarks.common import RESULTS, machine

PARTS = ("curves", "speed", "report")
PLOTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
SMOKE_ROWS = ["ddp", "torch PowerSGD", "ddp_int8", "ddp_powersgd"]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.comm", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=PARTS, action="append", help="all without")
    parser.add_argument("--rows", default="", help="names, separated by commas; all without")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=600, help="of a loss curve: more than 500, for rows that are a little later"
    )
    parser.add_argument("--target-step", type=int, default=500, help="of ddp, whose loss is to be reached")
    parser.add_argument("--every", type=int, default=25, help="steps between two validation losses")
    parser.add_argument("--timed-steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    for name, value in asdict(Work()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(value), default=value, help="of the model and its batches"
        )
    parser.add_argument("--again", action="store_true", help="measure anew what has been measured")
    parser.add_argument("--smoke", action="store_true", help="a little of everything, in about a minute, kept nowhere")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--plots", type=Path, default=PLOTS)
    return parser.parse_args()


def main() -> None:
    options = parse()
    work = Work(**{name: getattr(options, name) for name in asdict(Work())})
    links = [
        Link(2, 100, options.rounds),
        Link(2, 1000, options.rounds),
        Link(4, 100, 1),
        Link(2, None, options.rounds),
    ]
    names = [name.strip() for name in options.rows.split(",") if name.strip()]
    if options.smoke:
        work, names, links = Work(2, 96, 4), names or SMOKE_ROWS, [Link(2, 100, 1)]
        options.seeds, options.steps, options.target_step, options.every, options.timed_steps = 1, 60, 40, 20, 10
        options.results = options.plots = Path(tempfile.mkdtemp(prefix="comm_smoke_"))
    if options.target_step % options.every:
        raise SystemExit(f"--target-step {options.target_step} must be a multiple of --every {options.every}.")
    rows, parts = select(names), options.part or PARTS
    for signalled in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signalled, lambda number, _: sys.exit(128 + number))  # hosts are removed on the way out
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.set_num_threads(1)  # threads do not survive a fork

    work_settings = {**asdict(work), "parameters": work.parameters()}
    seen = {"ranks": RANKS, "steps": options.steps, "every": options.every, "target_step": options.target_step}
    loss_store = Store(options.results / "comm_curves.json", work_settings | seen)
    speed_store = Store(options.results / "comm_speed.json", work_settings | {"timed_steps": options.timed_steps})
    text, skipped = read_text(work.context), []
    say(f"{work_settings['parameters']} parameters, {work.batch} windows of {work.context} bytes a rank")
    if "speed" in parts:
        skipped = speeds(speed_store, rows, links, work, text, options.timed_steps, options.again)
    if "curves" in parts:
        curves(
            loss_store,
            rows,
            options.seeds,
            work,
            text,
            options.steps,
            options.every,
            options.target_step,
            options.again,
        )
    if "report" in parts:
        seen_curves = Curves(loss_store.measured, options.seeds, options.every, options.target_step)
        report: dict[str, Any] = {"machine": machine(), "skipped": skipped, "loss": loss_rows(rows, seen_curves)}
        print(f"\nLoss after {options.target_step} steps, {options.seeds} seeds\n\n{markdown(report['loss'])}")
        for link in links:
            report[link.name] = speed_rows(rows, seen_curves, speed_store.measured, link)
            if report[link.name]:
                print(f"\n{link.name}: {dense_to_compute(speed_store, link, work_settings['parameters'])}\n")
                print(markdown(report[link.name]))
        options.results.mkdir(parents=True, exist_ok=True)
        (options.results / "comm.json").write_text(json.dumps(report, indent=2) + "\n")
        for file in plot(rows, seen_curves, speed_store.measured, links[0], options.plots):
            print(file)


def dense_to_compute(store: Store, link: Link, parameters: int) -> str:
    """How slow the link is for this model."""
    alone = speed_of(store.measured, link, ALONE)
    if alone is None or link.rate is None:
        return f"{parameters} parameters"
    dense = 2 * (link.hosts - 1) / link.hosts * 4 * parameters * 8e-6 / link.rate
    return f"an exact average takes {dense:.3f} s, {dense / alone.seconds:.1f} times what a rank computes"


if __name__ == "__main__":
    main()
