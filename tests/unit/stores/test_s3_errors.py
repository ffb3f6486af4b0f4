from __future__ import annotations

import socket
import ssl
from typing import Any

import pytest
from botocore import exceptions as sdk
from urllib3.exceptions import NewConnectionError, ProtocolError

from ckpt_tiering.errors import (
    CapacityError,
    CkptTieringError,
    ConfigError,
    ConflictError,
    CredentialError,
    ErrorKind,
    IntegrityError,
    NotFoundError,
    SaveFailedError,
    StorePermissionError,
    ThrottledError,
    TransientError,
)
from ckpt_tiering.stores.base import ListsUploads, ObjectStore, TagsObjects
from ckpt_tiering.stores.s3_errors import IAM_ACTIONS, translate

KEY = "s3://bucket/run/saves/f"
URL = "https://user:secret@bucket.example.org:9000/run/f?uploadId=abc&X-Amz-Signature=f00d"


def answered(status: int, code: str = "", message: str = "", **details: str) -> sdk.ClientError:
    answer: Any = {
        "Error": {"Code": code or str(status), "Message": message, **details},
        "ResponseMetadata": {
            "HTTPStatusCode": status,
            "RequestId": "4442587FB7D0A2F9",
            "HTTPHeaders": {"date": "Tue, 01 Dec 2026 12:00:00 GMT"},
        },
    }
    return sdk.ClientError(answer, "PutObject")


TRANSIENT, PERMANENT = ErrorKind.TRANSIENT, ErrorKind.PERMANENT
ANSWERS = [
    (500, "InternalError", TransientError, TRANSIENT),
    (500, "", TransientError, TRANSIENT),
    (502, "", TransientError, TRANSIENT),
    (504, "", TransientError, TRANSIENT),
    (599, "NeverHeardOf", TransientError, TRANSIENT),
    (400, "RequestTimeout", TransientError, TRANSIENT),
    (400, "IncompleteBody", TransientError, TRANSIENT),
    (409, "ConditionalRequestConflict", TransientError, TRANSIENT),
    (409, "OperationAborted", TransientError, TRANSIENT),
    (200, "InternalError", TransientError, TRANSIENT),
    (503, "SlowDown", ThrottledError, ErrorKind.THROTTLED),
    (503, "", ThrottledError, ErrorKind.THROTTLED),
    (429, "", ThrottledError, ErrorKind.THROTTLED),
    (400, "Throttling", ThrottledError, ErrorKind.THROTTLED),
    (400, "ExpiredToken", CredentialError, ErrorKind.CREDENTIALS),
    (403, "InvalidAccessKeyId", CredentialError, ErrorKind.CREDENTIALS),
    (403, "SignatureDoesNotMatch", CredentialError, ErrorKind.CREDENTIALS),
    (400, "TokenRefreshRequired", CredentialError, ErrorKind.CREDENTIALS),
    (403, "RequestTimeTooSkewed", CredentialError, ErrorKind.CLOCK_SKEW),
    (403, "AccessDenied", StorePermissionError, ErrorKind.PERMISSION),
    (403, "", StorePermissionError, ErrorKind.PERMISSION),
    (404, "NoSuchBucket", NotFoundError, ErrorKind.NO_SUCH_BUCKET),
    (404, "NoSuchKey", NotFoundError, ErrorKind.NOT_FOUND),
    (404, "", NotFoundError, ErrorKind.NOT_FOUND),
    (404, "NoSuchUpload", NotFoundError, ErrorKind.NO_SUCH_UPLOAD),
    (400, "BadDigest", IntegrityError, ErrorKind.CORRUPT),
    (400, "InvalidDigest", IntegrityError, ErrorKind.CORRUPT),
    (400, "XAmzContentChecksumMismatch", IntegrityError, ErrorKind.CORRUPT),
    (400, "InvalidPart", IntegrityError, ErrorKind.CORRUPT),
    (416, "InvalidRange", IntegrityError, ErrorKind.CORRUPT),
    (412, "PreconditionFailed", ConflictError, ErrorKind.CONFLICT),
    (412, "", ConflictError, ErrorKind.CONFLICT),
    (304, "", ConflictError, ErrorKind.CONFLICT),
    (400, "EntityTooLarge", CapacityError, ErrorKind.OBJECT_TOO_LARGE),
    (507, "", CapacityError, ErrorKind.CAPACITY),
    (400, "EntityTooSmall", ConfigError, ErrorKind.CONFIG),
    (301, "PermanentRedirect", ConfigError, ErrorKind.CONFIG),
    (400, "AuthorizationHeaderMalformed", ConfigError, ErrorKind.CONFIG),
    (400, "KeyTooLongError", ConfigError, ErrorKind.PATH),
    (501, "NotImplemented", CkptTieringError, PERMANENT),
    (400, "InvalidPartOrder", CkptTieringError, PERMANENT),
    (403, "InvalidObjectState", CkptTieringError, PERMANENT),
    (400, "NeverHeardOf", CkptTieringError, PERMANENT),
]


@pytest.mark.parametrize(("status", "code", "error", "kind"), ANSWERS)
def test_p5_every_answer_of_a_store_has_a_reaction(
    status: int, code: str, error: type[CkptTieringError], kind: ErrorKind
) -> None:
    got = translate(answered(status, code), "put", KEY)
    assert type(got) is error
    assert got.kind is kind
    assert KEY in got.message
    assert str(status) in got.message
    assert got.context["request_id"] == "4442587FB7D0A2F9"


