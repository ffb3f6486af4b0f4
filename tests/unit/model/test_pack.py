from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.model import pack as pack_module
from ckpt_tiering.model.pack import PACK_BELOW_BYTES, PACK_BYTES, Pack, plan_packs
from tests.unit.model.strategies import AWKWARD_PATHS, legal_paths

if TYPE_CHECKING:
    from pathlib import Path

Files = dict[str, tuple[bytes, int]]  # path -> contents, mode

files = st.dictionaries(
    legal_paths, st.tuples(st.binary(max_size=1500), st.integers(0, 0o777)), min_size=1, max_size=6
)


def plan(contents: Files) -> list[Pack]:
    return list(plan_packs((path, len(data), mode) for path, (data, mode) in contents.items()))


def build(pack: Pack, contents: Files) -> bytes:
    """Put a pack together as the upload does."""
    archive = b"".join(m.header + contents[m.path][0] + m.padding for m in pack.members)
    return archive + pack.trailer


@given(files)
def test_p13_stock_tar_reads_a_pack(contents: Files) -> None:
    (pack,) = plan(contents)
    archive = build(pack, contents)
    assert len(archive) == pack.size_bytes
    assert len(archive) % tarfile.BLOCKSIZE == 0
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        seen = {m.name: (tar.extractfile(m), m.mode) for m in tar.getmembers()}
        assert all(m.isreg() and m.mtime == 0 and not m.uname for m in tar.getmembers())
        read = {n: (f.read() if f else b"", mode) for n, (f, mode) in seen.items()}
    assert read == contents


@given(files)
def test_p13_a_members_bytes_lie_at_its_offset(contents: Files) -> None:
    (pack,) = plan(contents)
    archive = build(pack, contents)
    for member in pack.members:
        end = member.offset + member.size_bytes
        assert archive[member.offset : end] == contents[member.path][0]


@given(files)
def test_p2_a_pack_built_again_is_the_same_bytes(contents: Files) -> None:
    assert plan(contents) == plan(dict(contents))


def test_p13_the_tar_of_the_system_extracts_awkward_names(tmp_path: Path) -> None:
    tar = shutil.which("tar")
    if tar is None:
        pytest.skip("no tar on this machine")
    contents: Files = {p: (p.encode() * 3, 0o644) for p in AWKWARD_PATHS if len(p) < 1000}
    (pack,) = plan(contents)
    (tmp_path / "p.tar").write_bytes(build(pack, contents))
    subprocess.run([tar, "-xf", "p.tar"], cwd=tmp_path, check=True, env={"LC_ALL": "C.UTF-8"})
    for path, (data, _) in contents.items():
        assert (tmp_path / path).read_bytes() == data


@given(st.lists(st.integers(0, PACK_BELOW_BYTES - 1), max_size=60))
def test_packs_stay_near_their_length_and_keep_the_order(sizes: list[int]) -> None:
    packs = list(plan_packs((f"f{i}", size, 0o644) for i, size in enumerate(sizes)))
    members = [m for pack in packs for m in pack.members]
    assert [(m.path, m.size_bytes) for m in members] == [(f"f{i}", s) for i, s in enumerate(sizes)]
    assert all(pack.members for pack in packs)
    assert all(pack.size_bytes <= PACK_BYTES + PACK_BELOW_BYTES for pack in packs)


@given(st.lists(st.integers(0, PACK_BELOW_BYTES - 1), min_size=1, max_size=60))
def test_the_files_of_one_pack_alone_make_that_pack_again(sizes: list[int]) -> None:
    """The upload plans each pack anew, from its own files only."""
    for pack in plan_packs((f"f{i}", size, 0o644) for i, size in enumerate(sizes)):
        assert list(plan_packs((m.path, m.size_bytes, m.mode) for m in pack.members)) == [pack]


def test_many_empty_files_count_by_their_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_module, "PACK_BYTES", 10 * 512)
    packs = plan_packs((f"f{i}", 0, 0o644) for i in range(25))
    assert [len(pack.members) for pack in packs] == [11, 11, 3]


def test_no_files_make_no_pack() -> None:
    assert list(plan_packs([])) == []
