"""Where reductions of several messages run, one after the other, while the backward pass goes on.

Messages of two buckets must not mix: ranks would pair them differently, and wait for ever or add up what does not belong together (torch's
own PowerSGD hook does on gloo). One thread that takes buckets in the order in which all ranks hand them out cannot; on a GPU one stream.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Job(Protocol):
    def wait(self) -> Any:
        """Until it is done; raises what it raised. On a GPU the current stream waits, not the host."""
        ...


class Lane(Protocol):
    def submit(self, job: Callable[[], None]) -> Job:
        """Run ``job`` after those before it."""
        ...

    def now(self) -> Any:
        """A point in the work of the caller."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two points that :meth:`now` gave; waits for the second."""
        ...

    def close(self) -> None: ...


class _Submitted:
    def __init__(self, job: Callable[[], None]) -> None:
        self.job, self.done, self.error = job, threading.Event(), None

    error: BaseException | None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


class ThreadLane:
    """A thread, for tensors on the host. It is a daemon: a process that fails must not wait for messages that never come."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, daemon=True, name="gradient-exchange")
        self._thread.start()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        while (submitted := self._jobs.get()) is not None:
            try:
                with torch.no_grad():
                    submitted.job()
            except BaseException as error:
                submitted.error = error
            submitted.done.set()

    def submit(self, job: Callable[[], None]) -> Job:
        submitted = _Submitted(job)
        self._jobs.put(submitted)
        return submitted

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=1.0)


class _Recorded:
    def __init__(self, device: Any, event: Any) -> None:
        self.device, self.event = device, event

    def wait(self) -> None:
        self.device.current_stream().wait_event(self.event)


class StreamLane:
    """A stream of the device beside the one on which the caller computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream(device=device)

    def submit(self, job: Callable[[], None]) -> Job:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream), torch.no_grad():
            job()
        return _Recorded(self._device, self._stream.record_event())

    def now(self) -> Any:
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    def close(self) -> None:
        self._stream.synchronize()


def lane_for(device: torch.device) -> Lane:
    return ThreadLane() if device.type == "cpu" else StreamLane(device)
