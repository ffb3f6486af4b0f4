"""Finds out what a store really does, with throw-away keys.

Stores differ, and some lie: they answer 200 to a wrong checksum or overwrite in spite of
``If-None-Match``. So nothing is believed that was not seen, and what was not seen is absent.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tiering.errors import (
    CkptTieringError,
    CredentialError,
    ErrorKind,
    IntegrityError,
    TransientError,
)
from ckpt_tiering.model.layout import PROBE_PREFIX
from ckpt_tiering.stores.base import (
    AlreadyExists,
    Capabilities,
    Completed,
    CompletedPart,
    ListsUploads,
    ObjectStore,
    OpenUpload,
    TagsObjects,
    UploadGone,
)
from ckpt_tiering.stores.body import Body, BodyReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["NEEDED", "Finding", "ProbeReport", "probe"]

_DATA = b"ckpt-tiering probe: may be deleted"
_OTHER = b"ckpt-tiering probe: must not be seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check.

    Attributes:
        check: Name of the check, stable.
        ok: Whether the store does it.
        detail: What was seen.
        lost: What does not work, or works less well, when it is not ok.
    """

    check: str
    ok: bool
    detail: str
    lost: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """What a probe found.

    Attributes:
        capabilities: For opening the store again.
        findings: All checks, in the order they were made.
        usable: Whether checkpoints can be stored and restored at all.
    """

    capabilities: Capabilities
    findings: tuple[Finding, ...]
    usable: bool


# What is lost by each check that fails.
_LOST = {
    "put": "checkpoints can't be stored",
    "head": "uploads can't be verified, so that no checkpoint becomes durable",
    "get": "checkpoints can't be restored",
    "list": "checkpoints can't be found",
    "conditional_put": "commits rest on manifests being the same whoever writes them",
    "checksum_refused": "durability is proven by reading back, which takes time and traffic",
    "checksum_reported": "durability is proven by reading back, which takes time and traffic",
    "multipart": "files of more than one part can't be stored",
    "list_parts": "an interrupted upload starts over instead of going on",
    "multipart_checksum_refused": "durability is proven by reading back: time and traffic",
    "multipart_checksum_reported": "durability is proven by reading back: time and traffic",
    "abort_upload": "parts of given-up uploads stay and cost until a lifecycle rule ends them",
    "tags": "lifecycle rules can't tell committed data from what a dead job left",
    "list_uploads": "unknown uploads of dead jobs are not found; only recorded ones are ended",
    "delete": "nothing is ever deleted: retention and clean-up don't work",
}
NEEDED = ("put", "head", "get", "list", "multipart")


class _Lie(Body):
    """A body that arrives with another checksum than it has."""

    __slots__ = ()

    def open(self) -> BodyReader:
        return _LyingReader(self)


class _LyingReader(BodyReader):
    def _compare(self) -> None:
        pass


class _NotSoError(Exception):
    """The store answered something else than it should."""


@dataclass(slots=True)
class _Probe:
    store: ObjectStore
    root: str
    findings: list[Finding] = field(default_factory=list)
    uploads: list[OpenUpload] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        """Return a key below the probe's own prefix, to be deleted at the end."""
        key = self.root + name
        self.keys.append(key)
        return key

    def open_upload(self, name: str) -> OpenUpload:
        """Open an upload, to be aborted at the end."""
        key = self.key(name)
        upload = OpenUpload(key, self.store.create_upload(key))
        self.uploads.append(upload)
        return upload

    def check(self, name: str, run: Callable[[], str]) -> bool:
        """Run one check; what the store can't or may not do becomes a finding."""
        try:
            found = Finding(check=name, ok=True, detail=run(), lost="")
        except (CredentialError, TransientError):
            raise
        except CkptTieringError as error:
            if error.kind is ErrorKind.NO_SUCH_BUCKET:
                raise
            found = Finding(check=name, ok=False, detail=str(error), lost=_LOST[name])
        except _NotSoError as error:
            found = Finding(check=name, ok=False, detail=str(error), lost=_LOST[name])
        self.findings.append(found)
        return found.ok

    def ok(self, *names: str) -> bool:
        """Return whether all of these checks were made and were good."""
        good = {finding.check for finding in self.findings if finding.ok}
        return good.issuperset(names)


