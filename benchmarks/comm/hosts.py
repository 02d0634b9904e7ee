"""Hosts on one machine: network namespaces on a bridge, whose links send at a rate. Nothing of it leaves the machine."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import run_ranks

PREFIX = "partrain"
NETWORK = "10.77.0"
INTERFACE = "eth0"
#: Ethernet, IPv4, and TCP with time stamps: in every frame of the interface's count.
HEADERS = 14 + 20 + 32
NAMESPACES = Path("/run/netns")
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1


class Skip(Exception):  # noqa: N818
    """These hosts cannot be made here; says why."""


@dataclass(frozen=True)
class Sent:
    """Bytes that an interface has sent: of whole frames, and of what they carry."""

    frames: int = 0
    payload: int = 0

    def since(self, before: Sent) -> Sent:
        return Sent(self.frames - before.frames, self.payload - before.payload)


def sent() -> Sent:
    """By the interface of the host that this process is on, since it exists; zeros on the loopback, which all ranks share."""
    if os.environ.get("GLOO_SOCKET_IFNAME") != INTERFACE:
        return Sent()
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == INTERFACE:
            size, packets = (int(count) for count in counts.split()[8:10])
            return Sent(size, size - HEADERS * packets)
    raise RuntimeError(f"This host has no {INTERFACE}.")


class Loopback:
    """Ranks side by side, one core each, without any host: the fastest link, which needs no rights."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __enter__(self) -> Loopback:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, function: Callable[[int], Any], timeout: float = 600.0) -> list[Any]:
        """``function(rank)`` on one forked rank a host, which Lightning takes for a node of one device; the results in order.

        Raises:
            RankFailure: when a rank raised, died or was late.
        """
        parent = os.getpid()

        def on_host(rank: int) -> Any:
            _libc("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                raise RuntimeError("The benchmark is gone.")
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
            os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0")
            self._enter(rank)
            return function(rank)

        return run_ranks(self.count, on_host, timeout)

    def _enter(self, rank: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


class Hosts(Loopback):
    """
    Args:
        count: hosts.
        rate: megabits a second that each may send, and receive; ``None``: as fast as it goes.

    Raises:
        Skip: on entering, where they cannot be made.
    """

    def __init__(self, count: int, rate: int | None) -> None:
        super().__init__(count)
        self.rate = rate
        self._lock = Path(tempfile.gettempdir(), f"{PREFIX}-hosts.lock")

    def __enter__(self) -> Hosts:
        if os.geteuid():
            raise Skip("network namespaces need root.")
        for tool in ("ip", "tc"):
            if not shutil.which(tool):
                raise Skip(f"there is no {tool!r} here, which iproute2 has.")
        self._held = self._lock.open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise Skip(f"another benchmark has the hosts ({self._lock}).") from None
        try:
            remove()  # what an earlier run left that was killed
            self._make()
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise Skip(f"{' '.join(error.cmd)!r} failed: {error.stderr.strip()}") from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            remove()
        finally:
            self._held.close()

    def _make(self) -> None:
        bridge = f"{PREFIX}-br"
        _do("ip", "link", "add", bridge, "type", "bridge")
        _do("ip", "link", "set", bridge, "up")
        for number in range(self.count):
            host, outside = f"{PREFIX}-{number}", f"{PREFIX}-v{number}"
            _do("ip", "netns", "add", host)
            _do("ip", "link", "add", outside, "type", "veth", "peer", "name", INTERFACE, "netns", host)
            _do("ip", "link", "set", outside, "master", bridge, "up")
            _do("ip", "-n", host, "addr", "add", f"{NETWORK}.{number + 1}/24", "dev", INTERFACE)
            _do("ip", "-n", host, "link", "set", "lo", "up")
            _do("ip", "-n", host, "link", "set", INTERFACE, "up")
            if self.rate is not None:  # the outside sends what the host receives
                burst = max(32_000, self.rate * 125)  # bytes, a millisecond
                shape = ["root", "tbf", "rate", f"{self.rate}mbit", "burst", str(burst), "latency", "100ms"]
                _do("tc", "qdisc", "add", "dev", outside, *shape)
                _do("tc", "-n", host, "qdisc", "add", "dev", INTERFACE, *shape)

    def _enter(self, rank: int) -> None:
        """Only this thread, and those that it starts, move to the host."""
        with Path(NAMESPACES, f"{PREFIX}-{rank}").open() as namespace:
            _libc("setns", namespace.fileno(), CLONE_NEWNET)
        os.environ.update(MASTER_ADDR=f"{NETWORK}.1", GLOO_SOCKET_IFNAME=INTERFACE)


def remove() -> None:
    """All hosts of this module, with the processes on them."""
    names = [path.name for path in NAMESPACES.glob(f"{PREFIX}-*")] if NAMESPACES.is_dir() else []
    for name in names:
        for pid in _do("ip", "netns", "pids", name, check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    for path in Path("/sys/class/net").glob(f"{PREFIX}-*"):
        _do("ip", "link", "del", path.name, check=False)
    for name in names:
        _do("ip", "netns", "del", name, check=False)
    left = [str(path) for path in (*NAMESPACES.glob(f"{PREFIX}-*"), *Path("/sys/class/net").glob(f"{PREFIX}-*"))]
    if left:
        raise Skip(f"{', '.join(left)} cannot be removed.")


def _do(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def _libc(name: str, *arguments: int) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}{arguments}: {os.strerror(number)}")
