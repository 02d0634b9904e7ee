"""The report on this machine, and DeepSpeed's ops, built ahead: what is built, what is in the way, and who is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lightning_partrain import compat, doctor
from lightning_partrain.cli import main
from lightning_partrain.parallel.deepspeed import ops

SHM, ADAM = "ShareMemCommBuilder", "CPUAdamBuilder"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process has torch build extensions; there is nothing yet."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(ops, "_RELEASE_SECONDS", 0.05)
    return tmp_path


@contextmanager
def building(lock: Path) -> Iterator[Any]:
    """A process that has taken ``lock`` as torch does."""
    code = "import os, sys, time; fd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); time.sleep(60)"
    lock.parent.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", code, str(lock)])
    try:
        deadline = time.monotonic() + 30
        while not lock.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()


class Builder:
    """Stands for DeepSpeed's builder; ``load`` makes the files that a build makes."""

    def __init__(self, real: Any, error: Exception | None = None) -> None:
        self.name, self.sources, self.deepspeed_src_path = real.name, real.sources, real.deepspeed_src_path
        self.is_compatible, self.error = real.is_compatible, error

    def load(self, verbose: bool) -> None:
        library, lock = compat.extension_files(self.name)
        assert not lock.exists()
        if self.error is not None:
            raise self.error
        paths = ops.sysconfig.get_path("include"), ops.torch.__file__.removesuffix("/__init__.py")
        library.with_name("build.ninja").write_text(" ".join(paths))
        library.write_bytes(b"")
        noted = library.stat().st_mtime_ns - 500_000_000  # when the link began
        library.with_name(".ninja_log").write_text(f"1\t502\t{noted}\t{library.name}\tabc\n")


@pytest.fixture
def stub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    real = ops.builder_of

    def use(error: Exception | None = None) -> None:
        monkeypatch.setattr(ops, "builder_of", lambda op: Builder(real(op), error))

    use()
    return use


def test_names_that_are_relied_on(folder: Path) -> None:
    assert ops.device_type() == "cpu"
    assert ops.needed_ops("cpu") == [SHM]
    assert ops.needed_ops("cuda", cpu_adam=True, fused_adam=True) == [ADAM, "FusedAdamBuilder"]
    for op, name in ((SHM, "deepspeed_shm_comm"), (ADAM, "cpu_adam")):
        builder = ops.builder_of(op)
        assert all(Path(builder.deepspeed_src_path(source)).is_file() for source in builder.sources())
        assert callable(builder.load)
        assert ops.state_of(op) == ops.State(name, folder / name, built=False, lock=None, stale=False)


def test_the_report(folder: Path) -> None:
    """In a process of its own: what DeepSpeed says while it is imported is no part of it."""
    command = [sys.executable, "-m", "lightning_partrain.cli", "doctor"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
    labels = ("python", "torch", "lightning", "deepspeed", "op deepspeed_shm_comm")
    assert all(f"\n{label} " in f"\n{ended.stdout}" for label in labels)
    assert (
        "not built yet: lightning-partrain doctor --build-deepspeed" in ended.stdout and "WARNING" not in ended.stdout
    )


def test_without_deepspeed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "deepspeed" else real(package))
    assert main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert 'not installed: pip install "lightning-partrain[deepspeed]"' in report and "op " not in report
    assert main(["doctor", "--build-deepspeed"]) == 1
    message = capsys.readouterr().err
    assert message == (
        'lightning-partrain: error: DeepSpeed is not installed: pip install "lightning-partrain[deepspeed]"\n'
    )


def test_a_deepspeed_that_cannot_be_imported_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(op: str) -> None:
        raise ImportError("no such symbol")

    monkeypatch.setattr(ops, "builder_of", fails)
    assert main(["doctor"]) == 1
    assert "deepspeed: is installed, but fails: ImportError: no such symbol" in capsys.readouterr().err


