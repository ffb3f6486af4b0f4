"""The only place that builds keys in a store and paths on a staging disk."""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote, urlsplit

from ckpt_tiering.errors import ConfigError, ErrorKind, FormatError
from ckpt_tiering.model.ids import SaveId, rank_name

__all__ = [
    "COMMITS_PREFIX",
    "FILES_NAME",
    "PROBE_PREFIX",
    "SEAL_NAME",
    "StagingLayout",
    "StoreUrl",
    "check_relative_path",
    "commit_key",
    "encode_path",
    "file_key",
    "node_manifest_key",
    "node_manifest_prefix",
    "pack_key",
    "save_prefix",
]

COMMITS_PREFIX = "commits/"
PROBE_PREFIX = "probe/"
SEAL_NAME = "seal.json"
FILES_NAME = "f"
MAX_PATH_BYTES = 4096  # PATH_MAX of Linux
MAX_COMPONENT_BYTES = 255  # NAME_MAX of Linux
# S3 keys end at 1,024 bytes: the root, the save and its node (at most 75), the path.
_MAX_PREFIX_BYTES = 248
_MAX_ENCODED_BYTES = 700
_MAX_KEY_COMPONENT_BYTES = 255  # of stores that keep objects as files
_HASHED = "sha256-"
_PLAIN = string.ascii_letters + string.digits + "._-="


def check_relative_path(path: str) -> str:
    """Return ``path`` if it is a relative POSIX path that stays below its root.

    Raises:
        FormatError: It is absolute, has empty, ``.`` or ``..`` components, a NUL byte, text that
            UTF-8 cannot hold, or is longer than a file system takes.
    """

    def refuse(why: str) -> FormatError:
        return FormatError(
            f"path {path!r} {why}", kind=ErrorKind.PATH, hint="rename the file, then save again"
        )

    try:
        raw = path.encode()
    except UnicodeEncodeError as error:
        raise refuse("is not valid UTF-8, so a manifest cannot hold it") from error
    if not path or path.startswith("/"):
        raise refuse("is not a relative path")
    if b"\0" in raw or len(raw) > MAX_PATH_BYTES:
        raise refuse("holds a NUL byte or is over 4,096 bytes long")
    for component in path.split("/"):
        if component in {"", ".", ".."}:
            raise refuse(f"has the component {component!r}")
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            raise refuse("has a component of over 255 bytes")
    return path


def _encode_component(text: str) -> str:
    return quote(text, safe=_PLAIN).replace("~", "%7E")  # which `quote` takes for plain


def encode_path(path: str) -> str:
    """Turn a relative path into key text that no store rewrites; the manifest holds the true path.

    All but letters, digits and ``._-=`` is percent-encoded; a path whose encoding would not fit
    into a key, or that looks like the following, is named by its SHA-256 and keeps its suffix.
    """
    components = [_encode_component(component) for component in path.split("/")]
    encoded = "/".join(components)
    if (
        len(encoded) <= _MAX_ENCODED_BYTES
        and max(map(len, components)) <= _MAX_KEY_COMPONENT_BYTES
        and not encoded.startswith(_HASHED)
    ):
        return encoded
    suffix = _encode_component(PurePosixPath(path).suffix[:16])
    return f"{_HASHED}{hashlib.sha256(path.encode()).hexdigest()}{suffix}"


def save_prefix(save_id: SaveId) -> str:
    """Return the prefix of all data of a save."""
    return f"saves/{save_id}/"


def file_key(save_id: SaveId, node: str, path: str) -> str:
    """Return the key of the object that holds one file of a node as it is."""
    return f"{save_prefix(save_id)}{node}/f/{encode_path(path)}"


def pack_key(save_id: SaveId, node: str, index: int) -> str:
    """Return the key of the ``index``-th pack of small files of a node."""
    return f"{save_prefix(save_id)}{node}/p/{index:04d}.tar"


def node_manifest_prefix(save_id: SaveId) -> str:
    """Return the prefix of the node manifests of a save."""
    return f"{save_prefix(save_id)}nodes/"


def node_manifest_key(save_id: SaveId, node: str) -> str:
    """Return the key of a node's manifest."""
    return f"{node_manifest_prefix(save_id)}{node}.json"


