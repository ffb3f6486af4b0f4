"""P11, P13: any legal tree comes back byte for byte, on an honest store and on a poor one."""

from __future__ import annotations

import os
import random
import unicodedata
from typing import TYPE_CHECKING

import pytest

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.errors import FormatError
from ckpt_tiering.units import MIB
from tests.staging import reader, tree

if TYPE_CHECKING:
    from pathlib import Path

PART_BYTES = 5 * MIB
PACKED_BELOW = 8 * MIB
WAIT_S = 90.0

SIZES = {
    "zero": 0,
    "one": 1,
    "just_packed": PACKED_BELOW - 1,
    "just_not": PACKED_BELOW,
    "just_over": PACKED_BELOW + 1,
    "three_parts_and_one": 3 * PART_BYTES + 1,
}
NAMES = (
    *"=[]?*#%+&:~",
    "epoch=0-step=2-val/loss=0.359.ckpt",
    "with space",
    "é 日本",
    unicodedata.normalize("NFC", "café-é"),
    unicodedata.normalize("NFD", "café-é"),
    "l" * 200,
    "日" * 66 + "xx",  # 200 bytes in UTF-8, 600 in a key
    "new\nline\ttab",
    'quote"back\\slash',
    ".hidden",
    "%2e%2e/%00",
    "a+b c%20d",
    "x.json.ckpt-tiering-partial",
    "deep/" * 40 + "leaf",
)


def write(root: Path, path: str, data: bytes) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data)


def round_trip(source: Path, url: str, tmp_path: Path) -> Path:
    """Save a directory, wait for it, and restore it where no NVMe has a copy."""
    with TieredCheckpointer(url, staging=tmp_path / "nvme", part_bytes=PART_BYTES) as saver:
        saver.save(100, source)
        saver.wait(WAIT_S)
    seen = reader(url).latest()
    assert seen is not None
    target = tmp_path / "restored"
    reader(url).restore(seen, target)
    return target


def test_p11_sizes_around_every_border(any_bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    rng = random.Random(1)
    for name, size in SIZES.items():
        write(source, name, rng.randbytes(size))
    target = round_trip(source, any_bucket_url, tmp_path)
    assert tree(target) == tree(source)


def test_p11_names_are_data(any_bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for index, name in enumerate(NAMES):
        write(source, name, f"{index}".encode())
        write(source, f"folder {index}/{name}", b"nested")
    write(source, "big é#[1]%20.bin", os.urandom(PACKED_BELOW))
    target = round_trip(source, any_bucket_url, tmp_path)
    assert tree(target) == tree(source)


def test_p11_two_thousand_tiny_files(any_bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    for index in range(2_000):
        write(source, f"shard-{index % 37}/file-{index}", b"%d" % index)
    target = round_trip(source, any_bucket_url, tmp_path)
    assert tree(target) == tree(source)


def test_p11_links_and_empty_directories(any_bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, "step=10/weights", b"w")
    (source / "empty" / "nested").mkdir(parents=True)
    (source / "latest").symlink_to("step=10")
    (source / "step=10" / "up").symlink_to("../step=10/weights")
    (source / "dangling").symlink_to("step=99")
    (source / "hard").hardlink_to(source / "step=10" / "weights")
    target = round_trip(source, any_bucket_url, tmp_path)
    assert tree(target) == tree(source)
    assert (target / "empty" / "nested").is_dir()
    assert (target / "latest" / "weights").read_bytes() == b"w"


@pytest.mark.parametrize("link", ["/etc/passwd", "../outside", "a/../../outside"])
def test_p12_links_out_of_the_tree_are_refused(link: str, bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    write(source, "ok", b"fine")
    (source / "bad").symlink_to(link)
    with TieredCheckpointer(bucket_url, staging=tmp_path / "nvme") as saver:
        with pytest.raises(FormatError, match="leads out of the checkpoint"):
            saver.save(1, source)
        saver.wait(WAIT_S)
        assert saver.latest() is None
    assert not list((tmp_path / "nvme" / "runs").glob("*/saves/*"))
