"""Results on disk as they come, so that an evaluation that was interrupted goes on from them."""

import json
import os
import time
from pathlib import Path
from typing import Any

PATIENCE = 5.0  # seconds that a result may wait to be written


class Journal:
    """Results by key, one JSON line each. A path of None keeps them in memory alone.

    A last line that was cut off is dropped. Raises ValueError naming the file for what is no journal."""

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self.known: dict[str, Any] = {}
        self._waiting: list[str] = []
        self._written = time.monotonic()
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = self.path.read_bytes() if self.path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        for number, line in enumerate(content[:whole].splitlines(), 1):
            try:
                key, value = json.loads(line)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: no result ({error}); move the file away.") from error
            self.known[key] = value
        if whole < len(content):
            os.truncate(self.path, whole)

    def add(self, key: str, value: Any) -> None:
        """Keep a result; it is on disk after PATIENCE seconds of further ones, or after `flush`."""
        self.known[key] = value
        if self.path is not None:
            self._waiting.append(json.dumps([key, value]) + "\n")
            if time.monotonic() - self._written > PATIENCE:
                self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self.path is not None and self._waiting:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(self._waiting)
        self._waiting, self._written = [], time.monotonic()
