"""The only place that turns errors of boto3 into those of `ckpt_tiering.errors`.

The message names the verb, the object and what the store said. It never holds credentials or query
strings: botocore puts whole URLs into its messages, so none of its messages is passed on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore import exceptions as sdk

from ckpt_tiering.errors import (
    CapacityError,
    CkptTieringError,
    ConfigError,
    ConflictError,
    CredentialError,
    ErrorKind,
    IntegrityError,
    NotFoundError,
    StorePermissionError,
    ThrottledError,
    TransientError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["IAM_ACTIONS", "translate"]

# HEAD and GET of a missing object are answered 403 unless the caller may list the bucket.
_READ = "s3:GetObject (and s3:ListBucket, without which a missing object is also answered 403)"
_WRITE = "s3:PutObject (and s3:PutObjectTagging where tags are on)"
IAM_ACTIONS: Mapping[str, str] = {
    "put": _WRITE,
    "head": _READ,
    "get": _READ,
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject",
    "create_upload": _WRITE,
    "put_part": "s3:PutObject",
    "list_parts": "s3:ListMultipartUploadParts",
    "complete_upload": "s3:PutObject",
    "abort_upload": "s3:AbortMultipartUpload",
    "tag": "s3:PutObjectTagging",
    "list_uploads": "s3:ListBucketMultipartUploads",
}

_CREDENTIALS = "renew the credentials; the work goes on with the new ones"
_CLOCK = "set the clock of this host (chrony, ntpd); the work goes on afterwards"
_REGION = "set region to the region of the bucket"
_CERTIFICATE = (
    "the certificate of the endpoint is not trusted: set AWS_CA_BUNDLE to the file of its "
    "authority, or check the host name of endpoint_url"
)


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What an error of the store means to us. ``{action}`` in the hint becomes the IAM action."""

    make: Callable[..., CkptTieringError]
    kind: ErrorKind | None = None
    hint: str | None = None


_TRANSIENT = _Meaning(TransientError)
_THROTTLED = _Meaning(ThrottledError)
_CREDENTIAL = _Meaning(CredentialError, hint=_CREDENTIALS)
_PERMISSION = _Meaning(
    StorePermissionError, hint="allow {action} in the policy of the bucket or of the role"
)
_CORRUPT = _Meaning(IntegrityError, hint="the bytes were damaged on their way; send them again")
_NOT_FOUND = _Meaning(NotFoundError)
_WRONG_REGION = _Meaning(ConfigError, hint=_REGION)
_TOO_LARGE = _Meaning(
    CapacityError, ErrorKind.OBJECT_TOO_LARGE, "shard the checkpoint into more files"
)
_NO_ROOM = _Meaning(CapacityError, hint="free space in the store or raise the quota")
_UNABLE = _Meaning(
    CkptTieringError, ErrorKind.PERMANENT, "run `ckpt-tiering doctor` to see what the store can do"
)

_CODES: dict[str, _Meaning] = {
    **dict.fromkeys(
        ("InternalError", "RequestTimeout", "IncompleteBody", "BadGateway", "GatewayTimeout"),
        _TRANSIENT,
    ),
    **dict.fromkeys(("OperationAborted", "ConditionalRequestConflict"), _TRANSIENT),
    **dict.fromkeys(
        (
            "SlowDown",
            "Throttling",
            "ThrottlingException",
            "ThrottledException",
            "RequestThrottled",
            "RequestThrottledException",
            "RequestLimitExceeded",
            "BandwidthLimitExceeded",
            "TooManyRequests",
            "TooManyRequestsException",
            "ServiceUnavailable",
        ),
        _THROTTLED,
    ),
    **dict.fromkeys(
        (
            "ExpiredToken",
            "ExpiredTokenException",
            "InvalidAccessKeyId",
            "InvalidClientTokenId",
            "InvalidSecurity",
            "InvalidToken",
            "MissingSecurityHeader",
            "RequestExpired",
            "SignatureDoesNotMatch",
            "TokenRefreshRequired",
            "UnrecognizedClientException",
        ),
        _CREDENTIAL,
    ),
    # A wrong clock stops the work like wrong credentials do: pause, report, go on when it is right.
    "RequestTimeTooSkewed": _Meaning(CredentialError, ErrorKind.CLOCK_SKEW, _CLOCK),
    **dict.fromkeys(
        ("AccessDenied", "AccessDeniedException", "AllAccessDisabled", "AccountProblem"),
        _PERMISSION,
    ),
    "NoSuchBucket": _Meaning(
        NotFoundError,
        ErrorKind.NO_SUCH_BUCKET,
        "create the bucket, or correct its name and endpoint_url",
    ),
    "NoSuchKey": _NOT_FOUND,
    "NoSuchUpload": _Meaning(NotFoundError, ErrorKind.NO_SUCH_UPLOAD),
    **dict.fromkeys(
        (
            "BadDigest",
            "InvalidDigest",
            "XAmzContentChecksumMismatch",
            "XAmzContentSHA256Mismatch",
        ),
        _CORRUPT,
    ),
    "InvalidPart": _Meaning(
        IntegrityError, hint="the store holds other parts than were sent; start the upload again"
    ),
    "InvalidRange": _Meaning(IntegrityError, hint="the object is shorter than its manifest says"),
    **dict.fromkeys(("PreconditionFailed", "NotModified"), _Meaning(ConflictError)),
    **dict.fromkeys(("EntityTooLarge", "MaxMessageLengthExceeded"), _TOO_LARGE),
    "EntityTooSmall": _Meaning(ConfigError, hint="set part_bytes to 5 MiB or more"),
    **dict.fromkeys(("QuotaExceeded", "InsufficientStorage", "XMinioStorageFull"), _NO_ROOM),
    **dict.fromkeys(
        (
            "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
            "PermanentRedirect",
            "TemporaryRedirect",
        ),
        _WRONG_REGION,
    ),
    "InvalidBucketName": _Meaning(ConfigError, hint="correct the bucket name in the store URL"),
    "KeyTooLongError": _Meaning(
        ConfigError, ErrorKind.PATH, "shorten the root of the run in the store URL"
    ),
    "InvalidObjectState": _Meaning(
        CkptTieringError, ErrorKind.PERMANENT, "the object is archived; restore it first"
    ),
    "NotImplemented": _UNABLE,
}

