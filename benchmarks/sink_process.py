"""Starts the sink as a process of its own, and says how to reach it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Self

from examples.quickstart.weed import S3Server

__all__ = ["SinkProcess"]

ROOT = Path(__file__).resolve().parents[1]


class SinkProcess(S3Server):
    """A context manager around one sink process; what it keeps is in its memory.

    Args:
        bytes_per_s: Rate of the link that it stands behind; None for no limit.
        keep_bytes: Length of the longest body that can be read back; None for the sink's own.
    """

    access_key = "sink"
    secret_key = "sink-checks-no-signatures"

    def __init__(self, *, bytes_per_s: float | None = None, keep_bytes: int | None = None) -> None:
        super().__init__()
        self._flags = [] if bytes_per_s is None else ["--rate", str(bytes_per_s)]
        self._flags += [] if keep_bytes is None else ["--keep-bytes", str(keep_bytes)]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.sink", *self._flags],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a ^C at the terminal is the runner's to handle
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise RuntimeError(f"the sink did not start, exit status {self._process.returncode}")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close_clients()
        self._process.kill()  # by its own handle; it has nothing to save
        self._process.communicate()

    @property
    def pid(self) -> int:
        """The sink's process."""
        return self._process.pid
