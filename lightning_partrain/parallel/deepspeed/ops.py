"""DeepSpeed's C++ ops, which it compiles when they are first used: which are needed, whether they are built, and building them.

While torch builds one there is a file ``lock`` in its folder, and whoever else wants it waits for that file to go. A build
that is killed leaves it, and everybody waits for ever: that is found here, and said.

Every name of DeepSpeed 0.19 that is no documented interface is in :func:`builder_of`, :func:`_came_compiled` and
:func:`_up_to_date`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_partrain import compat

DOCTOR = "lightning-partrain doctor --build-deepspeed"
#: With nobody known to hold it, a lock is taken for left behind at this age.
STALE_SECONDS = 30 * 60.0
_RELEASE_SECONDS = 0.5  # torch closes a lock just before it removes it
_SHARED_DISKS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "wekafs",
    "panfs",
    "fuse.",
)
_POLL_SECONDS = 0.2
_LINES = 15
TOOLS = (
    "It takes a C++ compiler, ninja and the headers of Python: `apt-get install g++ python3-dev` (or what your system has for them) "
    "and `pip install ninja`."
)


@dataclass(frozen=True)
class State:
    """How it stands with one op: ``built`` and up to date as far as files tell, and its ``lock``, if there is one.

    ``folder`` is ``None`` for an op that was compiled when DeepSpeed was installed.
    """

    name: str
    folder: Path | None
    built: bool
    lock: Path | None
    stale: bool


@contextlib.contextmanager
def errors_only() -> Iterator[None]:
    """Within, DeepSpeed's logger has nothing to say below an error: importing it warns of a machine without a GPU."""

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(is_error)
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def device_type() -> str:
    """The type of device that DeepSpeed has chosen in this process (``DS_ACCELERATOR`` overrules it)."""
    with errors_only():
        from deepspeed.accelerator import get_accelerator

        return str(get_accelerator().device_name())


def builder_of(op: str) -> Any:
    """DeepSpeed's builder of the op, by the name of its class, for the device that DeepSpeed has chosen."""
    with errors_only():
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops.op_builder import cpu

        builder = get_accelerator().get_op_builder(op)
        return getattr(cpu, op)() if builder is None else builder()


def needed_ops(device_type: str, cpu_adam: bool = False, fused_adam: bool = False) -> list[str]:
    """Names of the builders of the ops that DeepSpeed loads, without those that this machine cannot have.

    Args:
        device_type: of the ranks, such as ``"cpu"``, whose messages go through shared memory.
        cpu_adam: the optimizer is DeepSpeed's for the CPU: offloaded, or chosen.
        fused_adam: the config of DeepSpeed asks for Adam, and the optimizer is not offloaded.
    """
    wanted = {"ShareMemCommBuilder": device_type == "cpu", "CPUAdamBuilder": cpu_adam, "FusedAdamBuilder": fused_adam}
    return [op for op, needed in wanted.items() if needed and _is_compatible(op)]


def _is_compatible(op: str) -> bool:
    builder = builder_of(op)
    try:
        return bool(builder.is_compatible())
    except Exception:  # DeepSpeed's own probe takes it so, too: no CUDA toolkit, for one
        return False


def state_of(op: str) -> State:
    """How it stands with the op whose builder has the name ``op``; compiles nothing.

    A lock is stale when no process of this machine has it open. Where that cannot be known (not Linux, a disk that other
    machines share, another user's build) it is when it is older than half an hour.

    Raises:
        OSError: the folder for torch's extensions cannot be made (``TORCH_EXTENSIONS_DIR`` says where it is).
    """
    builder = builder_of(op)
    if _came_compiled(builder):
        return State(builder.name, None, True, None, False)
    library, lock = compat.extension_files(builder.name)
    there, stale = lock.exists(), _is_stale(lock)
    built = _up_to_date(builder, library)
    return State(builder.name, library.parent, built, lock if there else None, there and stale)


def _came_compiled(builder: Any) -> bool:
    from deepspeed.git_version_info import accelerator_name, installed_ops

    return bool(installed_ops.get(builder.name, False)) and accelerator_name == device_type()


def _up_to_date(builder: Any, library: Path) -> bool:
    """Linked to the end, with this Python and torch, after the sources and torch were installed."""
    ours = (sysconfig.get_path("include"), str(Path(torch.__file__).parent))
    sources = [Path(builder.deepspeed_src_path(source)) for source in builder.sources()]
    try:
        recipe, log = (library.with_name(name).read_text() for name in ("build.ninja", ".ninja_log"))
        newest = max(path.stat().st_mtime for path in [*sources, Path(torch.__file__).with_name("version.py")])
        written = library.stat().st_mtime
        return written >= newest and _is_whole(library.name, written, log) and all(o in recipe for o in ours)
    except OSError:
        return False


def _is_whole(name: str, written: float, log: str) -> bool:
    """Whether ninja's ``log`` has the end of the link that wrote the file then: one that is killed leaves a part of it."""
    lines = [line.split("\t") for line in log.splitlines() if f"\t{name}\t" in line]
    if not lines:
        return False
    begin, end, noted, *_ = map(float, lines[-1][:3])  # milliseconds, and when it began or ended in nanoseconds
    return abs(written - noted / 1e9) <= (end - begin) / 1e3 + 1.0


