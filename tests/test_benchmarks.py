"""The benchmark's S3 server is true to S3, and its lines have one shape."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from boto3.s3.transfer import TransferConfig
from botocore.exceptions import ClientError

from benchmarks.sink_process import SinkProcess
from benchmarks.summary import Spread, Summary
from benchmarks.verdicts import verdicts
from benchmarks.write_docs import write_docs
from ckpt_tiering.config import StoreOptions
from ckpt_tiering.model.digest import crc64, crc_to_b64
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.stores.base import Capabilities, ObjectStore
from ckpt_tiering.stores.opening import open_store
from ckpt_tiering.stores.probe import probe
from ckpt_tiering.testing.store_contract import StoreContract
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
BODY = b"a checkpoint"


@pytest.fixture(scope="module")
def sink(no_user_configuration: None) -> Iterator[SinkProcess]:
    with SinkProcess(keep_bytes=8 * MIB) as server:
        yield server


def opened(sink: SinkProcess, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    for name, value in sink.env().items():
        monkeypatch.setenv(name, value)
    url = StoreUrl.parse(f"{sink.new_root()}/run/a b")
    return open_store(url, StoreOptions(endpoint_url=sink.endpoint_url))


class TestSink(StoreContract):
    @pytest.fixture
    def store(self, sink: SinkProcess, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        return opened(sink, monkeypatch)


def test_the_probe_believes_the_sink(sink: SinkProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    report = probe(opened(sink, monkeypatch), "t1")
    assert [finding for finding in report.findings if not finding.ok] == []
    assert report.usable
    assert report.capabilities == Capabilities(
        conditional_put=True, checks_crc64nvme=True, tags=True, lists_uploads=True
    )


def test_the_sink_refuses_wrong_checksums(sink: SinkProcess) -> None:
    client, bucket = sink.client(), sink.new_bucket()
    upload = client.create_multipart_upload(
        Bucket=bucket, Key="a", ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
    )
    here: Any = {"Bucket": bucket, "Key": "a", "UploadId": upload["UploadId"]}
    with pytest.raises(ClientError, match="BadDigest"):
        client.upload_part(**here, PartNumber=1, Body=BODY, ChecksumCRC64NVME=crc_to_b64(0))
    right = crc_to_b64(crc64(BODY))
    sent = client.upload_part(**here, PartNumber=1, Body=BODY, ChecksumCRC64NVME=right)
    part: Any = {"PartNumber": 1, "ETag": sent["ETag"]}
    wrong: Any = {**part, "ChecksumCRC64NVME": crc_to_b64(0)}
    with pytest.raises(ClientError, match="BadDigest"):
        client.complete_multipart_upload(
            **here, MultipartUpload={"Parts": [part]}, ChecksumCRC64NVME=crc_to_b64(0)
        )
    with pytest.raises(ClientError, match="InvalidPart"):
        client.complete_multipart_upload(**here, MultipartUpload={"Parts": [wrong]})
    with pytest.raises(ClientError, match="404"):
        client.head_object(Bucket=bucket, Key="a")
    client.complete_multipart_upload(
        **here, MultipartUpload={"Parts": [part]}, ChecksumCRC64NVME=crc_to_b64(crc64(BODY))
    )
    assert client.get_object(Bucket=bucket, Key="a")["Body"].read() == BODY


@pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "CRC64NVME"])
def test_boto3s_own_transfer_is_understood(
    sink: SinkProcess, tmp_path: Path, algorithm: str
) -> None:
    """Parts with checksums of the client's own choice, of parts or of the whole."""
    client, bucket = sink.client(), sink.new_bucket()
    file = tmp_path / "big"
    file.write_bytes(BODY * 500_000)
    config = TransferConfig(multipart_threshold=5 * MIB, multipart_chunksize=5 * MIB)
    extra = {"ChecksumAlgorithm": algorithm}
    client.upload_file(str(file), bucket, "big", ExtraArgs=extra, Config=config)
    seen = client.head_object(Bucket=bucket, Key="big", ChecksumMode="ENABLED")
    assert seen["ContentLength"] == file.stat().st_size
    assert f"Checksum{algorithm}" in seen
    client.download_file(bucket, "big", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == file.read_bytes()


def test_a_chunked_body_with_a_checksum_behind_it(sink: SinkProcess) -> None:
    """What SDKs send over https, and native clients over http, too."""
    path = f"/{sink.new_bucket()}/chunked"
    assert put_chunked(sink, path, crc_to_b64(crc64(BODY))) == 200
    assert put_chunked(sink, path, crc_to_b64(0)) == 400


def put_chunked(sink: SinkProcess, path: str, checksum: str) -> int:
    half = len(BODY) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:])]
    body = b"".join(chunks) + b"0\r\nx-amz-checksum-crc64nvme:%b\r\n\r\n" % checksum.encode()
    headers = {"Content-Encoding": "aws-chunked", "x-amz-trailer": "x-amz-checksum-crc64nvme"}
    connection = HTTPConnection(sink.endpoint_url.removeprefix("http://"))
    connection.request("PUT", path, body, headers)
    status = connection.getresponse().status
    connection.close()
    return status


