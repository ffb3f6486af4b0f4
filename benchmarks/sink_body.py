"""Bodies of requests to the sink: read in small blocks, with their checksums, then discarded."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from benchmarks.bucket import ALGORITHMS, Received

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from email.message import Message
    from io import BufferedIOBase

__all__ = ["BLOCK_BYTES", "CHECKSUM", "Incoming", "UnreadableError", "claims_of"]

BLOCK_BYTES = 256 * 1024  # stays in the cache between the socket and the checksum
CHECKSUM = "x-amz-checksum-"
_NOT_A_CHECKSUM = {"algorithm", "type", "mode"}
_BY_DEFAULT = "crc64nvme"  # what AWS takes when the client names none


class UnreadableError(Exception):
    """The body is of a kind that the sink can't read, and is left where it is."""


class Incoming:
    """The body of one request.

    Args:
        stream: Where it comes from.
        headers: Of the request.
        buffer: Where its blocks go, one after the other.
        is_object: Whether it is an object or a part: if not, claims in its headers are about
            something else, and all of it is kept.
        keep_bytes: Length of the longest object or part that is kept.
        passed: Called with the length of each block; may block.
    """

    def __init__(
        self,
        stream: BufferedIOBase,
        headers: Message,
        buffer: memoryview,
        *,
        is_object: bool,
        keep_bytes: int,
        passed: Callable[[int], None],
    ) -> None:
        self._stream = stream
        self._headers = headers
        self._buffer = buffer
        self._claims = claims_of(headers) if is_object else {}
        self._keep_bytes = keep_bytes if is_object else sys.maxsize
        self._passed = passed
        self._trailers: dict[str, str] = {}

    def read(self, algorithm: str | None) -> Received:
        """Read all of it, take the checksums that are claimed or announced, and compare them.

        Args:
            algorithm: One more checksum to take; None for no more.

        Raises:
            S3Error: A checksum is wrong; the body was read to its end.
            UnreadableError: It can't be read.
            ConnectionError: The client hung up.
        """
        names = self._wanted(algorithm)
        crcs = dict.fromkeys(names, 0)
        kept: list[bytes] | None = []
        size_bytes = 0
        for block in self._blocks():
            for name in names:
                crcs[name] = ALGORITHMS[name].update(block, crcs[name])
            size_bytes += len(block)
            kept = kept if size_bytes <= self._keep_bytes else None
            if kept is not None:
                kept.append(bytes(block))
            self._passed(len(block))
        data = None if kept is None else b"".join(kept)
        body = Received(size_bytes=size_bytes, crcs=crcs, data=data)
        body.compare(self._claims | self._trailers)
        return body

    def _wanted(self, algorithm: str | None) -> list[str]:
        trailer = self._headers.get("x-amz-trailer", "").lower()
        named = [*self._claims, trailer.removeprefix(CHECKSUM), algorithm]
        names = list(dict.fromkeys(name for name in named if name)) or [_BY_DEFAULT]
        if unknown := set(names) - ALGORITHMS.keys():
            raise UnreadableError(f"no {', '.join(unknown)} here")
        return names

    def _blocks(self) -> Iterator[memoryview]:
        """Yield the body in blocks that are good until the next one; note its trailers."""
        if "Transfer-Encoding" in self._headers:
            raise UnreadableError("bodies of unknown length are not of this sink")
        if "aws-chunked" not in self._headers.get("Content-Encoding", ""):
            yield from self._exactly(int(self._headers.get("Content-Length", "0")))
            return
        while size_bytes := int(self._stream.readline().partition(b";")[0], 16):
            yield from self._exactly(size_bytes)
            self._stream.readline()
        while line := self._stream.readline().strip():
            name, _, value = line.decode().partition(":")
            if name.lower().startswith(CHECKSUM):
                self._trailers[name.lower().removeprefix(CHECKSUM)] = value.strip()

    def _exactly(self, size_bytes: int) -> Iterator[memoryview]:
        while size_bytes:
            view = self._buffer[: min(size_bytes, BLOCK_BYTES)]
            count = self._stream.readinto(view)
            if not count:
                raise ConnectionResetError("the client hung up")
            yield view[:count]
            size_bytes -= count


def claims_of(headers: Message) -> dict[str, str]:
    """Return the checksums that a request claims, by algorithm."""
    claims = {
        name.lower().removeprefix(CHECKSUM): value
        for name, value in headers.items()
        if name.lower().startswith(CHECKSUM)
    }
    return {name: value for name, value in claims.items() if name not in _NOT_A_CHECKSUM}
