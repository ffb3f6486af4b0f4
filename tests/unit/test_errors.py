from __future__ import annotations

import copy
import pickle

import pytest

from ckpt_tiering import errors
from ckpt_tiering.errors import CapacityError, CkptTieringError, ConfigError, ErrorKind

CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]
# Users' alerts match on these: add, never change.
KINDS = [
    "transient",
    "throttled",
    "credentials",
    "permission",
    "clock_skew",
    "corrupt",
    "conflict",
    "not_found",
    "no_such_bucket",
    "no_such_upload",
    "capacity",
    "object_too_large",
    "config",
    "path",
    "format",
    "save_failed",
    "timeout",
    "agent_lost",
    "agent_version",
    "permanent",
    "shard_missing",
]


def test_p5_the_kinds_are_frozen() -> None:
    assert [kind.value for kind in ErrorKind][: len(KINDS)] == KINDS
    assert len(ErrorKind) <= 30


@pytest.mark.parametrize("cls", CLASSES)
def test_p5_an_error_survives_the_way_to_another_process(cls: type[CkptTieringError]) -> None:
    error = cls("it broke", kind=ErrorKind.CLOCK_SKEW, hint="repair it", key="a/b", step=3)
    pickled = pickle.loads(pickle.dumps(error))  # noqa: TID251  our own bytes
    for again in (pickled, copy.copy(error)):
        assert type(again) is cls
        assert (again.message, again.kind, again.hint) == ("it broke", "clock_skew", "repair it")
        assert again.context == {"key": "a/b", "step": 3}
        assert str(again) == "it broke\n  hint: repair it"


@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_has_a_kind_and_needs_no_hint(cls: type[CkptTieringError]) -> None:
    error = cls("it broke")
    assert error.kind is cls.default_kind
    assert str(error) == "it broke"
    assert isinstance(error, CkptTieringError)


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("NotFoundError", LookupError),
        ("CapacityError", OSError),
        ("ConfigError", ValueError),
        ("FormatError", ValueError),
        ("WaitTimeoutError", TimeoutError),
        ("ThrottledError", errors.TransientError),
    ],
)
def test_handlers_of_builtin_errors_keep_working(name: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, name), builtin)


def test_an_os_error_of_ours_has_no_number_of_the_system() -> None:
    assert CapacityError("full").errno is None
    assert ConfigError("wrong").args == ("wrong",)