def probe(store: ObjectStore, token: str) -> ProbeReport:
    """Try everything that is needed of a store, on keys below ``probe/<token>/``; then clean up.

    Makes about 25 small requests, one after another.

    Args:
        store: The store, opened without capabilities.
        token: Unique to this call, so that probes at the same time don't meet.

    Raises:
        CredentialError: Nothing can be found out.
        NotFoundError: There is no such bucket.
        TransientError: A request failed in a way that a later one may not; probe again, with
            another token.
    """
    run = _Probe(store, f"{PROBE_PREFIX}{token}/")
    with _cleaned_up(run):
        _probe_objects(run)
        if run.ok("put"):
            _probe_promises(run)
            _probe_multipart(run)
            _probe_extras(run)
    capabilities = Capabilities(
        conditional_put=run.ok("conditional_put"),
        checks_crc64nvme=run.ok(
            "checksum_refused",
            "checksum_reported",
            "multipart_checksum_refused",
            "multipart_checksum_reported",
        ),
        tags=run.ok("tags"),
        lists_uploads=run.ok("list_uploads"),
    )
    return ProbeReport(
        capabilities=capabilities, findings=tuple(run.findings), usable=run.ok(*NEEDED)
    )


@contextmanager
def _cleaned_up(run: _Probe) -> Iterator[None]:
    """Delete and abort whatever happened; the deletion at the end is itself the check."""
    try:
        yield
    except BaseException:
        _quietly(lambda: _clean_up(run))  # the error that is under way says more
        raise
    run.check("delete", lambda: _clean_up(run))


def _quietly(action: Callable[[], object]) -> None:
    try:
        action()
    except (CkptTieringError, _NotSoError):
        return


def _clean_up(run: _Probe) -> str:
    for upload in run.uploads:
        _quietly(partial(run.store.abort_upload, upload.key, upload.upload_id))
    failures = run.store.delete(run.keys)
    if failures:
        raise _NotSoError("; ".join(f"{f.key}: {f.reason}" for f in failures))
    left = [key for key in run.keys if run.store.head(key) is not None] if run.ok("head") else []
    if left:
        raise _NotSoError(f"still there after deletion: {', '.join(left)}")
    return f"deleted {len(run.keys)} objects"


def _read(run: _Probe, key: str) -> bytes:
    return b"".join(run.store.get(key))


def _expect(condition: bool, seen: str) -> None:
    if not condition:
        raise _NotSoError(seen)


def _probe_objects(run: _Probe) -> None:
    # The key has what `encode_path` may put into one, and the escapes that servers trip over.
    key = run.key("plain=1/a%20b%2Bc")
    body = Body.of_bytes(_DATA, "probe")

    def put() -> str:
        run.store.put(key, body, writer="probe")
        return f"wrote {len(_DATA)} bytes"

    def head() -> str:
        seen = run.store.head(key)
        _expect(seen is not None and seen.size_bytes == len(_DATA), f"HEAD says {seen}")
        return "reports the size" + ("" if seen and seen.writer == "probe" else ", no metadata")

    def get() -> str:
        _expect(_read(run, key) == _DATA, "other bytes came back")
        _expect(b"".join(run.store.get(key, 3, 9)) == _DATA[3:9], "a range is not the range")
        return "whole and by range"

    def list_() -> str:
        keys = [info.key for info in run.store.list(run.root)]
        _expect(keys == [key], f"listed {keys}")
        return "sees a new object at once"

    if run.check("put", put):
        run.check("head", head)
        run.check("get", get)
        run.check("list", list_)


def _probe_promises(run: _Probe) -> None:
    """Check what the safety of a commit, and of a verification, can rest on."""

    def conditional() -> str:
        key = run.key("conditional")
        run.store.put(key, Body.of_bytes(_DATA), if_absent=True)
        second = run.store.put(key, Body.of_bytes(_OTHER), if_absent=True)
        _expect(isinstance(second, AlreadyExists), "a second PUT with If-None-Match was accepted")
        _expect(_read(run, key) == _DATA, "the store answered 412 and overwrote the object")
        return "refuses to overwrite"

    def refused() -> str:
        _expect_refused(lambda: run.store.put(run.key("lie"), _lie()), "an object")
        return "refuses an object with a wrong CRC64NVME"

    def reported() -> str:
        key = run.key("checksum")
        run.store.put(key, Body.of_bytes(_DATA))
        return _expect_checksum(run, key)

    run.check("conditional_put", conditional)
    run.check("checksum_refused", refused)
    run.check("checksum_reported", reported)


