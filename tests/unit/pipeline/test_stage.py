from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import CapacityError, ConfigError, ErrorKind, FormatError
from ckpt_tiering.fsio import digest_file
from ckpt_tiering.model.digest import crc64
from ckpt_tiering.model.layout import SEAL_NAME
from ckpt_tiering.model.plan import digest_of
from ckpt_tiering.model.seal import decode_seal
from tests.unit.model.strategies import AWKWARD_PATHS
from tests.unit.world import World, world

if TYPE_CHECKING:
    from ckpt_tiering.pipeline.stage import ShardWriter


@pytest.fixture
def writer(node: World) -> ShardWriter:
    return node.writer()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What a framework left in a directory."""
    tree = tmp_path / "tree"
    (tree / "a/b").mkdir(parents=True)
    (tree / "empty").mkdir()
    (tree / "a/b/weights").write_bytes(b"w" * 3000)
    (tree / "run.sh").write_text("#!/bin/sh")
    (tree / "run.sh").chmod(0o755)
    (tree / "a/link").symlink_to("../run.sh")
    (tree / "dir-link").symlink_to("a")
    return tree


# --- what a seal says is what lies there ----------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=400), max_size=8))
def test_p3_the_digest_is_of_the_bytes_on_the_disk(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    with world(tmp_path_factory.mktemp("nvme")) as node:
        writer = node.writer(part_bytes=100)
        with writer.open("f") as file:
            for chunk in chunks:
                file.write(memoryview(chunk))
        (entry,) = writer.seal().files
        assert writer.local_path("f").read_bytes() == b"".join(chunks)
        assert digest_of(entry) == digest_file(writer.local_path("f"), 100)


def test_p11_awkward_names_come_back(node: World) -> None:
    files = {path: path.encode() for path in AWKWARD_PATHS}
    directory, seal = node.stage(files)
    assert [f.path for f in seal.files] == list(files)
    for path, data in files.items():
        assert node.layout.staged_file(directory, 0, path).read_bytes() == data


def test_p1_the_seal_is_written_last_and_is_whole(writer: ShardWriter) -> None:
    with writer.open("f") as file:
        file.write(b"x")
    assert not (writer.directory / SEAL_NAME).exists()
    seal = writer.seal()
    assert decode_seal((writer.directory / SEAL_NAME).read_bytes(), "seal") == seal


def test_p1_all_is_on_the_disk_before_the_seal_says_so(
    node: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
    )
    directory, _ = node.stage({"d/f": b"x"})
    shard = directory / "r000000"
    seal = synced.index(str(shard / "seal.json.tmp"))
    assert {str(shard / p) for p in ("f/d/f", "f/d", "f", "")} <= {*synced[:seal], f"{shard}/"}
    assert str(shard) in synced[:seal]
    assert {str(p) for p in (shard, directory, directory.parent)} <= set(synced[seal:])


def test_a_file_that_was_left_open_is_finished_by_the_seal(writer: ShardWriter) -> None:
    file = writer.open("f")
    file.write(b"buffered")
    (entry,) = writer.seal().files
    assert file.closed
    assert (entry.size_bytes, int(entry.crc64nvme, 16)) == (8, crc64(b"buffered"))


def test_modes_are_recorded(writer: ShardWriter) -> None:
    writer.open("secret", 0o600).close()
    writer.open("read-only", 0o444).close()
    modes = {f.path: f.mode for f in writer.seal().files}
    assert modes["secret"] == 0o600
    assert modes["read-only"] & 0o200, "the agent's user must be able to remove it"


@pytest.mark.parametrize("size", [10, 5_000_000])
def test_p3_numpy_writes_through_the_stream(writer: ShardWriter, size: int) -> None:
    """Given a descriptor it would write to that, past the buffer and the digest."""
    array = np.arange(size)
    with writer.open("a.npy") as file:
        np.save(file, array)
        assert not file.seekable()
        with pytest.raises(io.UnsupportedOperation):
            file.fileno()
    (entry,) = writer.seal().files
    assert digest_of(entry) == digest_file(writer.local_path("a.npy"), entry.part_bytes)
    assert np.array_equal(np.load(writer.local_path("a.npy")), array)


def test_p3_a_file_that_was_written_past_its_stream_is_refused(writer: ShardWriter) -> None:
    with writer.open("f") as file:
        file.write(b"x")
    with writer.local_path("f").open("ab") as other:
        other.write(b"y")
    with pytest.raises(FormatError, match="2 bytes, 1 were written"):
        writer.seal()


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["../x", "/x", "a//b", "", "x\0", "y" * 256, "taken", "taken/x"])
def test_p11_paths_that_can_not_come_back_are_refused(writer: ShardWriter, path: str) -> None:
    writer.open("taken").close()
    with pytest.raises(FormatError) as caught:
        writer.open(path)
    assert caught.value.kind is ErrorKind.PATH


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("metadata", {"loss": [1.0]}),
        ("metadata", {1: "a"}),
        ("metadata", {"a": "\udcff"}),
        ("name", "\udcff"),
        ("name", 3),
    ],
)
def test_p5_what_can_not_be_written_down_is_refused_before_the_first_byte(
    node: World, field: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=field):
        node.writer(**{field: value})
    assert not node.layout.runs_dir.exists()


def test_a_save_id_is_used_once(node: World) -> None:
    node.stage()
    with pytest.raises(FormatError, match="was made before"):
        node.writer()


# --- directories ----------------------------------------------------------------------------------


def test_p11_a_tree_is_copied_with_links_and_empty_directories(
    writer: ShardWriter, tree: Path
) -> None:
    writer.add_tree(tree)
    entries = {f.path: f for f in writer.seal().files}
    assert {p: e.kind for p, e in entries.items()} == {
        "a": "dir",
        "a/b": "dir",
        "empty": "dir",
        "a/b/weights": "file",
        "run.sh": "file",
        "a/link": "link",
        "dir-link": "link",
    }
    assert entries["a/link"].target == "../run.sh"
    assert entries["run.sh"].mode == 0o755
    assert writer.local_path("a/b/weights").read_bytes() == b"w" * 3000


def special(tree: Path, what: str) -> None:
    match what:
        case "fifo":
            os.mkfifo(tree / what)
        case "escaping link":
            (tree / what).symlink_to("../../etc/passwd")
        case "absolute link":
            (tree / what).symlink_to("/etc/passwd")
        case "link through a link":
            (tree / what).symlink_to("dir-link/../../outside")
        case "link to bytes":
            (tree / what).symlink_to(os.fsdecode(b"\xff"))
        case "name in latin-1":
            (tree / os.fsdecode(b"caf\xe9")).write_text("")
        case _:
            raise AssertionError(what)


@pytest.mark.parametrize(
    "what",
    [
        "fifo",
        "escaping link",
        "absolute link",
        "link through a link",
        "link to bytes",
        "name in latin-1",
    ],
)
def test_p11_what_can_not_come_back_is_refused(writer: ShardWriter, tree: Path, what: str) -> None:
    special(tree, what)
    with pytest.raises(FormatError) as caught:
        writer.add_tree(tree)
    assert caught.value.kind is ErrorKind.PATH


@pytest.mark.parametrize("what", ["missing", "file"])
def test_p1_a_tree_that_is_none_is_not_an_empty_checkpoint(
    writer: ShardWriter, tmp_path: Path, what: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FormatError, match="can't be staged"):
        writer.add_tree(tmp_path / what)


def test_a_tree_is_added_once(writer: ShardWriter, tree: Path) -> None:
    writer.add_tree(tree)
    with pytest.raises(FormatError, match="twice"):
        writer.add_tree(tree)


@pytest.mark.parametrize("change", ["append", "rewrite", "replace"])
def test_p7_a_file_that_changes_while_it_is_copied_is_refused(
    node: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    source = tmp_path / "tree/f"
    source.parent.mkdir()
    source.write_bytes(b"x" * 1000)
    os.utime(source, ns=(0, 0))
    writer = node.writer()
    real = writer.open

    def open_and_change(path: str, mode: int) -> Any:
        if change == "append":
            with source.open("ab") as other:
                other.write(b"y")
        elif change == "rewrite":
            source.write_bytes(b"y" * 1000)
        else:
            (tmp_path / "new").write_bytes(b"y" * 1000)
            os.utime(tmp_path / "new", ns=(0, 0))
        return real(path, mode)

    if change == "replace":
        before = source.lstat()
        open_and_change("unused", 0o644).close()
        (tmp_path / "new").replace(source)
        with pytest.raises(FormatError, match="changed while it was staged"):
            writer._copy(source, "f", before)
        return
    monkeypatch.setattr(writer, "open", open_and_change)
    with pytest.raises(FormatError, match="changed while it was staged"):
        writer.add_tree(source.parent)


# --- giving up ------------------------------------------------------------------------------------


def test_p5_a_save_that_is_given_up_leaves_nothing(node: World, tree: Path) -> None:
    kept, _ = node.stage(step=99)
    writer = node.writer()
    writer.add_tree(tree)
    writer.open("open").write(b"x")
    writer.discard()
    assert not writer.directory.parent.exists()
    assert (kept / "r000000" / SEAL_NAME).exists()
    node.stage()  # and the id is free again


def test_a_shard_that_is_given_up_leaves_those_of_other_ranks(node: World) -> None:
    directory, _ = node.stage(ranks_on_node=2)
    node.writer(rank=1, ranks_on_node=2).discard()
    assert (directory / "r000000" / SEAL_NAME).exists()


def test_p5_a_full_disk_is_a_capacity_error_that_sticks(
    writer: ShardWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``/dev/full`` answers every write like a disk without room."""
    monkeypatch.setattr(writer, "local_path", lambda _: Path("/dev/full"))
    monkeypatch.setattr(os, "O_EXCL", 0)
    file = writer.open("f")
    with pytest.raises(CapacityError, match="No space left"):
        file.write(bytes(3 << 20))
    with pytest.raises(CapacityError):
        file.close()
    with pytest.raises(CapacityError):
        writer.seal()  # even though somebody went on regardless
    assert not (writer.directory / SEAL_NAME).exists()
    monkeypatch.undo()
    writer.discard()
    assert not writer.directory.exists()


def test_p5_a_write_that_was_cut_short_never_gets_a_seal(tmp_path: Path) -> None:
    """In a child, because its limit on file lengths holds for the whole process."""
    script = """if True:
        import resource, sys
        from pathlib import Path
        from ckpt_tiering.errors import CapacityError
        from tests.unit.world import world
        with world(Path(sys.argv[1])) as node:
            writer = node.writer()
            file = writer.open("f")
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
            try:
                file.write(bytes(3 << 20))
            except CapacityError:
                print("refused")
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            try:
                writer.seal()
            except CapacityError:
                print("refused")
            writer.discard()
    """
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, cwd=root, capture_output=True
    )
    assert done.stdout == b"refused\nrefused\n"
