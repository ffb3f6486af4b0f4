"""An S3 server that costs next to nothing, so that the clients are what is measured.

    python -m benchmarks.sink    # prints its port; lives as long as its stdin

It speaks enough of S3 for ours and for the rivals, and takes every checksum that it is sent or that
AWS would take, and refuses a wrong one. Bodies longer than ``--keep-bytes`` are then discarded, so
that reading them back is an error (501) and nothing else. It checks no signatures and listens on
loopback only. Meant to stand for a *remote* store: it takes the last CPU at low priority.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from wsgiref.handlers import format_date_time

from benchmarks.bucket import ALGORITHMS, Bucket, Received, S3Error, Stored, Upload
from benchmarks.sink_body import BLOCK_BYTES, CHECKSUM, Incoming, UnreadableError, claims_of
from benchmarks.sink_xml import (
    deletion_result,
    error_body,
    keys_to_delete,
    list_of_objects,
    list_of_parts,
    list_of_uploads,
    named_parts,
    tag_set,
    tags_of,
    xml,
)
from ckpt_tiering.clock import SystemClock

__all__ = ["Sink"]

CLOCK = SystemClock()
KEEP_BYTES = 1 << 20


class Link:
    """Lets bytes through at a rate, shared by all connections."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def passed(self, num_bytes: int) -> None:
        """Wait until these bytes would have arrived."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            now = CLOCK.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        CLOCK.sleep(wait_s)


class Sink(ThreadingHTTPServer):
    """The server; one thread a connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, keep_bytes: int, bytes_per_s: float | None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.keep_bytes = keep_bytes
        self.link = Link(bytes_per_s)
        self.buckets: dict[str, Bucket] = {}

    def bucket(self, name: str) -> Bucket:
        """Return a bucket that was created."""
        try:
            return self.buckets[name]
        except KeyError:
            raise S3Error(404, "NoSuchBucket", f"there is no bucket {name}") from None

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients may hang up when they like; anything else is worth a trace."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    """One connection: reads a request whole, then acts, then answers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Sink

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def setup(self) -> None:
        """Make the one buffer that all bodies of this connection go through."""
        super().setup()
        self._buffer = memoryview(bytearray(BLOCK_BYTES))

    # --- dispatch ----------------------------------------------------------------------------

    def _serve(self) -> None:
        url = urlsplit(self.path)
        self._query = dict(parse_qsl(url.query, keep_blank_values=True))
        self._name, self._key = self._address(url.path)
        try:
            self._body = self._received()
            if self._key:
                self._on_key()
            else:
                self._on_bucket()
        except S3Error as error:
            self._answer(error_body(error), error.status)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815  http.server's names

    def _address(self, path: str) -> tuple[str, str]:
        """Find bucket and key, by path or by the host's name (``bucket.localhost``)."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        if host.endswith(".localhost"):
            return host.removesuffix(".localhost"), unquote(path[1:])
        name, _, key = path[1:].partition("/")
        return unquote(name), unquote(key)

    def _on_bucket(self) -> None:
        match self.command:
            case "PUT":
                self.server.buckets.setdefault(self._name, Bucket(CLOCK.now))
                self._answer()
            case "POST" if "delete" in self._query:
                self._delete_objects()
            case "HEAD":
                self.server.bucket(self._name)
                self._answer()
            case "GET" if "location" in self._query:
                self._answer(xml("LocationConstraint", ""))
            case "GET" if "uploads" in self._query:
                prefix = self._query.get("prefix", "")
                uploads = self.server.bucket(self._name).uploads_below(prefix)
                self._answer(list_of_uploads(self._name, prefix, uploads))
            case "GET" if self._query.get("list-type") == "2":
                self._answer(list_of_objects(self._name, self._bucket.below, self._query))
            case _:
                raise self._unknown()

    def _on_key(self) -> None:
        match self.command:
            case _ if "uploadId" in self._query:
                self._on_upload(self._query["uploadId"])
            case "PUT" | "GET" if "tagging" in self._query:
                self._tagging()
            case "PUT" if "x-amz-copy-source" in self.headers:
                self._copy()
            case "PUT":
                self._put()
            case "GET" | "HEAD":
                self._get()
            case "POST" if "uploads" in self._query:
                self._create_upload()
            case "DELETE":
                self._bucket.delete([self._key])
                self._answer(status=204)
            case _:
                raise self._unknown()

    def _on_upload(self, upload_id: str) -> None:
        match self.command:
            case "PUT" if "x-amz-copy-source" not in self.headers:
                self._put_part(upload_id)
            case "GET":
                upload = self._bucket.upload(self._key, upload_id)
                self._answer(list_of_parts(self._name, upload_id, upload))
            case "POST":
                self._complete(upload_id)
            case "DELETE":
                self._bucket.drop_upload(self._key, upload_id)
                self._answer(status=204)
            case _:
                raise self._unknown()

    def _unknown(self) -> S3Error:
        return S3Error(501, "NotImplemented", f"{self.command} {self.path} is not of this sink")

    @property
    def _bucket(self) -> Bucket:
        return self.server.bucket(self._name)

    # --- verbs -------------------------------------------------------------------------------

    def _put(self) -> None:
        stored = self._bucket.put(
            self._key,
            self._body,
            metadata=self._metadata(),
            tags=self.headers.get("x-amz-tagging", ""),
            if_absent=self._if_absent(),
        )
        self._answer(headers=_identity(stored, checksums=True))

    def _copy(self) -> None:
        source, _, key = unquote(self.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        stored = self.server.bucket(source).get(key)
        self._bucket.place(self._key, replace(stored, modified_s=CLOCK.now()))
        self._answer(f"<CopyObjectResult>{xml('ETag', stored.etag)}</CopyObjectResult>")

    def _put_part(self, upload_id: str) -> None:
        upload = self._bucket.upload(self._key, upload_id)
        upload.parts[int(self._query["partNumber"])] = self._body
        crcs = {CHECKSUM + n: ALGORITHMS[n].text(c) for n, c in self._body.crcs.items()}
        self._answer(headers={"ETag": f'"{self._body.etag}"', **crcs})

    def _get(self) -> None:
        stored = self._bucket.get(self._key)
        headers = _identity(stored, checksums="x-amz-checksum-mode" in self.headers)
        headers["Accept-Ranges"] = "bytes"
        if self.command == "HEAD":
            self._answer(headers=headers, length=stored.size_bytes)
            return
        if stored.data is None:
            raise S3Error(501, "NotImplemented", "the sink did not keep this body")
        asked = self.headers.get("Range")
        if asked is None:
            self._answer(stored.data, headers=headers)
            return
        start, end = _span(asked, stored.size_bytes)
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{stored.size_bytes}"
        self._answer(stored.data[start:end], 206, headers)

    def _create_upload(self) -> None:
        algorithm = self.headers.get("x-amz-checksum-algorithm", "").lower() or None
        if algorithm is not None and algorithm not in ALGORITHMS:
            raise S3Error(501, "NotImplemented", f"no {algorithm} here")
        default = "COMPOSITE" if algorithm in {"crc32", "crc32c"} else "FULL_OBJECT"
        upload = Upload(
            key=self._key,
            algorithm=algorithm,
            checksum_type=self.headers.get("x-amz-checksum-type", default),
            metadata=self._metadata(),
            tags=self.headers.get("x-amz-tagging", ""),
        )
        fields = xml("Bucket", self._name) + xml("Key", self._key)
        upload_id = xml("UploadId", self._bucket.open_upload(upload))
        self._answer(
            f"<InitiateMultipartUploadResult>{fields}{upload_id}</InitiateMultipartUploadResult>"
        )

    def _complete(self, upload_id: str) -> None:
        stored = self._bucket.complete(
            self._key,
            upload_id,
            named_parts(self._body.data or b""),
            claims=claims_of(self.headers),
            if_absent=self._if_absent(),
        )
        fields = xml("Bucket", self._name) + xml("Key", self._key) + xml("ETag", stored.etag)
        self._answer(f"<CompleteMultipartUploadResult>{fields}</CompleteMultipartUploadResult>")

    def _delete_objects(self) -> None:
        keys, quiet = keys_to_delete(self._body.data or b"")
        self._bucket.delete(keys)
        self._answer(deletion_result([] if quiet else keys))

    def _tagging(self) -> None:
        stored = self._bucket.get(self._key)
        if self.command == "GET":
            self._answer(tag_set(stored.tags))
            return
        stored.tags = tags_of(self._body.data or b"")
        self._answer()

    # --- bodies ------------------------------------------------------------------------------

    def _received(self) -> Received:
        """Read the body to its end, whatever becomes of the request, and compare its checksums."""
        is_object = self.command == "PUT" and "tagging" not in self._query
        body = Incoming(
            self.rfile,
            self.headers,
            self._buffer,
            is_object=is_object,
            keep_bytes=self.server.keep_bytes,
            passed=self.server.link.passed,
        )
        try:
            return body.read(self._algorithm_of_upload() if is_object else None)
        except UnreadableError as error:
            self.close_connection = True  # what is left of it would be taken for a request
            raise S3Error(501, "NotImplemented", str(error)) from error

    def _algorithm_of_upload(self) -> str | None:
        """Return the checksum that all parts of an upload need; None outside of one."""
        upload_id = self._query.get("uploadId")
        if upload_id is None:
            return None
        try:
            return self._bucket.upload(self._key, upload_id).algorithm
        except S3Error:  # found again, and answered, when the body is read
            return None

    # --- headers -----------------------------------------------------------------------------

    def _if_absent(self) -> bool:
        return self.headers.get("If-None-Match") == "*"

    def _metadata(self) -> dict[str, str]:
        return {n: v for n, v in self.headers.items() if n.lower().startswith("x-amz-meta-")}

    def _answer(
        self,
        body: bytes | str = b"",
        status: int = 200,
        headers: dict[str, str] | None = None,
        length: int | None = None,
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("x-amz-request-id", "0")
        if isinstance(body, str):
            self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _identity(stored: Stored, *, checksums: bool) -> dict[str, str]:
    headers = {
        "ETag": f'"{stored.etag}"',
        "Last-Modified": format_date_time(stored.modified_s),
        **stored.metadata,
    }
    if checksums:
        headers |= {CHECKSUM + name: text for name, text in stored.checksums.items()}
        headers[CHECKSUM + "type"] = stored.checksum_type
    return headers


def _span(asked: str, size_bytes: int) -> tuple[int, int]:
    """Read a Range header; return start (inclusive) and end (exclusive)."""
    first, _, last = asked.removeprefix("bytes=").partition("-")
    if first:
        start, end = int(first), min(int(last) + 1 if last else size_bytes, size_bytes)
    else:
        start, end = max(0, size_bytes - int(last)), size_bytes
    if start >= size_bytes:
        raise S3Error(416, "InvalidRange", f"there is nothing at byte {start}")
    return start, end


def main() -> None:
    """Serve until stdin ends, which it does with the process that holds its other end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--rate", type=float, help="bytes per second that all requests share")
    parser.add_argument("--keep-bytes", type=int, default=KEEP_BYTES)
    options = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.nice(10)
    server = Sink(options.keep_bytes, options.rate)
    server.buckets |= {name: Bucket(CLOCK.now) for name in options.bucket}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
