"""What the other tests take for granted about the servers they run against."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import boto3
import psutil
import pytest
from awscrt import checksums
from botocore.exceptions import ClientError

if TYPE_CHECKING:
    from tests.servers import MotoServer, S3Server, WeedServer

ROOT = Path(__file__).parent.parent
BODY = b"a checkpoint"
WRONG_CRC64NVME = base64.b64encode(bytes(8)).decode()

# Says who the server is and then waits to be killed.
HOLD_A_SERVER = """
import sys
from tests.servers import WeedServer
with WeedServer() as server:
    print(server.pid, server.endpoint_url, flush=True)
    sys.stdin.read()
"""


def crc64nvme(data: bytes) -> str:
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def test_an_object_comes_back(s3_server: S3Server) -> None:
    client, bucket = s3_server.client(), s3_server.new_bucket()
    client.put_object(Bucket=bucket, Key="run/a", Body=BODY, ChecksumCRC64NVME=crc64nvme(BODY))
    assert client.get_object(Bucket=bucket, Key="run/a")["Body"].read() == BODY


def test_buckets_are_new_and_empty(s3_server: S3Server) -> None:
    first, second = s3_server.new_bucket(), s3_server.new_bucket()
    assert first != second
    assert s3_server.client().list_objects_v2(Bucket=first)["KeyCount"] == 0


def test_a_missing_bucket_is_an_error(s3_server: S3Server) -> None:
    with pytest.raises(ClientError, match="NoSuchBucket"):
        s3_server.client().put_object(Bucket="mistyped-bucket", Key="a", Body=BODY)


def test_weed_rejects_a_wrong_checksum(weed: WeedServer) -> None:
    client, bucket = weed.client(), weed.new_bucket()
    with pytest.raises(ClientError, match="BadDigest"):
        client.put_object(Bucket=bucket, Key="a", Body=BODY, ChecksumCRC64NVME=WRONG_CRC64NVME)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 0


def test_moto_accepts_a_wrong_checksum(moto: MotoServer) -> None:
    """Not praise: while this holds, moto stands for the stores that must be caught lying."""
    client, bucket = moto.client(), moto.new_bucket()
    client.put_object(Bucket=bucket, Key="a", Body=BODY, ChecksumCRC64NVME=WRONG_CRC64NVME)
    assert client.list_objects_v2(Bucket=bucket)["KeyCount"] == 1


def test_weed_rejects_foreign_credentials(weed: WeedServer) -> None:
    stranger = boto3.client(
        "s3",
        endpoint_url=weed.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=weed.access_key,
        aws_secret_access_key="not the secret",
    )
    with pytest.raises(ClientError, match="SignatureDoesNotMatch"):
        stranger.list_buckets()


def test_the_environment_leads_to_the_server(any_bucket_url: str, s3_server: S3Server) -> None:
    bucket, _, prefix = any_bucket_url.removeprefix("s3://").partition("/")
    client = boto3.session.Session().client("s3")
    assert client.meta.endpoint_url == s3_server.endpoint_url
    assert client.list_objects_v2(Bucket=bucket, Prefix=prefix)["KeyCount"] == 0


def test_weed_listens_on_loopback_only(weed: WeedServer) -> None:
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(weed.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 5
    assert set(listening) == {"127.0.0.1"}


def test_weed_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_A_SERVER],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # nobody is left to remove the server's files
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline().split()[0])
        server = psutil.Process(pid)
        assert os.getpgid(pid) == pid
        holder.kill()
        server.wait(timeout=10)
    assert not server.is_running()
