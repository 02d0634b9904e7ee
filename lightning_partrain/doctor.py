"""What this machine has for training, and what is broken: ``lightning-partrain doctor``.

A section of the report is one function in :data:`SECTIONS` that yields its lines.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_partrain import compat
from lightning_partrain.cli import PROGRAM, fail
from lightning_partrain.parallel.deepspeed import ops

ENGINES = ("deepspeed", "fairscale", "torchao", "torchft")


@dataclass(frozen=True)
class Line:
    """A line of the report; ``broken`` when something is that ends runs, and is said again at the end."""

    label: str
    text: str
    broken: bool = False


def install(extra: str) -> str:
    return f'pip install "{PROGRAM}[{extra}]"'


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def software() -> Iterator[Line]:
    yield Line("python", f"{platform.python_version()} ({sys.executable})")
    yield Line("platform", f"{platform.platform()}, {os.cpu_count()} CPUs")
    for package in (PROGRAM, "torch", "lightning"):
        yield Line(package, _version(package) or "not installed as a package")


def engines() -> Iterator[Line]:
    for name in ENGINES:
        yield Line(name, _version(name) or f"not installed: {install(name)}")


def devices() -> Iterator[Line]:
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        yield Line(f"GPU {index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if not count:
        yield Line("devices", "CPU only: torch finds no GPU")


def compilers() -> Iterator[Line]:
    cxx, cuda = compat.extension_compilers()
    yield Line("C++ compiler", cxx or f"none: DeepSpeed cannot build its ops. {ops.TOOLS}")
    if torch.cuda.is_available():
        yield Line("CUDA toolkit", cuda or "none: DeepSpeed cannot build its fused Adam for GPUs")


def deepspeed_ops() -> Iterator[Line]:
    if _version("deepspeed") is None:
        return
    try:
        states = [ops.state_of(op) for op in wanted_ops()]
    except Exception as error:
        yield Line("deepspeed", f"is installed, but fails: {type(error).__name__}: {error}", broken=True)
        return
    for state in states:
        label, where = f"op {state.name}", f"in {state.folder}" if state.folder else "with DeepSpeed"
        if state.stale:
            text = f"a build was killed and left its lock {state.lock}, for which DeepSpeed waits for ever: {ops.DOCTOR} removes it"
            yield Line(label, text, broken=True)
        elif state.lock is not None:
            yield Line(label, f"being built or loaded by another process {where}")
        else:
            yield Line(label, f"built {where}" if state.built else f"not built yet: {ops.DOCTOR}")


SECTIONS: tuple[Callable[[], Iterator[Line]], ...] = (software, engines, devices, compilers, deepspeed_ops)


def wanted_ops() -> list[str]:
    """Builders of DeepSpeed's ops for this machine: what its ranks load, and for GPUs its Adams, the offloaded one too."""
    device = ops.device_type()
    fused = device == "cuda" and compat.extension_compilers()[1] is not None
    return ops.needed_ops(device, cpu_adam=device != "cpu", fused_adam=fused)


def report() -> int:
    """Print what there is; returns the exit code: 1 when something is broken."""
    lines = [line for section in SECTIONS for line in section()]
    width = max(len(line.label) for line in lines)
    for line in lines:
        print(f"{line.label:<{width}}  {line.text}")
    broken = [line for line in lines if line.broken]
    for line in broken:
        fail(f"{line.label}: {line.text}")
    return 1 if broken else 0


def build_deepspeed() -> int:
    """Remove what a killed build left, and build DeepSpeed's ops for this machine; returns the exit code."""
    if _version("deepspeed") is None:
        return fail(f"DeepSpeed is not installed: {install('deepspeed')}", 1)
    say = partial(print, flush=True)
    try:
        for op in wanted_ops():
            if (lock := ops.remove_stale_lock(op)) is not None:
                say(f"removed {lock}, which a build that was killed had left")
            ops.build(op, say)
            say(f"{ops.state_of(op).name}: ready")
    except (RuntimeError, OSError, ImportError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    return 0


def _end(number: int, frame: Any) -> None:
    sys.exit(128 + number)


def run(arguments: list[str]) -> int:
    """``doctor`` reports; ``doctor --build-deepspeed`` builds DeepSpeed's ops ahead of the first run."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} doctor",
        description="Say what this machine has for training, and what is broken; the exit code is 1 then.",
    )
    parser.add_argument(
        "--build-deepspeed",
        action="store_true",
        help="build DeepSpeed's C++ ops now, which takes minutes, and not in the first run; removes the lock of a build that was "
        "killed. They go where TORCH_EXTENSIONS_DIR says, or into torch's folder in ~/.cache",
    )
    if not parser.parse_args(arguments[1:]).build_deepspeed:
        return report()
    before = signal.signal(signal.SIGTERM, _end)  # by default it would leave the lock
    try:
        return build_deepspeed()
    finally:
        signal.signal(signal.SIGTERM, before)
