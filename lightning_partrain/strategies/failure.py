"""When one rank fails, say so first, there and on every other rank, and let nobody wait for it."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_POLL_SECONDS, _GRACE_SECONDS = 0.5, 10.0
_runs = itertools.count()


_LOST = re.compile(
    r"gloo|nccl|connection (closed|reset|refused)|broken pipe|socket|timed out|pair clos|did not come within",
    re.IGNORECASE,
)


def lost_a_peer(error: BaseException) -> bool:
    """Whether ``error`` says that another rank is gone or late, not what went wrong there."""
    return isinstance(error, (dist.DistError, RuntimeError, ConnectionError)) and _LOST.search(str(error)) is not None


class FailureNotice:
    """Publishes the first failure of a run through the rendezvous store, and watches for one of another rank.

    Args:
        store: the store of the default process group; a clone is used.
        rank: this global rank.
        place: this rank's coordinates in words.
    """

    def __init__(self, store: dist.Store, rank: int, place: str) -> None:
        self.rank, self.place = rank, place
        self._store = store.clone() if hasattr(store, "clone") else store
        self._store.set_timeout(timedelta(seconds=5))
        self._key = f"lightning_partrain/failure/{next(_runs)}"  # of this run: the next may have another
        self._first: dict[str, Any] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="failure-watch")
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * _POLL_SECONDS)

    def first(self) -> dict[str, Any] | None:
        """The first failure: its ``rank``, ``place`` and ``error``; ``None`` when there is none, or rank 0 was gone before
        this rank could read of it."""
        if self._first is None:
            try:
                self._first = json.loads(self._store.get(self._key)) if self._store.check([self._key]) else None
            except (RuntimeError, ValueError, dist.DistError):
                return None
        return self._first

    def publish(self, error: BaseException) -> dict[str, Any]:
        """Record ``error`` unless another rank failed before. Prints the traceback where it is the first."""
        mine = {"rank": self.rank, "place": self.place, "error": f"{type(error).__name__}: {error}"}
        before = self.first()
        if before is not None and before["rank"] != self.rank:
            return before
        try:
            first = json.loads(self._store.compare_set(self._key, "", json.dumps(mine)))
        except (RuntimeError, ValueError, dist.DistError):
            first = mine
        if first["rank"] == self.rank:
            trace = "".join(traceback.format_exception(error))
            print(f"[rank {self.rank}: {self.place}] failed first:\n{trace}", file=sys.stderr, flush=True)
            if self.rank == 0:
                time.sleep(3 * _POLL_SECONDS)  # the store ends with rank 0: let the others read it
        return first

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            first = self.first()
            if first is None:
                continue
            if first["rank"] != self.rank:
                print(f"[rank {self.rank}] stops: {self.describe(first)}", file=sys.stderr, flush=True)
                if not self._ended.wait(_GRACE_SECONDS):
                    os._exit(1)
            return

    @staticmethod
    def describe(first: dict[str, Any]) -> str:
        return f"rank {first['rank']} ({first['place']}) failed with {first['error']}"