def _is_stale(lock: Path) -> bool:
    held, born = _is_held(lock), _changed(lock)
    if held is None:
        return born is not None and time.time() - born > STALE_SECONDS
    if held or born is None:
        return False
    time.sleep(_RELEASE_SECONDS)
    return _changed(lock) == born and _is_held(lock) is False


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _is_held(lock: Path) -> bool | None:
    """Whether a process has ``lock`` open, as torch has while it builds; ``None`` when that cannot be known."""
    try:
        status, target = lock.stat(), str(lock.resolve())
    except OSError:
        return False
    if not Path("/proc/self/fd").exists() or _on_shared_disk(target):
        return None
    held: bool | None = False
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_points_at(file, target) for file in (process / "fd").iterdir()):
                return True
        except PermissionError:
            with contextlib.suppress(OSError):  # another user's process, or no Python, is not the one
                python = b"python" in (process / "cmdline").read_bytes()
                held = None if python and process.stat().st_uid == status.st_uid else held
        except OSError:  # it has ended
            continue
    return held


def _points_at(link: Path, target: str) -> bool:
    try:
        return os.readlink(link) == target
    except FileNotFoundError:  # closed meanwhile
        return False


def _on_shared_disk(path: str) -> bool:
    kind, longest = "", -1
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, name = line.split()[:3]
        if len(point) > longest and (path + "/").startswith(point.rstrip("/") + "/"):
            kind, longest = name, len(point)
    return kind.startswith(_SHARED_DISKS) and "overlay" not in kind


def refuse_stale_locks(ops: Iterable[str]) -> None:
    """Say that a build was killed, where DeepSpeed would wait for it for ever.

    Raises:
        RuntimeError: naming the file, and the ways out.
    """
    for state in map(state_of, ops):
        if state.stale:
            raise RuntimeError(
                f"A build of DeepSpeed's op {state.name} was killed and left its lock {state.lock}, which no process holds; DeepSpeed would wait "
                f"for ever. Remove it with `rm {state.lock}`, or run `{DOCTOR}`, which removes it and builds the op."
            )


def remove_stale_lock(op: str) -> Path | None:
    """Remove the lock of a build that was killed; returns it, or ``None`` when there is none."""
    return _remove(state_of(op))


def _remove(state: State) -> Path | None:
    if state.lock is None or not state.stale:
        return None
    state.lock.unlink(missing_ok=True)
    return state.lock


def remove_locks_of_loads(ops: Iterable[str]) -> None:
    """Of ops that are built, and were being loaded by a process that was killed: nothing is half done."""
    for state in map(state_of, ops):
        if state.stale and state.built:
            _remove(state)


def ready(ops: Iterable[str]) -> bool:
    """Whether all of ``ops`` are built, and nobody is at it."""
    return all(state.built and state.lock is None for state in map(state_of, ops))


@contextlib.contextmanager
def _own_ninja() -> Iterator[None]:
    """Within, the ninja that ``pip`` put beside this Python comes first: two versions build everything anew in turns, and a Python
    called by its path may find none."""
    folder, before = str(Path(sys.executable).parent), os.environ.get("PATH")
    if shutil.which("ninja", path=folder):
        os.environ["PATH"] = os.pathsep.join(filter(None, [folder, before]))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("PATH", None)
        else:
            os.environ["PATH"] = before


def build(op: str, say: Callable[[str], None] = print) -> None:
    """Build an op in this process, after whoever builds it already, and load it: DeepSpeed then uses it as it is.

    Args:
        say: is given lines about the progress; none when there is nothing to build.

    Raises:
        RuntimeError: it cannot be built, with the last lines of the compiler and what to install; or a stale lock is in the way.
    """
    state, waits = state_of(op), False
    while state.lock is not None:
        refuse_stale_locks([op])
        if not waits and not state.built:
            say(f"{state.name}: another process builds it in {state.folder}; waiting for it ...")
        waits = True
        time.sleep(_POLL_SECONDS)
        state = state_of(op)
    if not state.built:
        say(f"{state.name}: compiling into {state.folder}, once; this takes half a minute to some minutes ...")
    started = time.monotonic()
    try:
        if not state.built and compat.extension_compilers()[0] is None:
            raise FileNotFoundError("There is no C++ compiler (CXX, or c++).")
        with errors_only(), _own_ninja():
            builder_of(op).load(verbose=False)
    except Exception as error:
        raise RuntimeError(
            f"DeepSpeed's op {state.name} could not be built: {type(error).__name__}: {_end_of(str(error))}\n{TOOLS}"
        ) from error
    if not state.built:
        say(f"{state.name}: built in {time.monotonic() - started:.0f} s")


def _end_of(output: str) -> str:
    """The last lines, without the commands, which are as long as a page."""
    lines = [line for line in output.strip().splitlines() if "-DTORCH_EXTENSION_NAME=" not in line]
    return "\n  ".join(lines[-_LINES:])
