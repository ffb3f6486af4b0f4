from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_tiering.errors import (
    CredentialError,
    ErrorKind,
    NotFoundError,
    StorePermissionError,
    TransientError,
)
from ckpt_tiering.stores.base import Capabilities, ObjectStore
from ckpt_tiering.stores.memory import MemoryStore
from ckpt_tiering.stores.probe import ProbeReport, probe
from ckpt_tiering.testing.faults import Fault, FaultyStore, RecordingStore

EVERYTHING = Capabilities(
    conditional_put=True, checks_crc64nvme=True, tags=True, lists_uploads=True
)


def failed(report: ProbeReport) -> set[str]:
    return {finding.check for finding in report.findings if not finding.ok}


def is_clean(store: ObjectStore) -> bool:
    inner = store.inner if isinstance(store, FaultyStore) else store
    assert isinstance(inner, MemoryStore)
    return not list(inner.list("")) and not inner.list_uploads("")


@pytest.mark.parametrize(
    ("without", "checks"),
    [
        ({}, set()),
        ({"conditional_put": False}, {"conditional_put"}),
        (
            {"checks_crc64nvme": False},
            {
                "checksum_refused",
                "checksum_reported",
                "multipart_checksum_refused",
                "multipart_checksum_reported",
            },
        ),
        ({"tags": False}, {"tags"}),
    ],
    ids=lambda names: (
        "+".join(sorted(names)) or "nothing"
    ),  # a set's own text differs from one process to the next
)
def test_p3_the_probe_finds_what_a_store_does_not_do(
    without: dict[str, bool], checks: set[str]
) -> None:
    behaves = replace(EVERYTHING, **without)
    store = MemoryStore(behaves=behaves)
    report = probe(store, "t")
    assert report.capabilities == behaves
    assert failed(report) == checks
    assert report.usable
    assert is_clean(store)
    assert all(finding.lost for finding in report.findings if not finding.ok)


def test_a_store_that_lists_no_uploads() -> None:
    report = probe(MemoryStore(behaves=replace(EVERYTHING, lists_uploads=False)), "t")
    assert not report.capabilities.lists_uploads
    assert failed(report) == {"list_uploads"}


@pytest.mark.parametrize(
    ("verb", "check", "usable"),
    [
        ("head", "head", False),
        ("list", "list", False),
        ("create_upload", "multipart", False),
        ("tag", "tags", True),
        ("list_uploads", "list_uploads", True),
        ("delete", "delete", True),
        ("list_parts", "list_parts", True),
    ],
)
def test_p5_a_missing_permission_is_a_finding(verb: str, check: str, usable: bool) -> None:
    def denied() -> Exception:
        return StorePermissionError("denied", hint="allow s3:This")

    store = FaultyStore(MemoryStore(), [Fault(verb=verb, nth=None, error=denied)])
    report = probe(store, "t")
    assert report.usable == usable
    (finding,) = [f for f in report.findings if f.check == check]
    assert not finding.ok
    assert "allow s3:This" in finding.detail
    assert finding.lost


def test_a_store_that_may_not_be_written_has_one_finding_and_the_deletion() -> None:
    fault = Fault(verb="put", nth=None, error=lambda: StorePermissionError("denied"))
    report = probe(FaultyStore(MemoryStore(), [fault]), "t")
    assert [finding.check for finding in report.findings] == ["put", "delete"]
    assert not report.usable


@pytest.mark.parametrize("verb", ["put", "head", "get", "put_part", "complete_upload", "tag"])
@pytest.mark.parametrize(
    "error",
    [
        CredentialError("expired"),
        TransientError("timeout"),
        NotFoundError("no bucket", kind=ErrorKind.NO_SUCH_BUCKET),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_says_nothing_of_the_store_comes_out_and_leaves_nothing(
    verb: str, error: Exception
) -> None:
    store = FaultyStore(MemoryStore(), [Fault(verb=verb, when="after", error=lambda: error)])
    with pytest.raises(type(error)):
        probe(store, "t")
    assert is_clean(store)


def test_p9_a_store_that_damages_bytes_is_not_usable() -> None:
    store = FaultyStore(MemoryStore(), [Fault(verb="get", when="flip")])
    assert not probe(store, "t").usable


def test_the_probe_touches_only_its_own_keys() -> None:
    store = RecordingStore(MemoryStore())
    probe(store, "token-1")
    assert {
        part.startswith("probe/token-1/") for call in store.calls for part in call.key.split(",")
    } == {True}