def test_a_lock_is_stale_when_its_build_is_gone(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = folder / "deepspeed_shm_comm" / "lock"
    with building(lock) as process:
        state = ops.state_of(SHM)
        assert state.lock == lock and not state.stale
        ops.refuse_stale_locks([SHM])
        assert not ops.ready([SHM])
        assert ops.remove_stale_lock(SHM) is None and lock.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert ops.state_of(SHM).stale
    with pytest.raises(
        RuntimeError, match=rf"was killed .* `rm {lock}`, or run `lightning-partrain doctor --build-deeps"
    ):
        ops.refuse_stale_locks([ADAM, SHM])
    with pytest.raises(RuntimeError, match="was killed"):
        ops.build(SHM)
    assert main(["doctor"]) == 1
    assert f"op deepspeed_shm_comm: a build was killed and left its lock {lock}" in capsys.readouterr().err
    assert main(["doctor", "--build-deepspeed"]) == 0
    printed = capsys.readouterr().out
    assert f"removed {lock}" in printed and printed.count("built in") == 1
    assert ops.ready([SHM])
    lock.touch()  # of a process that was killed while it loaded what is built
    ops.remove_locks_of_loads([SHM])
    assert ops.ready([SHM])


def test_where_nobody_can_tell_age_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_on_shared_disk", lambda path: True)
    lock = folder / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert not ops.state_of(ADAM).stale
    before = time.time() - 31 * 60
    os.utime(lock, (before, before))
    assert ops.state_of(ADAM).stale


def test_what_is_built_is_not_built_again(stub: Any, folder: Path) -> None:
    said: list[str] = []
    ops.build(ADAM, said.append)
    assert len(said) == 2 and str(folder / "cpu_adam") in said[0] and "built in" in said[1]
    ops.build(ADAM, said.append)
    assert len(said) == 2 and ops.ready([ADAM]) and not ops.ready([ADAM, SHM])
    later = time.time() + 60
    os.utime(
        folder / "cpu_adam" / "cpu_adam.so", (later, later)
    )  # a link that was killed: its end is not in ninja's log
    assert not ops.ready([ADAM])
    os.utime(folder / "cpu_adam" / "cpu_adam.so", (0, 0))  # older than the sources
    assert not ops.ready([ADAM])


def test_a_build_waits_for_another(stub: Any, folder: Path) -> None:
    said: list[str] = []
    lock = folder / "cpu_adam" / "lock"
    with building(lock):

        def say(line: str) -> None:
            said.append(line)
            lock.unlink(missing_ok=True)  # the other is done

        ops.build(ADAM, say)
    assert "another process builds it" in said[0] and "built in" in said[-1]


def test_what_the_compiler_said(stub: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [*map(str, range(30)), "[1/2] c++ -DTORCH_EXTENSION_NAME=x -I/long", "fatal error: Python.h: No such file"]
    stub(RuntimeError("\n".join(lines)))
    assert main(["doctor", "--build-deepspeed"]) == 1
    message = capsys.readouterr().err
    assert "op deepspeed_shm_comm could not be built" in message and "Python.h" in message
    assert "python3-dev" in message and "-DTORCH" not in message and len(message.splitlines()) < 20


def test_without_a_compiler(stub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"There is no C\+\+ compiler"):
        ops.build(ADAM, lambda line: None)


@pytest.mark.slow
@pytest.mark.skipif(compat.extension_compilers()[0] is None, reason="there is no C++ compiler")
@pytest.mark.timeout(900)
def test_a_real_build_that_is_ended_and_done_again(folder: Path) -> None:
    """SIGTERM ends it and leaves no lock; SIGKILL leaves one, which is found; then it is built, and loads."""
    command = [sys.executable, "-m", "lightning_partrain.cli", "doctor", "--build-deepspeed"]
    lock = folder / "deepspeed_shm_comm" / "lock"
    for number, left in ((signal.SIGTERM, False), (signal.SIGKILL, True)):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        while not lock.exists():
            assert process.poll() is None
            time.sleep(0.05)
        time.sleep(1)
        process.send_signal(number)
        process.wait()
        assert ops.state_of(SHM).stale == lock.exists() == left
    assert ops.remove_stale_lock(SHM) == lock
    ops.build(SHM)
    assert ops.ready([SHM])
    assert callable(ops.builder_of(SHM).load().initialize)
