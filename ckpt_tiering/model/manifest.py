"""The on-store format: manifests and node manifests, strict when read, canonical when written.

`docs/manifest.md` describes the format for other tools. Decoding never trusts: unknown fields,
unknown versions, paths that leave the root, links that do, files outside their object and
oversized documents are refused before anything is done with them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ckpt_tiering.errors import ErrorKind, FormatError
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.layout import check_relative_path

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "FileEntry",
    "Manifest",
    "NodeManifest",
    "NodeRef",
    "ObjectEntry",
    "check_link",
    "check_tree",
    "decode",
    "encode",
    "make_manifest",
]

VERSION = 1
MAX_DOCUMENT_BYTES = 512 << 20
Verification = Literal["checksum", "read-back"]
Metadata = dict[str, str | int | float | bool | None]

Crc = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RelativePath = Annotated[str, AfterValidator(check_relative_path)]
NonNegative = Annotated[int, Field(ge=0, le=1 << 63)]
Positive = Annotated[int, Field(ge=1, le=1 << 63)]


class _Document(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ObjectEntry(_Document):
    """One object in the store.

    Attributes:
        key: Key relative to the root of the run.
        size_bytes: Length.
        crc64nvme: Checksum of the whole object, 16 hexadecimal digits.
        verified: How the store's copy was compared with the digest: ``checksum`` (the store's own
            checksum and size) or ``read-back`` (downloaded and digested again).
    """

    key: RelativePath
    size_bytes: NonNegative
    crc64nvme: Crc
    verified: Verification


class FileEntry(_Document):
    """One file, symbolic link or directory of a checkpoint.

    Attributes:
        path: Relative POSIX path, exactly as it was.
        kind: ``file``, ``link`` or ``dir``.
        rank: Rank that staged it.
        mode: Permission bits; 0 for links.
        size_bytes: Length of a file; 0 otherwise.
        crc64nvme: Checksum of a file's contents.
        part_bytes: Length of each part but the last that ``parts`` has checksums of.
        parts: Checksum of each part of a file.
        object: Index into ``objects`` of the node manifest that holds a file.
        offset: Where the file starts in its object, in bytes.
        target: Text of a link, relative and inside the checkpoint.
    """

    path: RelativePath
    kind: Literal["file", "link", "dir"]
    rank: NonNegative
    mode: Annotated[int, Field(ge=0, le=0o7777)] = 0
    size_bytes: NonNegative = 0
    crc64nvme: Crc = "0" * 16
    part_bytes: Positive = 1
    parts: tuple[Crc, ...] = ()
    object: NonNegative = 0
    offset: NonNegative = 0
    target: str = ""

    @model_validator(mode="after")
    def _consistent(self) -> FileEntry:
        if self.kind == "link":
            check_link(self.path, self.target)
        elif self.target:
            raise ValueError(f"{self.path!r} has a link target but is a {self.kind}")
        if self.kind == "file" and len(self.parts) != -(-self.size_bytes // self.part_bytes):
            raise ValueError(f"{self.path!r} has {len(self.parts)} part checksums, which is wrong")
        return self


class _SaveHeader(_Document):
    """What a node manifest and a manifest both say of their save."""

    version: Literal[1] = 1
    save_id: str
    step: NonNegative
    name: str | None
    num_nodes: Positive
    metadata: Metadata
    snapshot_at: float

    @model_validator(mode="after")
    def _same_step(self) -> _SaveHeader:
        if SaveId.parse(self.save_id).step != self.step:
            raise ValueError(f"save id {self.save_id} is not of step {self.step}")
        return self


class NodeManifest(_SaveHeader):
    """Everything one node contributes to a save; written last, by that node.

    Attributes:
        node: Name of the node within the save.
        ranks: Ranks that staged files on the node.
        objects: Objects of this node.
        files: Files of this node.
    """

    FORMAT: ClassVar[str] = "ckpt-tiering/node-manifest"
    format: Literal["ckpt-tiering/node-manifest"] = "ckpt-tiering/node-manifest"
    node: Annotated[str, Field(pattern=r"^n[0-9]{5,}$")]
    ranks: tuple[NonNegative, ...]
    objects: tuple[ObjectEntry, ...]
    files: tuple[FileEntry, ...]

    @model_validator(mode="after")
    def _files_lie_in_objects(self) -> NodeManifest:
        for file in self.files:
            if file.kind != "file":
                continue
            if file.object >= len(self.objects):
                raise ValueError(f"{file.path!r} lies in object {file.object}, which is not there")
            if file.offset + file.size_bytes > self.objects[file.object].size_bytes:
                raise ValueError(f"{file.path!r} reaches over the end of its object")
        check_tree(self.files)
        return self


class NodeRef(_Document):
    """Pointer to a node manifest.

    Attributes:
        node: Name of the node within the save.
        key: Key of its manifest, relative to the root.
        sha256: SHA-256 of the node manifest's bytes.
        size_bytes: Length of the node manifest.
    """

    node: Annotated[str, Field(pattern=r"^n[0-9]{5,}$")]
    key: RelativePath
    sha256: Sha256
    size_bytes: Positive


class Manifest(_SaveHeader):
    """The commit point: a save exists when, and only when, this object does.

    Its bytes follow from the node manifests alone, so that it does not matter who writes it.

    Attributes:
        total_bytes: Sum of the sizes of all objects.
        num_files: Number of files, without links and directories.
        verified: The weakest way in which any object was verified.
        nodes: Pointers to the node manifests, by node.
    """

    FORMAT: ClassVar[str] = "ckpt-tiering/manifest"
    format: Literal["ckpt-tiering/manifest"] = "ckpt-tiering/manifest"
    total_bytes: NonNegative
    num_files: NonNegative
    verified: Verification
    nodes: tuple[NodeRef, ...]

    @model_validator(mode="after")
    def _all_nodes(self) -> Manifest:
        if len(self.nodes) != self.num_nodes:
            raise ValueError(f"names {len(self.nodes)} nodes of {self.num_nodes}")
        if len({ref.node for ref in self.nodes}) != len(self.nodes):
            raise ValueError("names a node twice")
        return self


def check_link(path: str, target: str) -> None:
    """Refuse a symbolic link that leads out of the checkpoint, alone or through other links.

    A target may only climb before it descends: the folders above a link are no links (see
    `check_tree`), but what it descends into may be one, and ``..`` of that is anywhere.

    Raises:
        FormatError: The target is not text, is absolute, climbs above the root of the checkpoint,
            or climbs after it descended.
    """
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise FormatError(
            f"link {path!r} -> {target!r} is not valid UTF-8, so a manifest cannot hold it",
            kind=ErrorKind.PATH,
        ) from error
    climbed, descended = 0, False
    bad = not target or target.startswith("/") or "\0" in target
    for component in target.split("/"):
        if component == "..":
            climbed += 1
            bad = bad or descended
        elif component not in {"", "."}:
            descended = True
    if bad or climbed > path.count("/"):
        raise FormatError(
            f"link {path!r} -> {target!r} leads out of the checkpoint",
            kind=ErrorKind.PATH,
            hint="make it relative and inside the checkpoint, or a copy",
        )


def check_tree(files: Sequence[FileEntry]) -> None:
    """Refuse files that could not lie in one tree together.

    Raises:
        FormatError: A path occurs twice, or lies below a file or a link.
    """
    kinds: dict[str, str] = {}
    for file in files:
        if file.path in kinds:
            raise FormatError(f"path {file.path!r} occurs twice in one save", kind=ErrorKind.PATH)
        kinds[file.path] = file.kind
    for path in kinds:
        for parent in PurePosixPath(path).parents:
            if kinds.get(str(parent), "dir") != "dir":
                raise FormatError(
                    f"path {path!r} lies below {str(parent)!r}, which is a {kinds[str(parent)]}",
                    kind=ErrorKind.PATH,
                )


def encode(document: Manifest | NodeManifest) -> bytes:
    """Write a document in its one canonical form: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        document.model_dump(mode="json"),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


