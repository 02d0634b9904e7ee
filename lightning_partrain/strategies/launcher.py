"""Starts the ranks of one machine: by fork where that is safe, by running the script again where it is not.

A forked rank shares the imported libraries and everything that the script has built, so that eight ranks start in a moment
instead of importing torch eight times. As with Lightning's own launcher, every rank goes on with the rest of the script
after the Trainer call in which it was born.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment

from lightning_partrain import native_threads
from lightning_partrain.compat import SubprocessScriptLauncher

GRACE_SECONDS = 5.0


class ForkedProcess:
    """The parent's view of a forked rank, with the part of ``subprocess.Popen`` that launchers use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()  # two threads ask, and the system answers once

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)


class RankLauncher(SubprocessScriptLauncher):
    """Starts ``num_processes - 1`` ranks beside this process, which becomes local rank 0.

    Args:
        cluster_environment, num_processes, num_nodes: as for Lightning's launcher.
        device: the device of this rank; only CPU ranks may be forked.
        on_rank: called in each forked rank once its environment is set.
    """

    def __init__(
        self,
        cluster_environment: ClusterEnvironment,
        num_processes: int,
        num_nodes: int,
        device: torch.device,
        on_rank: Callable[[], None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self.device, self.on_rank = device, on_rank

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        external = self.cluster_environment.creates_processes_externally
        if external or self.why_not_fork() is not None:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._fork()
        return function(*args, **kwargs)

    def threads_per_rank(self) -> int:
        if "OMP_NUM_THREADS" in os.environ:
            return max(1, int(os.environ["OMP_NUM_THREADS"]))
        available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
        return max(1, available // self.num_processes)

    def why_not_fork(self) -> str | None:
        """The reason why ranks have to be started by running the script again, or ``None``."""
        if self.device.type != "cpu":
            return "a process that has used an accelerator cannot be forked"
        if not hasattr(os, "fork") or not native_threads.TASKS.exists():
            return "this system cannot fork safely"
        if threading.active_count() > 1:
            return "other Python threads are running, whose locks a fork would copy"
        if self.threads_per_rank() > 1 and native_threads.count() > native_threads.AT_IMPORT:
            return "a pool of compute threads has been started, which does not survive a fork"
        return None

    def _fork(self) -> None:
        environment = self.cluster_environment
        threads = self.threads_per_rank()
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK="0",
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
            OMP_NUM_THREADS=str(threads),
        )
        sys.stdout.flush()
        sys.stderr.flush()
        torch.set_num_threads(threads)
        parent = os.getpid()
        for local_rank in range(1, self.num_processes):
            pid = os.fork()
            if pid == 0:
                _die_with(parent)
                os.environ["LOCAL_RANK"] = str(local_rank)
                self.procs = []
                torch.set_num_threads(threads)
                self.on_rank()
                return
            self.procs.append(ForkedProcess(pid))  # type: ignore[arg-type]
        threading.Thread(target=_watch, args=(self.procs,), daemon=True, name="rank-observer").start()
        atexit.register(_wait, self.procs)  # type: ignore[arg-type]


def _exit_code(returncode: int) -> int:
    """Of this process, for a rank that ended with ``returncode`` (a negative one names a signal), as a shell has it."""
    return returncode if returncode > 0 else 128 - returncode


def _die_with(parent: int) -> None:
    """Ask Linux to end this process when its parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wait(procs: list[ForkedProcess]) -> None:
    """The end of this process ends the others. Let them finish the script first, unless this one has failed."""
    if hasattr(sys, "last_value"):
        return
    while any(proc.poll() is None for proc in procs):
        time.sleep(0.05)
    failed = next((proc.returncode for proc in procs if proc.returncode), None)
    if failed is not None:
        sys.stdout.flush()
        os._exit(_exit_code(failed))


def _watch(procs: list[ForkedProcess]) -> None:
    """When one rank fails, give the others a moment to end by themselves, then end them and this process."""
    while True:
        codes = [proc.poll() for proc in procs]
        failed = next((code for code in codes if code), None)
        if failed is not None:
            rank = codes.index(failed) + 1
            how = f"was killed by signal {-failed}" if failed < 0 else f"ended with exit code {failed}"
            print(
                f"[local rank {rank}] {how}: the others end within {GRACE_SECONDS:.0f} s", file=sys.stderr, flush=True
            )
            time.sleep(GRACE_SECONDS)
            for proc in procs:
                proc.send_signal(signal.SIGKILL)
            os._exit(_exit_code(failed))
        if all(code == 0 for code in codes):
            return
        time.sleep(0.5)