NETWORK = ConnectionResetError(104, "Connection reset by peer")
OTHERS = [
    (sdk.NoCredentialsError(), CredentialError, "NoCredentialsError"),
    (sdk.ProfileNotFound(profile="night"), CredentialError, "night"),
    (sdk.CredentialRetrievalError(provider="x", error_msg="secret"), CredentialError, "usable"),
    (sdk.NoRegionError(), ConfigError, "region"),
    (sdk.ParamValidationError(report="bad"), ConfigError, "bad"),
    (sdk.ReadTimeoutError(endpoint_url=URL), TransientError, "ReadTimeoutError"),
    (
        sdk.ConnectionClosedError(endpoint_url=URL, error=ProtocolError("aborted", NETWORK)),
        TransientError,
        "Connection reset by peer",
    ),
    (
        sdk.EndpointConnectionError(
            endpoint_url=URL, error=socket.gaierror(-2, "Name or service not known")
        ),
        TransientError,
        "Name or service not known",
    ),
    (sdk.ConnectTimeoutError(endpoint_url=URL), TransientError, "example.org:9000"),
    (
        sdk.SSLError(endpoint_url=URL, error=ssl.SSLEOFError(8, "EOF occurred")),
        TransientError,
        "EOF",
    ),
    (
        sdk.SSLError(
            endpoint_url=URL,
            error=ssl.SSLCertVerificationError(1, "certificate verify failed: self-signed"),
        ),
        ConfigError,
        "AWS_CA_BUNDLE",
    ),
    (sdk.IncompleteReadError(actual_bytes=5, expected_bytes=9), TransientError, "5 of 9 bytes"),
    (sdk.ResponseStreamingError(error=NETWORK), TransientError, "reset"),
    (AttributeError("no attribute 'strip'"), TransientError, "AttributeError"),
    (ValueError("odd XML " + URL), TransientError, "ValueError"),
]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    OTHERS,
    ids=[type(o[0]).__name__ + str(i) for i, o in enumerate(OTHERS)],
)
def test_p5_every_failure_without_an_answer_has_a_reaction(
    error: Exception, kind: type[CkptTieringError], text: str
) -> None:
    got = translate(error, "put_part", KEY)
    assert type(got) is kind
    assert text in str(got)


@pytest.mark.parametrize("error", [o[0] for o in OTHERS], ids=range(len(OTHERS)))
def test_p10_no_message_holds_a_query_or_a_password(error: Exception) -> None:
    text = str(translate(error, "put_part", KEY))
    for secret in ("uploadId", "Signature=", "secret", "f00d", "user:"):
        assert secret not in text


def test_p10_what_the_store_said_is_cleaned() -> None:
    said = (
        f"see {URL} of AKIAIOSFODNN7EXAMPLE, x-amz-security-token: IQoJb3 "
        "Signature=f00d " + "x" * 1000
    )
    text = str(translate(answered(400, "Odd", said), "put", KEY))
    for secret in ("uploadId", "AKIAIOSFODNN7EXAMPLE", "IQoJb3", "f00d", "user:secret"):
        assert secret not in text
    assert len(text) < 500


def test_p5_a_missing_permission_is_named_for_each_verb() -> None:
    verbs = {
        name
        for protocol in (ObjectStore, TagsObjects, ListsUploads)
        for name in vars(protocol)
        if not name.startswith("_") and name not in {"url", "close"}
    }
    assert set(IAM_ACTIONS) == verbs
    for verb, action in IAM_ACTIONS.items():
        assert f"allow {action} " in str(translate(answered(403), verb, KEY))


@pytest.mark.parametrize(
    ("details", "now_s", "said"),
    [
        (
            {"RequestTime": "20261201T130000Z", "ServerTime": "2026-12-01T12:00:00Z"},
            None,
            "3600 s ahead",
        ),
        ({}, 1796126340.0, "60 s behind"),
        ({}, None, "RequestTimeTooSkewed"),
        ({"RequestTime": "?", "ServerTime": "?"}, None, "RequestTimeTooSkewed"),
    ],
)
def test_p5_a_wrong_clock_is_measured(
    details: dict[str, str], now_s: float | None, said: str
) -> None:
    got = translate(answered(403, "RequestTimeTooSkewed", **details), "put", KEY, now_s=now_s)
    assert said in got.message


def test_an_error_of_ours_inside_of_theirs_comes_out() -> None:
    ours = IntegrityError("changed")
    assert translate(sdk.HTTPClientError(error=ours), "put", KEY) is ours
    capacity = CapacityError("full")  # an OSError, which urllib3 takes for one of the network
    wrapped = sdk.ConnectionClosedError(endpoint_url=URL, error=ProtocolError("aborted", capacity))
    assert translate(wrapped, "put", KEY) is capacity


def test_an_error_of_ours_that_is_only_being_handled_stays_out() -> None:
    theirs = sdk.ReadTimeoutError(endpoint_url=URL)
    theirs.__context__ = SaveFailedError("an older story")  # as `raise` does in an `except` block
    assert type(translate(theirs, "abort_upload", KEY)) is TransientError


def test_the_endpoint_is_named_without_its_credentials() -> None:
    cause = NewConnectionError(None, "refused")  # type: ignore[arg-type]
    got = translate(sdk.EndpointConnectionError(endpoint_url=URL, error=cause), "put", KEY)
    assert "https://bucket.example.org:9000 is" in (got.hint or "")
