from __future__ import annotations

import errno
import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tiering.errors import (
    CapacityError,
    FormatError,
    IntegrityError,
    NotFoundError,
    TransientError,
)
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.pipeline.admit import admit
from ckpt_tiering.pipeline.resolve import load_save
from ckpt_tiering.pipeline.restore import PARTIAL_SUFFIX, RestoreReport, restore_files
from ckpt_tiering.testing.faults import Fault
from tests.unit.model.documents import file_entry, link_entry, node_manifest
from tests.unit.model.strategies import AWKWARD_PATHS, legal_paths
from tests.unit.world import SMALL, URL, World, world

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ckpt_tiering.model.manifest import FileEntry

ID = SaveId(100, "abcd")
BIG = bytes(range(251)) * 35_000
FILES = {"big.bin": BIG, **SMALL}
BIG_KEY = "saves/000000000100-abcd/n00000/f/big.bin"
PACK_KEY = "saves/000000000100-abcd/n00000/p/0000.tar"
PART = 3 << 20


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "target"


@pytest.fixture
def saved(node: World) -> World:
    """A node with one durable save: a large file in three parts, and small ones."""
    node.durable(FILES, part_bytes=PART)
    node.store.calls.clear()
    return node


def restore(node: World, target: Path, **options: Any) -> RestoreReport:
    return restore_files(node.session, load_save(node.session, ID).nodes, target, **options)


def from_nvme(node: World) -> dict[str, Any]:
    def copies(entry: FileEntry) -> Iterable[Path]:
        save_dir = node.layout.save_dir(URL, ID)
        return [node.layout.staged_file(save_dir, entry.rank, entry.path)]

    return {"local_copies": copies}


def contents(root: Path) -> dict[str, bytes]:
    paths = [p for p in root.rglob("*") if p.is_file() and not p.is_symlink()]
    return {str(p.relative_to(root)): p.read_bytes() for p in paths}


def only_names_of_the_save(target: Path) -> bool:
    return not [p for p in target.rglob("*") if p.name.endswith(PARTIAL_SUFFIX)]


# --- what was saved comes back --------------------------------------------------------------------


def test_p9_everything_comes_back_from_the_store(saved: World, target: Path) -> None:
    done: list[int] = []
    report = restore(saved, target, progress=done.append)
    assert contents(target) == FILES
    assert (report.from_store, report.from_nvme) == (4, 0)
    assert sum(done) == report.downloaded_bytes == sum(map(len, FILES.values()))
    assert only_names_of_the_save(target)


def test_p9_everything_comes_back_from_nvme_without_a_download(saved: World, target: Path) -> None:
    report = restore(saved, target, **from_nvme(saved))
    assert contents(target) == FILES
    assert (report.from_store, report.from_nvme) == (0, 4)
    gets = [c.key for c in saved.store.calls if c.verb == "get"]
    assert all("/f/" not in key and "/p/" not in key for key in gets)


@settings(max_examples=15)
@given(st.dictionaries(legal_paths, st.binary(max_size=40), min_size=1, max_size=4))
def test_p11_any_names_come_back(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]
) -> None:
    with world(tmp_path_factory.mktemp("nvme")) as node:
        files = {f"{i}/{path}": data for i, (path, data) in enumerate(files.items())}
        node.durable(files)
        target = tmp_path_factory.mktemp("target")
        restore(node, target)
        assert contents(target) == files


