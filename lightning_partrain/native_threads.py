"""How many threads this process had when the package was imported.

Libraries start some while they are imported, which know how to live with a fork. Pools that computing has started since do
not: a forked process that computes with threads waits for ever for ones it does not have.
"""

from __future__ import annotations

from pathlib import Path

TASKS = Path("/proc/self/task")


def count() -> int:
    """Threads of this process, Python's and others; 0 where the system does not say."""
    return len(list(TASKS.iterdir())) if TASKS.exists() else 0


AT_IMPORT = count()
