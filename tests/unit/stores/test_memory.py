from __future__ import annotations

import subprocess
import sys

import pytest

from ckpt_tiering.config import StoreOptions
from ckpt_tiering.errors import ConfigError
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.stores.base import CompletedPart, ObjectStore
from ckpt_tiering.stores.body import Body
from ckpt_tiering.stores.memory import MemoryBucket, MemoryStore
from ckpt_tiering.stores.opening import open_store
from ckpt_tiering.stores.wrapper import WrapperStore
from ckpt_tiering.testing.store_contract import StoreContract, keys_of, put_part, read


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> ObjectStore:
        return MemoryStore(StoreUrl.parse("memory://bucket/run/a b"))


class TestWrapped(StoreContract):
    """A wrapper that adds nothing changes nothing."""

    @pytest.fixture
    def store(self) -> ObjectStore:
        return WrapperStore(MemoryStore())


def test_p6_roots_of_one_bucket_do_not_see_each_other() -> None:
    bucket = MemoryBucket()
    one = MemoryStore(StoreUrl.parse("memory://b/one"), bucket=bucket)
    other = MemoryStore(StoreUrl.parse("memory://b/other"), bucket=bucket)
    one.put("f", Body.of_bytes(b"1"))
    assert other.head("f") is None
    assert keys_of(other, "") == []
    other.delete(["f"])
    assert read(one, "f") == b"1"


def test_stores_opened_by_the_same_url_share_their_objects() -> None:
    url = StoreUrl.parse("memory://shared-by-url/run")
    open_store(url, StoreOptions()).put("f", Body.of_bytes(b"1"))
    assert read(open_store(url, StoreOptions()), "f") == b"1"


def test_small_parts_are_refused_like_real_stores_do() -> None:
    store = MemoryStore(min_part_bytes=10)
    upload_id = store.create_upload("f")
    etags = [store.put_part("f", upload_id, n, Body.of_bytes(b"tiny")) for n in (1, 2)]
    crc = Body.of_bytes(b"tiny").checksum.crc
    parts = [CompletedPart(n, str(etag), crc) for n, etag in enumerate(etags, start=1)]
    whole = Body.of_bytes(b"tinytiny").checksum.crc
    with pytest.raises(ConfigError, match="too small"):
        store.complete_upload("f", upload_id, parts, crc64nvme=whole)


def test_tags_are_kept() -> None:
    store = MemoryStore()
    store.put("f", Body.of_bytes(b"x"), tag="pending")
    assert store.tag_of("f") == "pending"
    store.tag("f", "committed")
    assert store.tag_of("f") == "committed"
    upload_id = store.create_upload("big", tag="pending")
    part = put_part(store, next(iter(store.list_uploads(""))), 1, b"data")
    store.complete_upload("big", upload_id, [part], crc64nvme=part.crc64nvme)
    assert store.tag_of("big") == "pending"


@pytest.mark.parametrize("module", ["base", "body", "readback", "memory", "probe", "opening"])
def test_stores_without_s3_need_no_sdk(module: str) -> None:
    script = (
        f"import ckpt_tiering.stores.{module}, sys;"
        "sys.exit(sorted({'boto3', 'botocore'} & set(sys.modules)) or 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
