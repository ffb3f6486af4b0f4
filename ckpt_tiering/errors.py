"""One error tree, grouped by what the person or program that catches it does next.

::

    CkptTieringError
    ├── TransientError          try again, later and less often
    │   └── ThrottledError      the store asks everybody to slow down
    ├── CredentialError         get new credentials; the work itself is fine
    ├── StorePermissionError    change a policy; names the permission that is missing
    ├── IntegrityError          bytes differ from their digest: never hand them out
    ├── ConflictError           somebody else wrote what we were about to write
    ├── NotFoundError           (LookupError) nothing there; says where was looked
    ├── CapacityError           (OSError) no room, or over a limit of the store
    ├── ConfigError             (ValueError) the call or the configuration is wrong
    ├── FormatError             (ValueError) bytes from a store or a disk are not what they claim
    ├── SaveFailedError         a save failed for good in the background
    ├── WaitTimeoutError        (TimeoutError) not done within the bound that was given
    └── AgentError              the agent is not there, not answering, or of another version

Every error has a ``kind``, a machine-readable code that is only ever added to, and a ``hint``: what
a person can do about it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

__all__ = [
    "AgentError",
    "CapacityError",
    "CkptTieringError",
    "ConfigError",
    "ConflictError",
    "CredentialError",
    "ErrorKind",
    "FormatError",
    "IntegrityError",
    "NotFoundError",
    "SaveFailedError",
    "StorePermissionError",
    "ThrottledError",
    "TransientError",
    "WaitTimeoutError",
]


class ErrorKind(StrEnum):
    """Machine-readable codes. Append only: users' alerts match on them."""

    TRANSIENT = "transient"
    THROTTLED = "throttled"
    CREDENTIALS = "credentials"
    PERMISSION = "permission"
    CLOCK_SKEW = "clock_skew"
    CORRUPT = "corrupt"
    CONFLICT = "conflict"
    NOT_FOUND = "not_found"
    NO_SUCH_BUCKET = "no_such_bucket"
    NO_SUCH_UPLOAD = "no_such_upload"
    CAPACITY = "capacity"
    OBJECT_TOO_LARGE = "object_too_large"
    CONFIG = "config"
    PATH = "path"
    FORMAT = "format"
    SAVE_FAILED = "save_failed"
    TIMEOUT = "timeout"
    AGENT_LOST = "agent_lost"
    AGENT_VERSION = "agent_version"
    PERMANENT = "permanent"
    SHARD_MISSING = "shard_missing"


class CkptTieringError(Exception):
    """Base of all errors of this package.

    Args:
        message: What happened, naming the value, file or key it happened to.
        kind: Machine-readable code; each class has a default.
        hint: What to do about it, as one imperative sentence.
        context: Where it happened (``op``, ``rank``, ``step``, ``key``, ...), kept as attributes'
            values for events and logs.
    """

    default_kind = ErrorKind.PERMANENT

    def __init__(
        self,
        message: str,
        *,
        kind: ErrorKind | None = None,
        hint: str | None = None,
        **context: Any,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind or self.default_kind
        self.hint = hint
        self.context = context

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.kind, self.hint, self.context)


def _rebuild(
    cls: type[CkptTieringError],
    message: str,
    kind: ErrorKind,
    hint: str | None,
    context: dict[str, Any],
) -> CkptTieringError:
    return cls(message, kind=kind, hint=hint, **context)


class TransientError(CkptTieringError):
    """A request failed in a way that a later one may not."""

    default_kind = ErrorKind.TRANSIENT


class ThrottledError(TransientError):
    """The store answered that requests come too fast."""

    default_kind = ErrorKind.THROTTLED


class CredentialError(CkptTieringError):
    """Credentials are missing, expired or refused."""

    default_kind = ErrorKind.CREDENTIALS


class StorePermissionError(CkptTieringError):
    """The store knows who we are and says no."""

    default_kind = ErrorKind.PERMISSION


class IntegrityError(CkptTieringError):
    """Bytes differ from the digest taken when they were staged."""

    default_kind = ErrorKind.CORRUPT


class ConflictError(CkptTieringError):
    """Another writer holds what we were about to write, with other contents."""

    default_kind = ErrorKind.CONFLICT


class NotFoundError(CkptTieringError, LookupError):
    """What was asked for is not there; the message says where was looked."""

    default_kind = ErrorKind.NOT_FOUND


class CapacityError(CkptTieringError, OSError):
    """No room on a disk, or over a limit of the store."""

    default_kind = ErrorKind.CAPACITY


class ConfigError(CkptTieringError, ValueError):
    """The configuration or the call is wrong."""

    default_kind = ErrorKind.CONFIG


class FormatError(CkptTieringError, ValueError):
    """Bytes from a store or a disk are not what they claim to be."""

    default_kind = ErrorKind.FORMAT


class SaveFailedError(CkptTieringError):
    """A save failed for good after it was staged."""

    default_kind = ErrorKind.SAVE_FAILED


class WaitTimeoutError(CkptTieringError, TimeoutError):
    """Something was not done within the bound that was given."""

    default_kind = ErrorKind.TIMEOUT


class AgentError(CkptTieringError):
    """The agent is not there, not answering, or of another version."""

    default_kind = ErrorKind.AGENT_LOST
