from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import CapacityError, ErrorKind, FormatError
from ckpt_tiering.model.digest import StreamDigest, crc64
from ckpt_tiering.model.ids import SaveId
from ckpt_tiering.model.manifest import FileEntry
from ckpt_tiering.model.pack import PACK_BELOW_BYTES, plan_packs
from ckpt_tiering.model.plan import digest_of, plan_objects
from ckpt_tiering.units import GIB, MIB
from tests.unit.model.documents import dir_entry, file_entry, link_entry

ID = SaveId(100, "abcd")


def sized(path: str, size_bytes: int, part_bytes: int = 128 * MIB) -> FileEntry:
    """A file of which only the length counts."""
    return FileEntry(
        path=path,
        kind="file",
        rank=0,
        size_bytes=size_bytes,
        part_bytes=part_bytes,
        parts=("0" * 16,) * -(-size_bytes // part_bytes),
    )


@given(st.lists(st.sampled_from([0, 1, MIB, PACK_BELOW_BYTES - 1, PACK_BELOW_BYTES, 1 << 34])))
def test_p13_large_files_are_objects_small_ones_lie_in_packs(sizes: list[int]) -> None:
    files = [sized(f"f{i}", size) for i, size in enumerate(sizes)]
    objects, entries = plan_objects(ID, "n00000", files, 128 * MIB)
    assert [e.path for e in entries] == [f.path for f in files]
    assert len({o.key for o in objects}) == len(objects)
    for entry in entries:
        holder = objects[entry.object]
        assert holder.is_pack == (entry.size_bytes < PACK_BELOW_BYTES)
        assert entry.offset + entry.size_bytes <= holder.size_bytes
        if not holder.is_pack:
            assert (entry.offset, entry.size_bytes) == (0, holder.size_bytes)
            assert holder.key.endswith(f"/f/{entry.path}")


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.binary(max_size=1200), min_size=1))
def test_p3_the_checksum_of_a_pack_is_known_without_reading_it(contents: dict[str, bytes]) -> None:
    files = [file_entry(path, data) for path, data in contents.items()]
    (planned,), _ = plan_objects(ID, "n00000", files, 128 * MIB)
    (pack,) = plan_packs((f.path, f.size_bytes, f.mode) for f in files)
    archive = b"".join(m.header + contents[m.path] + m.padding for m in pack.members)
    archive += pack.trailer
    assert (planned.size_bytes, planned.crc) == (len(archive), crc64(archive))


@given(st.binary(max_size=50), st.integers(1, 9))
def test_the_digest_goes_into_an_entry_and_back(data: bytes, part_bytes: int) -> None:
    stream = StreamDigest(part_bytes)
    stream.update(data)
    assert digest_of(file_entry("a", data, part_bytes=part_bytes)) == stream.digest()


def test_p2_a_plan_made_again_is_the_same() -> None:
    files = [sized("big", 20 * MIB), file_entry("a"), dir_entry("d"), link_entry("l", "a")]
    assert plan_objects(ID, "n00000", files, 128 * MIB) == plan_objects(
        ID, "n00000", files, 128 * MIB
    )


def test_links_and_directories_take_no_object() -> None:
    files = [dir_entry("d"), link_entry("l", "d")]
    assert plan_objects(ID, "n00000", files, 128 * MIB) == ((), tuple(files))


def test_p5_b15_a_huge_file_is_planned_with_longer_parts() -> None:
    (planned,), _ = plan_objects(ID, "n00000", [sized("huge", 1536 * GIB)], 128 * MIB)
    assert planned.part_bytes == 256 * MIB


def test_p5_a_file_over_the_limit_is_named() -> None:
    with pytest.raises(CapacityError, match="'too/big'") as caught:
        plan_objects(ID, "n00000", [sized("too/big", 60 << 40, 5 * GIB)], 5 * GIB)
    assert caught.value.kind is ErrorKind.OBJECT_TOO_LARGE


def test_p11_the_same_path_from_two_ranks_is_refused() -> None:
    with pytest.raises(FormatError, match="twice"):
        plan_objects(ID, "n00000", [file_entry("a"), file_entry("a", rank=1)], MIB)