def test_p11_awkward_names_links_and_empty_directories_come_back(
    node: World, target: Path, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    for path in AWKWARD_PATHS:
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_text(path)
    (tree / "void").mkdir()
    (tree / "a-link").symlink_to("a b/c+d&e")
    writer = node.writer()
    writer.add_tree(tree)
    writer.seal()
    admit(node.journal, writer.directory.parent, 5.0, check_digests=True)
    row = node.publish(node.verify(node.upload(node.find(str(ID)))))
    node.commit(row)
    restore(node, target)
    assert contents(target) == contents(tree)
    assert (target / "void").is_dir()
    assert (target / "a-link").read_text() == "a b/c+d&e"


def test_only_what_is_wanted_is_downloaded(saved: World, target: Path) -> None:
    report = restore(saved, target, wanted=lambda path: path == "meta/config.json")
    assert contents(target) == {"meta/config.json": b"{}"}
    assert report.downloaded_bytes == 2
    assert [c.key for c in saved.store.calls if c.verb == "get" and "/f/" in c.key] == []


def test_p12_executable_bits_are_not_restored(node: World, target: Path) -> None:
    writer = node.writer()
    for path, mode in {"run.sh": 0o755, "suid": 0o4755, "secret": 0o600}.items():
        writer.open(path, mode).close()
        writer.local_path(path).chmod(mode)
    writer.seal()
    admit(node.journal, writer.directory.parent, 5.0, check_digests=True)
    node.commit(node.publish(node.verify(node.upload(node.find(str(ID))))))
    restore(node, target)
    modes = {p.name: p.stat().st_mode & 0o7777 for p in target.iterdir()}
    assert modes == {"run.sh": 0o644, "suid": 0o644, "secret": 0o600}


def test_files_of_an_older_restore_are_replaced(saved: World, target: Path) -> None:
    target.mkdir()
    (target / "model.pt").write_bytes(b"older")
    in_place = {"local_copies": lambda entry: [target / entry.path]}
    report = restore(saved, target, **in_place)
    assert contents(target) == FILES
    assert report.quarantined == [], "an older file is not a corrupt one"
    again = restore(saved, target, **in_place)
    assert (again.from_nvme, again.from_store) == (4, 0)


def test_p6_what_was_there_stays_if_the_restore_fails(saved: World, target: Path) -> None:
    target.mkdir()
    (target / "model.pt").write_bytes(b"older")
    saved.damage(PACK_KEY, at=600)
    saved.memory.delete([PACK_KEY])
    with pytest.raises(NotFoundError):
        restore(saved, target, local_copies=lambda entry: [target / entry.path])
    assert (target / "model.pt").read_bytes() == b"older"


# --- bad copies on this node ----------------------------------------------------------------------


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("path", ["big.bin", "model.pt"])
def test_p9_a_flipped_bit_on_nvme_is_set_aside_and_the_store_is_used(
    saved: World, target: Path, path: str, share: bool
) -> None:
    copy = saved.layout.staged_file(saved.layout.save_dir(URL, ID), 0, path)
    data = copy.read_bytes()
    copy.write_bytes(data[:100] + bytes([data[100] ^ 4]) + data[101:])
    report = restore(saved, target, share=share, **from_nvme(saved))
    assert contents(target) == FILES
    assert (report.from_nvme, report.from_store) == (3, 1)
    assert report.quarantined == [str(copy)]
    assert not copy.exists()
    (aside,) = copy.parent.glob("*.corrupt")
    assert aside.stat().st_size == len(data), "kept for whoever wants to know"


@pytest.mark.parametrize("how", ["shorter", "longer", "gone", "link", "directory"])
def test_p9_other_bad_copies_are_not_used(saved: World, target: Path, how: str) -> None:
    copy = saved.layout.staged_file(saved.layout.save_dir(URL, ID), 0, "model.pt")
    data = copy.read_bytes()
    copy.unlink()
    if how in {"shorter", "longer"}:
        copy.write_bytes(data[:-1] if how == "shorter" else data + b"x")
    elif how == "link":
        copy.with_name("elsewhere").write_bytes(data)
        copy.symlink_to("elsewhere")
    elif how == "directory":
        copy.mkdir()
    report = restore(saved, target, **from_nvme(saved))
    assert contents(target) == FILES
    assert report.from_store == 1


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_p9_a_copy_that_can_not_be_read_is_not_the_end(
    saved: World, target: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A dying disk, or an agent that evicts the copy at this moment."""
    real = shutil.copyfile

    def fail(source: Path, to: Path) -> Any:
        if source.name == "model.pt":
            raise OSError(number, os.strerror(number))
        return real(source, to)

    monkeypatch.setattr(shutil, "copyfile", fail)
    report = restore(saved, target, **from_nvme(saved))
    assert contents(target) == FILES
    assert report.from_store == 1


def test_shared_copies_take_no_space(saved: World, target: Path) -> None:
    restore(saved, target, share=True, **from_nvme(saved))
    copy = saved.layout.staged_file(saved.layout.save_dir(URL, ID), 0, "big.bin")
    assert (target / "big.bin").samefile(copy)


# --- bad copies in the store ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "at", "path"), [(BIG_KEY, 7 << 20, "big.bin"), (PACK_KEY, 600, "model.pt")]
)
def test_p9_a_flipped_bit_in_the_store_is_named_with_both_digests(
    saved: World, target: Path, key: str, at: int, path: str
) -> None:
    saved.damage(key, at=at)
    with pytest.raises(IntegrityError) as caught:
        restore(saved, target)
    message = str(caught.value)
    assert key in message
    assert f"'{path}'" in message
    digests = [word.rstrip("\n,") for word in message.split() if len(word.rstrip(",")) == 16]
    assert len(set(digests)) == 2
    assert caught.value.hint
    assert not (target / path).exists()


@pytest.mark.parametrize("key", [BIG_KEY, PACK_KEY])
@pytest.mark.parametrize("when", ["flip", "cut", "before", "after"])
def test_p9_a_wire_that_lies_once_is_asked_again(
    saved: World, target: Path, key: str, when: Any
) -> None:
    saved.faults.add(Fault(verb="get", key=key, when=when))
    restore(saved, target)
    assert contents(target) == FILES


@pytest.mark.parametrize("key", [BIG_KEY, PACK_KEY])
def test_p5_downloads_that_are_always_cut_end_within_a_bound(
    saved: World, target: Path, key: str
) -> None:
    saved.faults.add(Fault(verb="get", key=key, nth=None, when="cut"))
    with pytest.raises(TransientError) as caught:
        restore(saved, target)
    assert key in str(caught.value)
    assert not (target / ("big.bin" if key == BIG_KEY else "model.pt")).exists()


def test_p9_an_object_that_is_shorter_is_corrupt(saved: World, target: Path) -> None:
    stored = saved.bucket.objects[URL.prefix + BIG_KEY]
    object.__setattr__(stored, "data", stored.data[:-1])
    with pytest.raises(IntegrityError, match=r"big\.bin"):
        restore(saved, target)
    assert not (target / "big.bin").exists()


# --- a target that would lead elsewhere -----------------------------------------------------------


def nodes_with(*files: FileEntry) -> list[Any]:
    return [node_manifest(files)]


@pytest.mark.parametrize("link", ["meta", "meta/deep"])
def test_p12_nothing_is_written_through_a_link(
    node: World, target: Path, tmp_path: Path, link: str
) -> None:
    (tmp_path / "outside").mkdir()
    (target / link).parent.mkdir(parents=True, exist_ok=True)
    (target / link).symlink_to(tmp_path / "outside")
    with pytest.raises(FormatError, match="symbolic link"):
        restore_files(node.session, nodes_with(file_entry("meta/deep/f")), target)
    assert list((tmp_path / "outside").iterdir()) == []


def test_p12_a_link_of_one_node_does_not_lead_the_files_of_another(
    node: World, target: Path, tmp_path: Path
) -> None:
    """Manifests that `make_manifest` would never have joined: somebody wrote them by hand."""
    manifests = [
        node_manifest([link_entry("d", "e")], num_nodes=2),
        node_manifest([file_entry("d/f")], node="n00001", num_nodes=2),
    ]
    with pytest.raises(FormatError, match="symbolic link"):
        restore_files(node.session, manifests, target)


def test_a_link_at_a_files_own_place_is_replaced(
    saved: World, target: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").write_text("keep")
    target.mkdir()
    (target / "model.pt").symlink_to(tmp_path / "outside")
    restore(saved, target, local_copies=lambda entry: [target / entry.path])
    assert (tmp_path / "outside").read_text() == "keep"
    assert contents(target) == FILES


@pytest.mark.parametrize("there", ["file as folder", "folder as file"])
def test_what_is_in_the_way_is_named(saved: World, target: Path, there: str) -> None:
    path = target / ("meta" if there == "file as folder" else "model.pt")
    path.parent.mkdir(parents=True)
    if there == "file as folder":
        path.write_text("")
    else:
        path.mkdir()
    with pytest.raises(FormatError, match=path.name) as caught:
        restore(saved, target)
    assert caught.value.hint == "restore into an empty directory"


def test_p5_no_room_is_said_before_the_download(
    saved: World, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_tiering.fsio.free_bytes", lambda _: 1000)
    with pytest.raises(CapacityError, match="1000 bytes free"):
        restore(saved, target)
    assert not [c for c in saved.store.calls if c.verb == "get" and "/f/" in c.key]
