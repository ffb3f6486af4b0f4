"""P3, P9: a bit that is wrong anywhere is found, named, and never handed out."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering.errors import IntegrityError
from ckpt_tiering.model.layout import StagingLayout, StoreUrl, file_key, pack_key
from ckpt_tiering.observe.bus import read_events
from tests.staging import PART_BYTES, reader, run_agent, stage_save, tree

if TYPE_CHECKING:
    from pathlib import Path

    from ckpt_tiering.model.ids import SaveId
    from tests.servers import S3Server

FILES = {
    "model.bin": random.Random(3).randbytes(2 * PART_BYTES + 17),
    "small/a.json": b'{"a": 1}',
    "small/b.json": b'{"b": 2}',
}


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def staged_file(staging: Path, url: str, save_id: SaveId, path: str) -> Path:
    layout = StagingLayout(staging)
    return layout.staged_file(layout.save_dir(StoreUrl.parse(url), save_id), 0, path)


def put_behind_our_back(server: S3Server, url: str, key: str, data: bytes) -> None:
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    server.client().put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=data)


@pytest.mark.parametrize("path", ["model.bin", "small/b.json"])
def test_p3_staged_file_that_rots_before_its_upload(
    path: str, any_bucket_url: str, tmp_path: Path
) -> None:
    """Found while it is sent, on any store; never committed; the file is named."""
    staging = tmp_path / "nvme"
    save_id = stage_save(staging, any_bucket_url, FILES)
    # Into the journal first: what an earlier agent left is digested when the next one starts.
    assert run_agent(staging, tmp_path / "calls", at="before:create_upload:1") == -9
    file = staged_file(staging, any_bucket_url, save_id, path)
    file.write_bytes(flip(file.read_bytes(), 5))

    assert run_agent(staging, tmp_path / "calls") == 0
    assert reader(any_bucket_url).latest() is None
    events = read_events(StagingLayout(staging).events)
    corrupt = [e for e in events if e["kind"] == "corrupt"]
    assert len(corrupt) == 1
    assert "changed after it was staged" in corrupt[0]["error"]
    assert path.rpartition("/")[2] in corrupt[0]["error"] or "0000.tar" in corrupt[0]["error"]
    assert [e["save_id"] for e in events if e["kind"] == "failed"] == [str(save_id)]


@pytest.mark.parametrize("spoil", ["flip", "cut", "zeros"])
def test_p9_staged_file_that_rots_before_any_agent_sees_it(
    spoil: str, bucket_url: str, tmp_path: Path
) -> None:
    """A start-up scan uses only what is provably staged; nothing of the save is uploaded."""
    staging = tmp_path / "nvme"
    save_id = stage_save(staging, bucket_url, FILES)
    file = staged_file(staging, bucket_url, save_id, "model.bin")
    data = file.read_bytes()
    spoilt = {"flip": flip(data, 9), "cut": data[:-1], "zeros": bytes(len(data))}[spoil]
    file.write_bytes(spoilt)
    assert run_agent(staging, tmp_path / "calls") == 0
    assert "put" not in (tmp_path / "calls").read_text(encoding="utf-8")
    torn = [e for e in read_events(StagingLayout(staging).events) if e["kind"] == "torn"]
    assert len(torn) == 1
    assert "model.bin" in torn[0]["error"]


def make_durable(url: str, tmp_path: Path) -> SaveId:
    save_id = stage_save(tmp_path / "nvme", url, FILES)
    assert run_agent(tmp_path / "nvme", tmp_path / "calls") == 0
    return save_id


def test_p9_flipped_bit_on_nvme_falls_to_the_store(bucket_url: str, tmp_path: Path) -> None:
    save_id = make_durable(bucket_url, tmp_path)
    file = staged_file(tmp_path / "nvme", bucket_url, save_id, "model.bin")
    file.write_bytes(flip(file.read_bytes(), PART_BYTES + 1))
    reading = reader(bucket_url, tmp_path / "nvme")
    report = reading.restore(reading.resolve("latest"), tmp_path / "restored")
    assert tree(tmp_path / "restored") == FILES
    assert report.from_nvme == len(FILES) - 1
    assert report.quarantined == [str(file)]
    assert not file.exists(), "the bad copy is set aside"
    assert list(file.parent.glob("*.corrupt"))
    corrupt = [
        e for e in read_events(StagingLayout(tmp_path / "nvme").events) if e["kind"] == "corrupt"
    ]
    assert [e["where"] for e in corrupt] == ["nvme"]


def test_p9_flipped_bit_in_a_stored_object(
    any_bucket_url: str, s3_server: S3Server, tmp_path: Path
) -> None:
    """Put there behind our back, with a checksum that fits it: only the manifest knows better."""
    save_id = make_durable(any_bucket_url, tmp_path)
    key = file_key(save_id, "n00000", "model.bin")
    put_behind_our_back(s3_server, any_bucket_url, key, flip(FILES["model.bin"], PART_BYTES))
    reading = reader(any_bucket_url)
    with pytest.raises(IntegrityError) as caught:
        reading.restore(reading.resolve("latest"), tmp_path / "restored")
    message = str(caught.value)
    assert key in message
    assert message.count("CRC64NVME") == 1
    assert len([w for w in message.replace(",", " ").split() if len(w) == 16]) >= 2, message
    assert not (tmp_path / "restored" / "model.bin").exists(), "handed out"


def test_p9_flipped_bit_in_a_stored_pack(bucket_url: str, weed: S3Server, tmp_path: Path) -> None:
    save_id = make_durable(bucket_url, tmp_path)
    key = pack_key(save_id, "n00000", 0)
    client = weed.client()
    bucket, _, prefix = bucket_url.removeprefix("s3://").partition("/")
    data = client.get_object(Bucket=bucket, Key=f"{prefix}/{key}")["Body"].read()
    put_behind_our_back(weed, bucket_url, key, flip(data, data.index(b'{"b"')))
    reading = reader(bucket_url)
    with pytest.raises(IntegrityError, match=r"small/b\.json"):
        reading.restore(reading.resolve("latest"), tmp_path / "restored")
    assert not (tmp_path / "restored" / "small" / "b.json").exists()


def test_p9_object_cut_short_in_the_store(bucket_url: str, weed: S3Server, tmp_path: Path) -> None:
    save_id = make_durable(bucket_url, tmp_path)
    key = file_key(save_id, "n00000", "model.bin")
    put_behind_our_back(weed, bucket_url, key, FILES["model.bin"][:-1])
    reading = reader(bucket_url)
    with pytest.raises(IntegrityError, match=r"model\.bin"):
        reading.restore(reading.resolve("latest"), tmp_path / "restored")
    assert not (tmp_path / "restored" / "model.bin").exists()