# For codes that are not in the table, and for answers without a body (HEAD).
_STATUSES: dict[int, _Meaning] = {
    301: _WRONG_REGION,
    304: _Meaning(ConflictError),  # some MinIO releases, where 412 is due
    307: _WRONG_REGION,
    401: _CREDENTIAL,
    403: _PERMISSION,
    404: _NOT_FOUND,
    408: _TRANSIENT,
    409: _TRANSIENT,
    412: _Meaning(ConflictError),
    413: _TOO_LARGE,
    416: _CODES["InvalidRange"],
    429: _THROTTLED,
    501: _UNABLE,
    503: _THROTTLED,
    507: _NO_ROOM,
}
_SERVER_ERROR = 500

_CREDENTIAL_ERRORS = (
    sdk.NoCredentialsError,
    sdk.PartialCredentialsError,
    sdk.CredentialRetrievalError,
    sdk.ProfileNotFound,
    sdk.LoginError,
    sdk.MetadataRetrievalError,
    sdk.NoAuthTokenError,
    sdk.RefreshWithMFAUnsupportedError,
    sdk.SSOError,
    sdk.TokenRetrievalError,
    sdk.UnknownCredentialError,
    sdk.ConfigNotFound,
    sdk.ConfigParseError,
)
_SECRETS = re.compile(
    r"\?\S*"  # query strings
    r"|//[^/\s@]+@"  # user:password@ in an address
    r"|\b(?:AKIA|ASIA|AROA)[A-Z0-9]{12,}"  # access key ids
    r"|(?i:(?:signature|credential|token|secret)\w*\s*[=:]\s*\S+)"
)
_MAX_SAID = 200


