"""The XML of S3, as far as the sink speaks it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from benchmarks.bucket import ALGORITHMS, Named, S3Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from benchmarks.bucket import Stored, Upload

__all__ = [
    "deletion_result",
    "error_body",
    "keys_to_delete",
    "list_of_objects",
    "list_of_parts",
    "list_of_uploads",
    "named_parts",
    "tag_set",
    "tags_of",
    "xml",
]

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
PAGE = 1000


def xml(name: str, value: object) -> str:
    """Write one element of text."""
    return f"<{name}>{escape(str(value))}</{name}>"


def _document(name: str, inside: str) -> str:
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{name} xmlns="{NAMESPACE}">{inside}</{name}>'


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def error_body(error: S3Error) -> str:
    """Write an error; S3's has no namespace."""
    return f"<Error>{xml('Code', error.code)}{xml('Message', error)}</Error>"


def list_of_objects(
    bucket: str,
    below: Callable[[str, str], Iterable[tuple[str, Stored]]],
    query: Mapping[str, str],
) -> str:
    """Write a page of ListObjectsV2."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    limit = int(query.get("max-keys", PAGE))
    encode = (lambda key: quote(key, safe="/")) if query.get("encoding-type") == "url" else str
    entries, last, is_cut = _page(below(prefix, after), prefix, delimiter, limit, after)
    inside = [
        xml("Name", bucket),
        xml("Prefix", encode(prefix)),
        xml("MaxKeys", limit),
        xml("KeyCount", len(entries)),
        xml("IsTruncated", str(is_cut).lower()),
        *([xml("EncodingType", "url")] if query.get("encoding-type") == "url" else []),
        *([xml("Delimiter", encode(delimiter))] if delimiter else []),
        *([xml("NextContinuationToken", last)] if is_cut else []),
    ]
    for key, stored in entries.items():
        if stored is None:
            inside.append(f"<CommonPrefixes>{xml('Prefix', encode(key))}</CommonPrefixes>")
        else:
            inside.append(
                f"<Contents>{xml('Key', encode(key))}"
                f"{xml('LastModified', _time(stored.modified_s))}"
                f"{xml('ETag', _quoted(stored.etag))}{xml('Size', stored.size_bytes)}"
                f"{xml('StorageClass', 'STANDARD')}</Contents>"
            )
    return _document("ListBucketResult", "".join(inside))


def _page(
    found: Iterable[tuple[str, Stored]], prefix: str, delimiter: str, limit: int, after: str
) -> tuple[dict[str, Stored | None], str, bool]:
    """Collect a page of keys and common prefixes; return the last one, and whether more follow."""
    entries: dict[str, Stored | None] = {}
    last = after
    for key, stored in found:
        head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
        name = f"{prefix}{head}{cut}" if cut else key
        if cut and name == after:
            continue  # all that a common prefix stands for was on the page before
        if name not in entries and len(entries) == limit:
            return entries, last, True
        entries[name] = None if cut else stored
        last = name
    return entries, last, False


def list_of_uploads(bucket: str, prefix: str, uploads: Sequence[tuple[str, Upload]]) -> str:
    """Write all open uploads as one page."""
    listed = [
        f"<Upload>{xml('Key', upload.key)}{xml('UploadId', upload_id)}</Upload>"
        for upload_id, upload in uploads
    ]
    head = xml("Bucket", bucket) + xml("Prefix", prefix) + xml("IsTruncated", "false")
    return _document("ListMultipartUploadsResult", head + "".join(listed))


def list_of_parts(bucket: str, upload_id: str, upload: Upload) -> str:
    """Write all parts of an upload as one page."""
    listed = [
        f"<Part>{xml('PartNumber', number)}{xml('ETag', _quoted(part.etag))}"
        f"{xml('Size', part.size_bytes)}</Part>"
        for number, part in sorted(upload.parts.items())
    ]
    head = xml("Bucket", bucket) + xml("Key", upload.key) + xml("UploadId", upload_id)
    return _document("ListPartsResult", f"{head}{xml('IsTruncated', 'false')}{''.join(listed)}")


def _quoted(etag: str) -> str:
    return f'"{etag}"'


def deletion_result(keys: Iterable[str]) -> str:
    """Write the answer to DeleteObjects."""
    deleted = [f"<Deleted>{xml('Key', key)}</Deleted>" for key in keys]
    return _document("DeleteResult", "".join(deleted))


def tag_set(tags: str) -> str:
    """Write tags, which are kept as the query string that a header brings."""
    pairs = [f"<Tag>{xml('Key', key)}{xml('Value', value)}</Tag>" for key, value in parse_qsl(tags)]
    return _document("Tagging", f"<TagSet>{''.join(pairs)}</TagSet>")


# --- what clients send -------------------------------------------------------------------------


def _parsed(data: bytes) -> ET.Element:
    try:
        root = ET.fromstring(data)
    except ET.ParseError as error:
        raise S3Error(400, "MalformedXML", str(error)) from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    return root


def _text(element: ET.Element, name: str) -> str:
    return element.findtext(name) or ""


def keys_to_delete(data: bytes) -> tuple[list[str], bool]:
    """Read the body of DeleteObjects: the keys, and whether to be quiet about them."""
    root = _parsed(data)
    keys = [_text(entry, "Key") for entry in root.iter("Object")]
    return keys, _text(root, "Quiet") == "true"


def tags_of(data: bytes) -> str:
    """Read the body of PutObjectTagging."""
    return urlencode([(_text(t, "Key"), _text(t, "Value")) for t in _parsed(data).iter("Tag")])


def named_parts(data: bytes) -> list[Named]:
    """Read the body of CompleteMultipartUpload."""
    return [
        Named(
            int(_text(part, "PartNumber")),
            _text(part, "ETag"),
            {name: text for name in ALGORITHMS if (text := _text(part, f"Checksum{name.upper()}"))},
        )
        for part in _parsed(data).iter("Part")
    ]