_D = TypeVar("_D", Manifest, NodeManifest)


def decode(kind: type[_D], data: bytes, name: str) -> _D:
    """Read a document, trusting nothing.

    Args:
        kind: `Manifest` or `NodeManifest`.
        data: The bytes.
        name: What to call them in an error, usually their key.

    Raises:
        FormatError: They are not a document of that kind, of a version known here, or inconsistent.
    """
    if len(data) > MAX_DOCUMENT_BYTES:
        raise FormatError(f"{name} has {len(data)} bytes, too many for a manifest", key=name)
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{name} is not JSON: {error}", key=name) from error
    if not isinstance(raw, dict) or raw.get("format") != kind.FORMAT:
        raise FormatError(f"{name} is not a {kind.FORMAT} document", key=name)
    if raw.get("version") != VERSION:
        raise FormatError(
            f"{name} has format version {raw.get('version')!r}, this release reads {VERSION}",
            hint="upgrade ckpt-tiering",
            key=name,
        )
    try:
        return kind.model_validate_json(data)
    except (ValidationError, RecursionError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else {"msg": str(error)}
        where = ".".join(map(str, first.get("loc", ())))
        raise FormatError(
            f"{name} is not valid: {where} {first['msg']}".strip(), key=name
        ) from error


def make_manifest(nodes: Sequence[tuple[str, bytes, NodeManifest]]) -> Manifest:
    """Make the manifest of a save from all its node manifests.

    Args:
        nodes: Key, bytes and contents of each node manifest, in any order.

    Raises:
        FormatError: The nodes do not agree on what the save is, one path is given by two, or
            these are not the nodes of one save.
    """
    ordered = sorted(nodes, key=lambda item: item[2].node)
    first = ordered[0][2]
    for _, _, node in ordered:
        for field in ("save_id", "name", "num_nodes"):
            if getattr(node, field) != getattr(first, field):
                raise FormatError(
                    f"nodes disagree on the save's {field}: {first.node} has "
                    f"{getattr(first, field)!r}, {node.node} has {getattr(node, field)!r}",
                    hint="pass the same step and name on all ranks",
                )
    check_tree([f for _, _, node in ordered for f in node.files if f.kind != "dir"])
    objects = [o for _, _, node in ordered for o in node.objects]
    refs = tuple(
        NodeRef(
            node=node.node, key=key, sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data)
        )
        for key, data, node in ordered
    )
    try:
        return Manifest(
            save_id=first.save_id,
            step=first.step,
            name=first.name,
            num_nodes=first.num_nodes,
            metadata=first.metadata,
            snapshot_at=max(node.snapshot_at for _, _, node in ordered),
            total_bytes=sum(o.size_bytes for o in objects),
            num_files=sum(f.kind == "file" for _, _, node in ordered for f in node.files),
            verified="read-back" if any(o.verified == "read-back" for o in objects) else "checksum",
            nodes=refs,
        )
    except ValidationError as error:
        keys = ", ".join(ref.key for ref in refs[:5])
        raise FormatError(f"{keys} make no save: {error.errors()[0]['msg']}") from error