def test_long_bodies_are_discarded_and_that_is_said(sink: SinkProcess) -> None:
    client, bucket = sink.client(retries={"total_max_attempts": 1}), sink.new_bucket()
    client.put_object(Bucket=bucket, Key="long", Body=bytes(9 * MIB))
    assert client.head_object(Bucket=bucket, Key="long")["ContentLength"] == 9 * MIB
    with pytest.raises(ClientError, match="did not keep"):
        client.get_object(Bucket=bucket, Key="long")


def test_copies_buckets_by_name_and_folders(sink: SinkProcess) -> None:
    """What s3torchconnector and s3fs ask besides."""
    client, bucket = sink.client(), sink.new_bucket()
    client.put_object(Bucket=bucket, Key="a/1", Body=BODY)
    client.copy_object(Bucket=bucket, Key="b/2", CopySource={"Bucket": bucket, "Key": "a/1"})
    listed = client.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [entry["Prefix"] for entry in listed["CommonPrefixes"]] == ["a/", "b/"]
    connection = HTTPConnection(sink.endpoint_url.removeprefix("http://"))
    connection.request("GET", "/b/2", headers={"Host": f"{bucket}.localhost:80"})
    assert connection.getresponse().read() == BODY
    connection.close()


# --- the harness -------------------------------------------------------------------------------

SAVE = {
    "kind", "variant", "size", "repeat", "number", "is_first", "stall_s", "durable_s", "lost_s",
    "inflation", "num_steps_in_flight", "steps_in_flight_ms", "cpu_s_per_gb",
    "server_cpu_s_per_gb", "foreign_cpus", "fds", "phases",
}  # fmt: skip
PROCESS = {
    "kind", "variant", "size", "repeat", "num_bytes", "baseline_ms", "versions", "peak_bytes",
    "peak_anon_bytes", "peak_shared_bytes",
}  # fmt: skip
RUN = {
    "kind", "date", "cpu", "cores", "memory_bytes", "disk", "kernel", "seed", "repeats", "saves",
    "rate_bytes_per_s",
}  # fmt: skip


def bench(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.timeout(300)  # four processes that import torch, one after the other
def test_a_tiny_run(tmp_path: Path) -> None:
    names = ["ours", "memcpy", "torch_save"]
    bench(
        "--sizes=8MiB", f"--variants={','.join(names)}", "--repeats=1", "--saves=1", "--quick",
        f"--out={tmp_path}", f"--scratch={tmp_path}",
    )  # fmt: skip
    (results,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_kind.setdefault(line["kind"], []).append(line)
    assert by_kind.keys() == {"run", "save", "process", "summary"}
    assert [line.keys() for line in by_kind["run"]] == [RUN]
    assert all(line.keys() == SAVE for line in by_kind["save"])
    assert all(line.keys() == PROCESS for line in by_kind["process"])
    assert [line["is_first"] for line in by_kind["save"]] == [True, False] * 3
    assert sorted(line["variant"] for line in by_kind["summary"]) == sorted(names)
    ours = next(line for line in by_kind["process"] if line["variant"] == "ours")
    assert ours["peak_bytes"] > 2 * ours["num_bytes"]
    assert results.with_suffix(".png").stat().st_size
    assert not list(tmp_path.glob("bench-*")), "the runner left its scratch folder"


def summary(variant: str, **figures: Any) -> Summary:
    same = Summary(
        variant=variant, size="1GiB", state_bytes=1 << 30, num_processes=1, num_saves=3,
        first_stall_s=0.1, stall_s=Spread(0.1, 0.1, 0.1), lost_s=0.2, first_lost_s=0.2,
        durable_s=Spread(1.0, 1.0, 1.0), inflation=0.1, cpu_s_per_gb=1.0, server_cpu_s_per_gb=0.3,
        peak_bytes=2 << 30, baseline_p99_ms=90.0, p99_ms=95.0, fds=10, foreign_cpus=0.0,
    )  # fmt: skip
    return replace(same, **figures)


def test_bounds_are_held_against_the_right_rival() -> None:
    found = [summary("ours"), summary("memcpy"), summary("dcp_process", lost_s=0.4, cpu_s_per_gb=1)]
    answers = {verdict.bound: verdict.answer for verdict in verdicts(found)}
    assert answers["lost <= 0.6 x dcp_process"] == "pass"
    assert answers["durable <= 0.65 x dcp_process"] == "FAIL"
    assert answers["peak / state <= 2.25 x 1"] == "pass"
    alone = {verdict.answer for verdict in verdicts(found[:1])}
    assert alone == {"no data", "pass"}


def test_where_we_lose_is_written_down(tmp_path: Path) -> None:
    found = [summary("ours"), summary("memcpy"), summary("nvrx_fork", lost_s=0.1)]
    run = {
        "kind": "run", "date": "2026-12-03T00:00Z", "cpu": "a CPU", "cores": 2,
        "memory_bytes": 1 << 34, "disk": "ext4", "kernel": "6", "seed": 0, "repeats": 1,
        "saves": 3, "rate_bytes_per_s": None,
    }  # fmt: skip
    skipped = {"kind": "skipped", "variant": "ours_dcp", "size": "1GiB", "reason": "not yet"}
    document = tmp_path / "benchmarks.md"
    write_docs(document, [run, skipped], found, verdicts(found))
    text = document.read_text()
    assert "| 1GiB | `nvrx_fork` | disk | lost per save, s | 0.200 | 0.100 | 2.00 x |" in text
    assert "| `ours_dcp` | all | skipped | not yet |" in text
    assert "As multiples of `memcpy`" in text
