"""`S3Store` against real servers over loopback."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import boto3
import pytest
from botocore.awsrequest import AWSResponse

from ckpt_tiering.config import StoreOptions
from ckpt_tiering.errors import (
    CkptTieringError,
    ConfigError,
    CredentialError,
    ErrorKind,
    IntegrityError,
    NotFoundError,
    StorePermissionError,
    TransientError,
)
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.layout import StoreUrl
from ckpt_tiering.stores.base import Capabilities, CompletedPart, ObjectStore
from ckpt_tiering.stores.body import Body
from ckpt_tiering.stores.opening import open_store
from ckpt_tiering.stores.probe import probe
from ckpt_tiering.stores.s3 import S3Store
from ckpt_tiering.stores.s3_client import connect
from ckpt_tiering.testing.store_contract import StoreContract, read
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from tests.servers import MotoServer, S3Server, WeedServer


def opened(server: S3Server, monkeypatch: pytest.MonkeyPatch, root: str = "run/a b") -> S3Store:
    for name, value in server.env().items():
        monkeypatch.setenv(name, value)
    url = StoreUrl.parse(f"{server.new_root()}/{root}")
    store = open_store(url, StoreOptions(endpoint_url=server.endpoint_url))
    assert isinstance(store, S3Store)
    return store


class TestWeed(StoreContract):
    part_bytes = 5 * MIB

    @pytest.fixture
    def store(self, weed: WeedServer, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        return opened(weed, monkeypatch)


class TestMoto(StoreContract):
    part_bytes = 5 * MIB
    compares_checksums = False
    knows_aborted_uploads = False  # it answers 500

    @pytest.fixture
    def store(self, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
        return opened(moto, monkeypatch)


def test_p3_the_probe_believes_an_honest_server(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(weed, monkeypatch)
    report = probe(store, "t1")
    assert report.capabilities == Capabilities(
        conditional_put=True, checks_crc64nvme=True, tags=True, lists_uploads=True
    )
    assert [finding for finding in report.findings if not finding.ok] == []
    assert report.usable
    assert list(store.list("")) == []
    assert store.list_uploads("") == ()


def test_p3_the_probe_catches_a_server_that_accepts_wrong_checksums(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(moto, monkeypatch)
    report = probe(store, "t1")
    assert report.capabilities == Capabilities(
        conditional_put=True, checks_crc64nvme=False, tags=True, lists_uploads=True
    )
    assert report.usable
    assert list(store.list("")) == []


def test_a_missing_bucket_is_said_to_be_missing(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.env().items():
        monkeypatch.setenv(name, value)
    options = StoreOptions(endpoint_url=s3_server.endpoint_url)
    store = open_store(StoreUrl.parse("s3://never-made/run"), options)
    for action in (
        lambda: store.put("f", Body.of_bytes(b"x")),
        lambda: list(store.list("")),
        lambda: store.create_upload("f"),
        lambda: store.delete(["f"]),
        lambda: read(store, "f"),
        lambda: probe(store, "t1"),
    ):
        with pytest.raises(NotFoundError, match="never-made") as caught:
            action()
        assert caught.value.kind is ErrorKind.NO_SUCH_BUCKET
        assert caught.value.hint is not None


def test_p5_refused_credentials_say_so_and_new_ones_are_found(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The work goes on in the same store object after the credentials were replaced."""
    store = opened(weed, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialError, match="SignatureDoesNotMatch") as caught:
        store.put("f", Body.of_bytes(b"x"))
    assert weed.access_key not in str(caught.value)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody-we-know")
    with pytest.raises(CredentialError, match="InvalidAccessKeyId"):
        store.put("f", Body.of_bytes(b"x"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(CredentialError, match="no usable credentials"):
        store.put("f", Body.of_bytes(b"x"))
    for name, value in weed.env().items():
        monkeypatch.setenv(name, value)
    store.put("f", Body.of_bytes(b"x"))
    assert read(store, "f") == b"x"


def test_p5_a_head_tells_refused_credentials_from_a_missing_permission(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer has no body, so that it says 400 or 403 to an expired token and no more."""
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    told = S3Store(store.url, lambda: client)
    client.meta.events.register("before-send.s3.HeadObject", answer(400, b""))
    told.put("f", Body.of_bytes(b"x"))
    with pytest.raises(CkptTieringError, match="400"):
        told.head("f")
    expired = b"<Error><Code>ExpiredToken</Code><Message>too old</Message></Error>"
    client.meta.events.register("before-send.s3.GetObject", answer(400, expired))
    with pytest.raises(CredentialError, match="ExpiredToken"):
        told.head("f")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(CredentialError, match="SignatureDoesNotMatch"):
        store.head("f")


def test_p5_a_head_without_permission_is_not_a_missing_object(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    denied = b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"
    client.meta.events.register("before-send.s3.HeadObject", answer(403, b""))
    client.meta.events.register("before-send.s3.GetObject", answer(403, denied))
    with pytest.raises(StorePermissionError, match="s3:GetObject"):
        S3Store(store.url, lambda: client).head("f")


def test_the_endpoint_is_found_as_boto3_users_expect(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in weed.env().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", weed.endpoint_url)
    store = open_store(StoreUrl.parse(weed.new_root()), StoreOptions())
    store.put("f", Body.of_bytes(b"x"))
    assert read(store, "f") == b"x"


def test_an_unreachable_endpoint_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "any")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "any")
    options = StoreOptions(endpoint_url="http://127.0.0.1:9", region="eu-west-1")
    store = open_store(StoreUrl.parse("s3://bucket/run"), options)
    with pytest.raises(TransientError, match="Connection refused") as caught:
        store.create_upload("f")
    assert "http://127.0.0.1:9" in (caught.value.hint or "")
    assert "?" not in str(caught.value)


def test_an_endpoint_that_is_no_url_is_a_configuration_error() -> None:
    options = StoreOptions(endpoint_url="not a url")
    store = open_store(StoreUrl.parse("s3://bucket/run"), options)
    with pytest.raises(ConfigError, match="endpoint"):
        store.head("f")


def test_p3_a_body_damaged_on_its_way_is_refused(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server compares what arrived with the checksum that was taken at staging."""
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    damaged = S3Store(store.url, lambda: client)

    def damage(request: Any, **_: Any) -> None:
        request.body = b"dATA"

    client.meta.events.register("before-send.s3.PutObject", damage)
    client.meta.events.register("before-send.s3.UploadPart", damage)
    with pytest.raises(IntegrityError):
        damaged.put("f", Body.of_bytes(b"data"))
    upload_id = damaged.create_upload("f")
    with pytest.raises(IntegrityError):
        damaged.put_part("f", upload_id, 1, Body.of_bytes(b"data"))
    assert damaged.head("f") is None


def test_what_is_sent_is_neither_hashed_again_nor_without_checksum(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    sent: list[dict[str, str]] = []
    client.meta.events.register(
        "before-send.s3",
        lambda request, **_: sent.append({k.lower(): _text(v) for k, v in request.headers.items()}),
    )
    watched = S3Store(store.url, lambda: client)
    watched.put("f", Body.of_bytes(b"data"))
    upload_id = watched.create_upload("f")
    etag = watched.put_part("f", upload_id, 1, Body.of_bytes(b"data"))
    assert isinstance(etag, str)
    part = CompletedPart(1, etag, crc64(b"data"))
    watched.complete_upload("f", upload_id, [part], crc64nvme=crc64(b"data"))
    put, create, upload, complete = sent
    for request in (put, upload):
        assert request["x-amz-checksum-crc64nvme"]
        assert request["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert "content-md5" not in request
    assert create["x-amz-checksum-type"] == complete["x-amz-checksum-type"] == "FULL_OBJECT"
    assert complete["x-amz-checksum-crc64nvme"] == put["x-amz-checksum-crc64nvme"]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def test_a_200_with_an_error_inside_is_an_error(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    client.meta.events.register(
        "before-send.s3.CompleteMultipartUpload",
        answer(200, b"<Error><Code>InternalError</Code><Message>oops</Message></Error>"),
    )
    broken = S3Store(store.url, lambda: client)
    upload_id = broken.create_upload("f")
    etag = broken.put_part("f", upload_id, 1, Body.of_bytes(b"data"))
    assert isinstance(etag, str)
    part = CompletedPart(1, etag, crc64(b"data"))
    with pytest.raises(TransientError, match="InternalError"):
        broken.complete_upload("f", upload_id, [part], crc64nvme=crc64(b"data"))


def test_p9_a_stream_that_ends_early_is_an_error(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)
    client.meta.events.register(
        "before-send.s3.GetObject", answer(200, b"short", {"content-length": "10"})
    )
    cut = S3Store(store.url, lambda: client)
    with pytest.raises(TransientError, match="ended after 5 of 10 bytes"):
        read(cut, "f")


def test_p5_an_odd_error_of_the_sdk_is_an_error_of_ours(
    weed: WeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """botocore raises AttributeError and the like about answers it can't read."""
    store = opened(weed, monkeypatch)
    client = connect(StoreOptions(endpoint_url=weed.endpoint_url), 4)

    def fail(**_: Any) -> None:
        raise AttributeError("'StreamingChecksumBody' object has no attribute 'strip'")

    client.meta.events.register("before-send.s3.PutObject", fail)
    odd = S3Store(store.url, lambda: client)
    with pytest.raises(TransientError, match="AttributeError") as caught:
        odd.put("f", Body.of_bytes(b"x"))
    assert caught.value.__cause__ is not None


def test_tags_reach_the_store_only_if_it_takes_them(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(moto, monkeypatch)
    without = Capabilities(
        conditional_put=True, checks_crc64nvme=True, tags=False, lists_uploads=True
    )
    options = StoreOptions(endpoint_url=moto.endpoint_url)
    untagged = open_store(store.url, options, capabilities=without)
    store.put("with", Body.of_bytes(b"x"), tag="pending")
    untagged.put("without", Body.of_bytes(b"x"), tag="pending")
    client = boto3.client("s3", endpoint_url=moto.endpoint_url)

    def tags(key: str) -> list[Any]:
        answer = client.get_object_tagging(Bucket=store.url.bucket, Key=store.url.prefix + key)
        return list(answer["TagSet"])

    assert tags("with") == [{"Key": "ckpt-tiering-state", "Value": "pending"}]
    assert tags("without") == []
    store.tag("with", "committed")
    assert tags("with") == [{"Key": "ckpt-tiering-state", "Value": "committed"}]


def answer(status: int, body: bytes, headers: dict[str, str] | None = None) -> Any:
    """Make a hook that answers a request instead of the server."""

    class Raw(io.BytesIO):
        def stream(self, *_: Any, **__: Any) -> Any:
            yield self.read()

    def hook(request: Any, **_: Any) -> AWSResponse:
        fields: Any = headers or {}
        return AWSResponse(request.url, status, fields, Raw(body))

    return hook
