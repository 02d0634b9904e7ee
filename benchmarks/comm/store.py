"""Measurements in a JSON file, each written at once, so that a benchmark goes on where it was stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.common import machine


class Store:
    """
    Args:
        path: of the file, which may exist.
        settings: what all of its measurements have in common.

    Raises:
        SystemExit: when the file's were made with other settings.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {"machine": machine(), "settings": settings, "measured": {}}
        if path.exists():
            self.content = json.loads(path.read_text())
            if self.content["settings"] != settings:
                raise SystemExit(
                    f"{path} was measured with {self.content['settings']}, not with {settings}. Ask for the same, name another folder with "
                    "--results, or remove the file."
                )

    @property
    def measured(self) -> dict[str, Any]:
        """By name: of the row, and of the seed, or of the link and round."""
        return self.content["measured"]

    def put(self, name: str, value: dict[str, Any]) -> None:
        self.measured[name] = value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.content, "measured": {}}, indent=2).removesuffix("{}\n}")
        lines = [f"    {json.dumps(key)}: {json.dumps(self.measured[key])}" for key in sorted(self.measured)]
        new = self.path.with_suffix(".new")
        new.write_text(text + "{\n" + ",\n".join(lines) + "\n  }\n}\n")
        os.replace(new, self.path)
