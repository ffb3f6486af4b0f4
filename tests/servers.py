"""The S3 servers of the tests, each a real process on loopback.

``WeedServer`` checks what it is sent, as AWS does. ``MotoServer`` has more of the API and *lies*:
it accepts any checksum and any credentials, so it stands for the stores that can't be trusted.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Self

from examples.quickstart.weed import S3Server, WeedServer

__all__ = ["MotoServer", "S3Server", "WeedServer"]

# Lives as long as its stdin: the pipe closes with the process that holds the other end, even if
# that one is killed. The port is the kernel's choice, so nobody can take it first.
MOTO = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


class MotoServer(S3Server):
    """A context manager around one moto process; everything is in its memory."""

    access_key = "moto"
    secret_key = "moto-accepts-anything"

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MOTO],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a ^C at the terminal is the test run's to handle
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise RuntimeError(f"moto did not start, exit status {self._process.returncode}")
        self.endpoint_url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close_clients()
        self._process.kill()  # by its own handle; it has nothing to save
        self._process.communicate()
