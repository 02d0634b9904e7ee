"""Where reductions of several messages run, one after the other, while the backward pass goes on.

Messages of two buckets must not mix by chance: ranks would pair them differently, and wait for ever or add up what does not belong together
(torch's own PowerSGD hook does on gloo). One thread that takes buckets in the order in which all ranks hand them out cannot; on a GPU one stream.

A job is a generator that yields messages which are on their way, and is sent their answers. The thread takes the next job up to its first
message before it goes on with the one before: while one bucket travels, the next is computed. This order, too, is the same on all ranks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_partrain.sync.links import Message

Steps = Generator[Message, Tensor, None]


class Job(Protocol):
    def wait(self) -> Any:
        """Until it is done; raises what it raised. On a GPU the current stream waits, not the host."""
        ...


class Lane(Protocol):
    def submit(self, steps: Callable[[], Steps]) -> Job:
        """Run a job after those before it."""
        ...

    def flush(self) -> None:
        """No job follows for now."""
        ...

    def now(self) -> Any:
        """A point in the work of the caller."""
        ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two points that :meth:`now` gave; waits for the second."""
        ...

    def close(self) -> None: ...


class _Submitted:
    def __init__(self, steps: Callable[[], Steps]) -> None:
        self._start, self._steps, self._message = steps, None, None
        self.done, self.error = threading.Event(), None

    _steps: Steps | None
    _message: Message | None
    error: BaseException | None

    def begin(self) -> None:
        """Until its first message is on its way."""
        self._steps = self._start()
        self._go_on(lambda steps: next(steps))

    def finish(self) -> None:
        while not self.done.is_set():
            self._go_on(lambda steps: steps.send(self._message.wait()))  # type: ignore[union-attr]

    def _go_on(self, step: Callable[[Steps], Message]) -> None:
        assert self._steps is not None
        try:
            self._message = step(self._steps)
        except BaseException as error:
            self.error = None if isinstance(error, StopIteration) else error
            self.done.set()

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise self.error


FLUSH, CLOSE = "flush", "close"


class ThreadLane:
    """A thread, for tensors on the host. It is a daemon: a process that fails must not wait for messages that never come."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Submitted | str] = queue.SimpleQueue()
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._work, daemon=True, name="gradient-exchange")
        self._thread.start()

    def _work(self) -> None:
        torch.set_num_threads(self._threads)
        travelling: _Submitted | None = None
        with torch.no_grad():
            while (job := self._jobs.get()) != CLOSE:
                following = job if isinstance(job, _Submitted) else None
                if following is not None:
                    following.begin()
                if travelling is not None:
                    travelling.finish()
                travelling = following

    def submit(self, steps: Callable[[], Steps]) -> Job:
        submitted = _Submitted(steps)
        self._jobs.put(submitted)
        return submitted

    def flush(self) -> None:
        self._jobs.put(FLUSH)

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def close(self) -> None:
        self._jobs.put(CLOSE)
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

    def submit(self, steps: Callable[[], Steps]) -> Job:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream), torch.no_grad():
            submitted = _Submitted(steps)
            submitted.begin()
            submitted.finish()
            submitted.wait()
        return _Recorded(self._device, self._stream.record_event())

    def flush(self) -> None:
        """The stream has all of them."""

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