def translate(
    error: BaseException, op: str, key: str, *, now_s: float | None = None
) -> CkptTieringError:
    """Say in our words what an error of boto3, or of what it called, means.

    Pure. The caller raises the answer ``from`` the error. Errors that this package raised below
    boto3 (from `BodyReader.read`) are found inside of boto3's and returned as they are.

    Args:
        error: What a client call, or reading its answer, raised.
        op: Verb of `ObjectStore`; names the permission when one is missing.
        key: What the verb was applied to, as a person should read it.
        now_s: Seconds since the epoch, to measure how far this host's clock is off where the
            store's answer does not say it.
    """
    for inner in _chain(error):
        if isinstance(inner, CkptTieringError):
            return inner
    if isinstance(error, sdk.ClientError):
        return _from_answer(error, op, key, now_s)
    return _from_client(error, op, key)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it wraps: botocore and urllib3 keep that in different places.

    Not ``__context__``: a request that is made while another error is handled has that error there.
    """
    queue: list[Any] = [error]
    seen: set[int] = set()
    while queue:
        current = queue.pop(0)
        if not isinstance(current, BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        queue += [
            getattr(current, "kwargs", {}).get("error"),
            current.__cause__,
            *current.args,
        ]


def _from_answer(
    error: sdk.ClientError, op: str, key: str, now_s: float | None
) -> CkptTieringError:
    answer: Mapping[str, Any] = error.response
    details: Mapping[str, Any] = answer.get("Error", {})
    about: Mapping[str, Any] = answer.get("ResponseMetadata", {})
    status = int(about.get("HTTPStatusCode", 0))
    code, said = str(details.get("Code", "")), str(details.get("Message", ""))
    meaning = _meaning(code, said, status)
    text = f"{op} of {key} failed: the store answered {status}"
    if code and code != str(status):
        text += f" {code}"
    if said and said != code:
        text += f" ({_clean(said)})"
    if code == "RequestTimeTooSkewed":
        text += _clock_offset(details, about, now_s)
    hint = meaning.hint and meaning.hint.format(action=IAM_ACTIONS.get(op, "the request"))
    return meaning.make(
        text,
        kind=meaning.kind,
        hint=hint,
        op=op,
        key=key,
        status=status,
        code=code,
        request_id=about.get("RequestId"),
    )


def _meaning(code: str, said: str, status: int) -> _Meaning:
    if code == "InvalidRequest" and "checksum" in said.lower():
        return _CORRUPT
    known = _CODES.get(code) or _STATUSES.get(status)
    if known is not None:
        return known
    return _TRANSIENT if status >= _SERVER_ERROR else _Meaning(CkptTieringError)


def _clean(said: str) -> str:
    said = _SECRETS.sub("[...]", " ".join(said.split()))
    return said if len(said) <= _MAX_SAID else said[:_MAX_SAID] + "..."


def _clock_offset(details: Mapping[str, Any], about: Mapping[str, Any], now_s: float | None) -> str:
    """Say how far this host's clock is off: by the two times in the answer, or its Date header."""
    try:
        if "RequestTime" in details and "ServerTime" in details:
            sent = datetime.fromisoformat(str(details["RequestTime"]))
            there = datetime.fromisoformat(str(details["ServerTime"]))
            offset_s = (sent - there).total_seconds()
        elif now_s is not None:
            date = about.get("HTTPHeaders", {})["date"]
            offset_s = now_s - parsedate_to_datetime(date).timestamp()
        else:
            return ""
    except (KeyError, TypeError, ValueError):
        return ""
    direction = "ahead of" if offset_s > 0 else "behind"
    return f"; the clock of this host is {abs(offset_s):.0f} s {direction} the store's"


def _from_client(error: BaseException, op: str, key: str) -> CkptTieringError:
    """Translate what botocore or the network raised, without an answer of the store."""
    text, name = f"{op} of {key} failed: ", type(error).__name__
    if isinstance(error, _CREDENTIAL_ERRORS):
        # These messages name profiles and files; those of processes may hold anything.
        why = _clean(str(error)) if isinstance(error, sdk.ProfileNotFound) else name
        return CredentialError(
            f"{text}no usable credentials ({why})",
            hint="set AWS_* variables, a profile or an instance role; the work goes on with them",
            op=op,
            key=key,
        )
    if isinstance(error, sdk.NoRegionError):
        return ConfigError(f"{text}no region is configured", hint=_REGION, op=op, key=key)
    if isinstance(error, sdk.ParamValidationError | sdk.InvalidRegionError):
        return ConfigError(f"{text}{_clean(str(error))}", op=op, key=key)
    if any("certificate" in str(e).lower() for e in _chain(error) if _is_tls(e)):
        return ConfigError(
            f"{text}the certificate of {_endpoint(error)} could not be verified",
            hint=_CERTIFICATE,
            op=op,
            key=key,
        )
    hint = None
    if isinstance(error, sdk.EndpointConnectionError | sdk.ConnectTimeoutError):
        hint = f"check that {_endpoint(error)} is the right endpoint and can be reached from here"
    return TransientError(f"{text}{_what_broke(error)}", hint=hint, op=op, key=key)


def _is_tls(error: BaseException) -> bool:
    return isinstance(error, sdk.SSLError) or "SSL" in type(error).__name__


def _endpoint(error: BaseException) -> str:
    url = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", "")))
    if not url.hostname:
        return "the endpoint"
    return f"{url.scheme}://{url.hostname}" + (f":{url.port}" if url.port else "")


def _what_broke(error: BaseException) -> str:
    """Name the innermost cause by its type; the messages on the way hold URLs."""
    if isinstance(error, sdk.IncompleteReadError):
        lengths = error.kwargs
        return f"it ended after {lengths['actual_bytes']} of {lengths['expected_bytes']} bytes"
    name = type(error).__name__
    causes = [e for e in _chain(error) if isinstance(e, OSError) and e.strerror]
    return f"{name} ({causes[-1].strerror})" if causes else name