def commit_key(save_id: SaveId) -> str:
    """Return the key of the commit point of a save."""
    return f"{COMMITS_PREFIX}{save_id}.json"


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The root of one run in a store, normalised.

    Attributes:
        scheme: ``s3`` or ``memory``.
        bucket: Name of the bucket.
        prefix: Key prefix of the root: empty, or without leading and with one trailing slash.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Read ``s3://bucket/prefix``.

        Raises:
            ConfigError: The URL has no bucket, an unknown scheme, credentials, a query, or a path
                that is too long or has ``.`` or ``..``.
        """
        hint = "write s3://bucket/path/of/the/run"
        try:
            url.encode()
            parts = urlsplit(url)
        except ValueError as error:
            raise ConfigError("the store URL is not a URL", hint=hint) from error
        # First of all, so that no message below repeats a secret.
        in_wrong_place = "@" in url and not parts.netloc
        if "@" in parts.netloc or in_wrong_place or parts.query or parts.fragment:
            raise ConfigError(
                "the store URL holds credentials, a query or a fragment",
                hint="give credentials as AWS_* variables or a profile",
            )
        if parts.scheme not in {"s3", "memory"}:
            raise ConfigError(f"store URL {url!r} has no scheme that is supported (s3)", hint=hint)
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", parts.netloc):
            raise ConfigError(f"store URL {url!r} has no valid bucket name", hint=hint)
        components = [c for c in unquote(parts.path).split("/") if c]
        if any(c in {".", ".."} for c in components):
            raise ConfigError(f"store URL {url!r} has '.' or '..' in its path", hint=hint)
        prefix = "".join(_encode_component(c) + "/" for c in components)
        if len(prefix) > _MAX_PREFIX_BYTES:
            raise ConfigError(
                f"the path of store URL {url!r} takes {len(prefix)} bytes in keys, more than "
                f"{_MAX_PREFIX_BYTES}",
                hint=hint,
            )
        return cls(parts.scheme, parts.netloc, prefix)

    def split_save(self) -> tuple[StoreUrl, SaveId | None]:
        """Split a URL of a save, a commit or an object of a save into its root and the save id.

        A URL that points to a root has no save id.
        """
        for match in re.finditer(r"/(?:saves|commits)(?=/([^/]+?)(?:\.json)?/)", "/" + self.prefix):
            try:
                save_id = SaveId.parse(match[1])
            except FormatError:
                continue  # a folder of the root that happens to have such a name
            return StoreUrl(self.scheme, self.bucket, self.prefix[: match.start()]), save_id
        return self, None

    @property
    def slug(self) -> str:
        """Directory name for this root on a staging disk: readable, and unique by digest."""
        digest = hashlib.sha256(str(self).encode()).hexdigest()[:10]
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.bucket}-{self.prefix}").strip("-.")
        return f"{readable[:60]}-{digest}"


@dataclass(frozen=True, slots=True)
class StagingLayout:
    """Where things lie on a staging disk.

    ::

        <staging>/agent/    lock, journal.db, agent.sock, status.json, events.jsonl, agent.log
        <staging>/runs/<run>/saves/<save id>/<rank>/f/<path>     staged files, as they are
        <staging>/runs/<run>/saves/<save id>/<rank>/seal.json    the seal: written last
        <staging>/runs/<run>/restored/<save id>/                 what came back from the store
    """

    staging: Path

    @property
    def agent_dir(self) -> Path:
        """Directory of the agent's own files."""
        return self.staging / "agent"

    @property
    def journal(self) -> Path:
        """SQLite database of the agent."""
        return self.agent_dir / "journal.db"

    @property
    def lock(self) -> Path:
        """File whose lock says that an agent serves this directory."""
        return self.agent_dir / "lock"

    @property
    def status(self) -> Path:
        """Status page of the agent, replaced as a whole."""
        return self.agent_dir / "status.json"

    @property
    def events(self) -> Path:
        """Event log, one JSON object a line, append only."""
        return self.agent_dir / "events.jsonl"

    @property
    def log(self) -> Path:
        """What the agent printed."""
        return self.agent_dir / "agent.log"

    @property
    def runs_dir(self) -> Path:
        """Directory of all runs that were staged here."""
        return self.staging / "runs"

    def run_dir(self, store: StoreUrl) -> Path:
        """Directory of one run."""
        return self.runs_dir / store.slug

    def save_dir(self, store: StoreUrl, save_id: SaveId) -> Path:
        """Directory of one save."""
        return self.run_dir(store) / "saves" / str(save_id)

    def rank_dir(self, store: StoreUrl, save_id: SaveId, rank: int) -> Path:
        """Directory of one rank's shard."""
        return self.save_dir(store, save_id) / rank_name(rank)

    def staged_file(self, save_dir: Path, rank: int, path: str) -> Path:
        """Where a file of a rank's shard lies within the directory of its save."""
        return save_dir / rank_name(rank) / FILES_NAME / path

    def restored_dir(self, store: StoreUrl, save_id: SaveId) -> Path:
        """Directory of what was downloaded of a save."""
        return self.run_dir(store) / "restored" / str(save_id)
