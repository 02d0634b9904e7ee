"""Ranks for tests: forked from a parent that has imported torch and lightning, killed when they take too long.

`run_ranks(n, function)` runs `function(rank)` in n processes that look to Lightning as if torchrun-like tools had started
them, and returns what each returned. `assert_same_as_one_process` is the oracle of the whole project.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

TIMEOUT = 90.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RankFailure(AssertionError):  # noqa: N818
    """Some ranks failed or were killed; `reports` has each rank's output, `codes` their exit codes, `seconds` the time."""

    def __init__(self, message: str, reports: list[str], codes: list[int | None], seconds: float) -> None:
        super().__init__(message)
        self.reports, self.codes, self.seconds = reports, codes, seconds


def run_ranks(
    ranks: int, function: Callable[[int], Any], timeout: float = TIMEOUT, environment: dict[str, str] | None = None
) -> list[Any]:
    """Run ``function(rank)`` on forked ranks and return their results, in order.

    Raises:
        RankFailure: when a rank raised, died, or ``timeout`` seconds passed; with all stacks.
    """
    port = str(free_port())
    with tempfile.TemporaryDirectory() as folder:
        pids, start = [], time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        gc.freeze()  # a child must not collect the parent's garbage: its finalizers may wait for threads that did not fork
        for rank in range(ranks):
            pid = os.fork()
            if pid == 0:
                _child(rank, ranks, port, function, Path(folder), environment or {})
            pids.append(pid)
        gc.unfreeze()
        codes = _wait(pids, start + timeout)
        seconds = time.monotonic() - start
        reports = [Path(folder, f"{rank}.log").read_text() for rank in range(ranks)]
        if any(code != 0 for code in codes):
            late = " (timed out; stacks below)" if None in codes else ""
            text = "\n".join(f"----- rank {r}, exit code {codes[r]} -----\n{_short(reports[r])}" for r in range(ranks))
            raise RankFailure(
                f"{ranks} ranks ended with {codes}{late} after {seconds:.1f} s\n{text}", reports, codes, seconds
            )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]


def _short(report: str, lines: int = 40) -> str:
    """The beginning and the end of a report: enough to see where each rank stood when logs are cut."""
    text = report.splitlines()
    return report if len(text) <= 2 * lines else "\n".join([*text[:lines], "  [...]", *text[-lines:]])


def _child(
    rank: int, ranks: int, port: str, function: Callable[[int], Any], folder: Path, extra: dict[str, str]
) -> None:
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        faulthandler.register(signal.SIGUSR2, file=sys.stderr, all_threads=True)
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE=str(ranks),
            NODE_RANK="0",
            LOCAL_RANK=str(rank),
            OMP_NUM_THREADS="1",
            **extra,
        )
        torch.set_num_threads(1)
        result = function(rank)
        torch.save(result, folder / f"{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], deadline: float) -> list[int | None]:
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            waiting = [pid for pid in pids if pid not in codes]
            for pid in waiting:
                os.kill(pid, signal.SIGUSR2)
            time.sleep(0.5)
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
            break
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


def trainer(strategy: Any = "auto", devices: int = 1, **options: Any) -> pl.Trainer:
    """A quiet CPU Trainer for tests."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, devices=devices, **{**defaults, **options})