def _probe_multipart(run: _Probe) -> None:
    body = Body.of_bytes(_DATA)

    def multipart() -> str:
        upload = run.open_upload("multipart")
        _complete(run, upload, body.checksum.crc)
        _expect(_read(run, upload.key) == _DATA, "other bytes came back")
        return "create, part, complete"

    def list_parts() -> str:
        upload = run.open_upload("parts")
        etag = run.store.put_part(upload.key, upload.upload_id, 2, body)
        parts = run.store.list_parts(upload.key, upload.upload_id)
        _expect(not isinstance(parts, UploadGone), "an open upload is said to be gone")
        seen = [] if isinstance(parts, UploadGone) else list(parts)
        good = len(seen) == 1 and (seen[0].number, seen[0].size_bytes) == (2, len(_DATA))
        _expect(good and seen[0].etag == etag, f"listed {seen}")
        return "lists the parts of an open upload"

    def refused() -> str:
        part = run.open_upload("lying-part")
        _expect_refused(lambda: run.store.put_part(part.key, part.upload_id, 1, _lie()), "a part")
        whole = run.open_upload("lying-whole")
        _expect_refused(lambda: _complete(run, whole, body.checksum.crc ^ 1), "an upload")
        return "refuses parts and uploads with a wrong CRC64NVME"

    def abort() -> str:
        upload = run.open_upload("aborted")
        run.store.abort_upload(upload.key, upload.upload_id)
        gone = run.store.list_parts(upload.key, upload.upload_id)
        _expect(isinstance(gone, UploadGone) or not gone, "an aborted upload has parts")
        return "drops the parts"

    if run.check("multipart", multipart):
        run.check("list_parts", list_parts)
        run.check("multipart_checksum_refused", refused)
        reported = run.root + "multipart"
        run.check("multipart_checksum_reported", lambda: _expect_checksum(run, reported))
        run.check("abort_upload", abort)


def _probe_extras(run: _Probe) -> None:
    store = run.store

    def tags() -> str:
        _expect(isinstance(store, TagsObjects), "not a verb of this store")
        key = run.key("tagged")
        store.put(key, Body.of_bytes(_DATA), tag="pending")
        assert isinstance(store, TagsObjects)
        _expect(store.tag(key, "committed"), "an object that is there is said to be missing")
        return "at creation and afterwards"

    def list_uploads() -> str:
        _expect(isinstance(store, ListsUploads), "not a verb of this store")
        upload = run.open_upload("listed")
        assert isinstance(store, ListsUploads)
        _expect(upload in store.list_uploads(run.root), "an open upload is not listed")
        return "lists open uploads"

    run.check("tags", tags)
    run.check("list_uploads", list_uploads)


def _lie() -> Body:
    true = Body.of_bytes(_DATA)
    return _Lie(true.pieces, Body.of_bytes(_OTHER[: len(_DATA)]).checksum, "probe")


def _complete(run: _Probe, upload: OpenUpload, crc: int) -> None:
    body = Body.of_bytes(_DATA)
    etag = run.store.put_part(upload.key, upload.upload_id, 1, body)
    if isinstance(etag, UploadGone):
        raise _NotSoError("an open upload is said to be gone")
    part = CompletedPart(1, etag, body.checksum.crc)
    done = run.store.complete_upload(upload.key, upload.upload_id, [part], crc64nvme=crc)
    _expect(isinstance(done, Completed), "an open upload is said to be gone")


def _expect_refused(action: Callable[[], object], what: str) -> None:
    try:
        action()
    except IntegrityError:
        return
    raise _NotSoError(f"accepted {what} with a wrong CRC64NVME")


def _expect_checksum(run: _Probe, key: str) -> str:
    seen = run.store.head(key)
    crc = None if seen is None else seen.crc64nvme
    _expect(crc is not None, "HEAD reports no CRC64NVME")
    _expect(crc == Body.of_bytes(_DATA).checksum.crc, f"HEAD reports a wrong CRC64NVME: {crc}")
    return "HEAD reports the right CRC64NVME"
