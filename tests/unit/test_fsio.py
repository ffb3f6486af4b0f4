from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import CapacityError, ConfigError
from ckpt_tiering.fsio import (
    boot_id,
    digest_file,
    disk_errors,
    ensure_local_filesystem,
    ensure_room,
    free_bytes,
    fsync_directory,
    make_private,
    remove_tree,
    tree_bytes,
    write_atomically,
)
from ckpt_tiering.model.digest import StreamDigest


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_atomically(path, b"one")
    with path.open("rb") as old:
        write_atomically(path, b"two and more", durable=False)
        assert old.read() == b"one"
    assert path.read_bytes() == b"two and more"
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_p5_a_replacement_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """In a child, because its limit on file lengths holds for the whole process."""
    path = tmp_path / "status.json"
    write_atomically(path, b"one")
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from pathlib import Path; from ckpt_tiering.fsio import disk_errors, write_atomically\n"
        "from ckpt_tiering.errors import CapacityError\n"
        f"path = Path({str(path)!r})\n"
        "try:\n"
        "    with disk_errors(path): write_atomically(path, bytes(10000))\n"
        "except CapacityError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert done.stdout == b"refused\n"
    assert path.read_bytes() == b"one"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_p5_no_room_is_a_capacity_error_that_names_the_path(number: int) -> None:
    refused = pytest.raises(CapacityError, match=r"/nvme/x can't be written")
    with refused as caught, disk_errors(Path("/nvme/x")):
        raise OSError(number, os.strerror(number))
    assert caught.value.hint


def test_other_errors_of_the_disk_stay_what_they_are() -> None:
    with pytest.raises(PermissionError), disk_errors(Path("/x")):
        raise PermissionError(errno.EACCES, "no")
    with pytest.raises(CapacityError, match="mine"), disk_errors(Path("/x")):
        raise CapacityError("mine")


# --- deleting -------------------------------------------------------------------------------------


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    """A staging directory beside something that must never be touched."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/data").write_text("keep")
    staging = tmp_path / "staging"
    (staging / "runs/a/b").mkdir(parents=True)
    (staging / "runs/a/b/file").write_text("x")
    (staging / "runs/a/link").symlink_to(tmp_path / "precious")
    return staging


@pytest.mark.parametrize(
    "path",
    [".", "", "..", "../precious", "runs/../../precious", "runs/a/..//../..", "runs/a/link/data"],
)
def test_p6_nothing_outside_is_deleted(staging: Path, path: str) -> None:
    with pytest.raises(ValueError, match="not below"):
        remove_tree(staging / path, inside=staging)
    assert (staging.parent / "precious/data").read_text() == "keep"
    assert (staging / "runs/a/b/file").exists()


def test_p6_a_link_is_deleted_not_what_it_points_to(staging: Path) -> None:
    remove_tree(staging / "runs/a/link", inside=staging)
    remove_tree(staging / "runs", inside=staging)
    assert not (staging / "runs").exists()
    assert (staging.parent / "precious/data").read_text() == "keep"


def test_a_missing_tree_is_no_error(staging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_tree(staging / "gone", inside=staging)
    monkeypatch.chdir(staging.parent)
    remove_tree(Path("staging/runs"), inside=staging)
    assert not (staging / "runs").exists()


# --- looking --------------------------------------------------------------------------------------


@given(data=st.binary(max_size=100), part_bytes=st.integers(1, 40))
def test_a_file_has_the_digest_of_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, part_bytes: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "digested"
    path.write_bytes(data)
    stream = StreamDigest(part_bytes)
    stream.update(data)
    assert digest_file(path, part_bytes) == stream.digest()


def test_a_tree_takes_what_its_files_take(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"x" * 10_000)
    (tmp_path / "link").symlink_to("d/f")
    assert 10_000 <= tree_bytes(tmp_path) <= 10_000 + 65_536
    assert tree_bytes(tmp_path / "gone") == 0


def test_p5_what_can_not_fit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    ensure_room(tmp_path, 0)
    with pytest.raises(CapacityError, match="bytes free") as caught:
        ensure_room(tmp_path, free_bytes(tmp_path) * 2 + (1 << 40))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", ["nfs4", "NFS", "lustre", "fuse.sshfs", "cifs"])
def test_a_network_file_system_is_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match="network file system"):
        ensure_local_filesystem(tmp_path, kind=kind)


def test_a_local_file_system_is_fine(tmp_path: Path) -> None:
    ensure_local_filesystem(tmp_path)
    ensure_local_filesystem(tmp_path, kind="xfs")


def test_a_private_directory_is_its_owners_alone(tmp_path: Path) -> None:
    path = make_private(tmp_path / "a/b")
    assert path.stat().st_mode & 0o777 == 0o700
    assert make_private(path) == path
    fsync_directory(path)


def test_a_directory_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/staging can't be made"):
        make_private(tmp_path / "file/staging")


def test_a_boot_has_one_id() -> None:
    assert boot_id() == boot_id()
    assert len(boot_id()) == 36
