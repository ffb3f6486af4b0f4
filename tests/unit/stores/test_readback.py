from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model.digest import PartCrc, crc64
from ckpt_tiering.stores.base import ObjectInfo
from ckpt_tiering.stores.readback import PutReadback, UploadReadback, classify_put, classify_upload

DATA, OTHER, LONGER = b"data", b"date", b"data!"
SENT = PartCrc(len(DATA), crc64(DATA))


def seen(data: bytes, *, crc: int | None = None, writer: str | None = None) -> ObjectInfo:
    return ObjectInfo(key="k", size_bytes=len(data), etag="e", crc64nvme=crc, writer=writer)


PUTS = [
    # what is there, its bytes if read, the answer
    (None, None, PutReadback.ABSENT),
    (seen(DATA, crc=crc64(DATA), writer="me"), None, PutReadback.OURS),
    (seen(DATA, writer="me"), DATA, PutReadback.OURS),
    (seen(DATA, crc=crc64(DATA), writer="you"), None, PutReadback.SAME_BYTES),
    (seen(DATA, crc=crc64(DATA)), None, PutReadback.SAME_BYTES),
    (seen(DATA), DATA, PutReadback.SAME_BYTES),
    (seen(DATA, writer="me"), None, PutReadback.UNKNOWN),
    (seen(LONGER, writer="me"), None, PutReadback.FOREIGN),
    (seen(OTHER, crc=crc64(OTHER), writer="me"), None, PutReadback.FOREIGN),
    (seen(OTHER, writer="me"), OTHER, PutReadback.FOREIGN),
    # The bytes outrank what the store says of them.
    (seen(DATA, crc=crc64(DATA), writer="me"), OTHER, PutReadback.FOREIGN),
    (seen(DATA, crc=crc64(OTHER), writer="me"), DATA, PutReadback.OURS),
]


@pytest.mark.parametrize(("there", "data", "answer"), PUTS)
def test_p4_a_lost_reply_of_a_put(
    there: ObjectInfo | None, data: bytes | None, answer: PutReadback
) -> None:
    assert classify_put(SENT, "me", there, data) is answer


UPLOADS = [
    (None, UploadReadback.ABSENT),
    (seen(DATA, crc=crc64(DATA)), UploadReadback.DONE),
    (seen(DATA), UploadReadback.UNKNOWN),
    (seen(LONGER, crc=crc64(DATA)), UploadReadback.FOREIGN),
    (seen(OTHER, crc=crc64(OTHER)), UploadReadback.FOREIGN),
]


@pytest.mark.parametrize(("there", "answer"), UPLOADS)
def test_p4_a_lost_reply_of_a_completion(there: ObjectInfo | None, answer: UploadReadback) -> None:
    assert classify_upload(SENT.size_bytes, SENT.crc, there) is answer


@given(
    sent=st.binary(max_size=8),
    there=st.binary(max_size=8),
    reports=st.booleans(),
    read=st.booleans(),
    writer=st.sampled_from([None, "me", "you"]),
)
def test_p4_success_is_never_claimed_without_proof(
    sent: bytes, there: bytes, reports: bool, read: bool, writer: str | None
) -> None:
    info = seen(there, crc=crc64(there) if reports else None, writer=writer)
    expected = PartCrc(len(sent), crc64(sent))
    put = classify_put(expected, "me", info, there if read else None)
    if put in {PutReadback.OURS, PutReadback.SAME_BYTES}:
        assert sent == there
        assert reports or read
    upload = classify_upload(len(sent), crc64(sent), info)
    if upload is UploadReadback.DONE:
        assert sent == there
        assert reports
