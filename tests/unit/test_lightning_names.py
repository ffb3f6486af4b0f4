"""P11: what a checkpoint's path is called in the store."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tiering_lightning.names import (
    Places,
    SaveName,
    is_last,
    is_link_into,
    is_scratch,
    place_link,
    tidy,
)


@pytest.mark.parametrize(
    ("path", "scratch"),
    [
        ("/tmp/xyz/.temp.ckpt", True),
        (Path("/tmp/xyz/.temp.ckpt"), True),
        ("root/.lr_find_0f5f3b0e-7d6e.ckpt", True),
        (".scale_batch_size_0f5f3b0e.ckpt", True),
        ("temp.ckpt", False),
        ("checkpoints/lr_find_.ckpt", False),
        (".lr_find_/epoch=0.ckpt", False),
        (".hidden.ckpt", False),
    ],
)
def test_scratch_files_are_told_by_their_name(path: str | Path, scratch: bool) -> None:
    assert is_scratch(path) is scratch


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("a/last.ckpt", True),
        ("last-v3.ckpt", True),
        ("last/epoch=1.ckpt", False),
        ("the-last.ckpt", False),
        ("lasting.ckpt", False),
    ],
)
def test_last_checkpoints_are_told_by_their_name(path: str, last: bool) -> None:
    assert is_last(path) is last


def test_a_url_survives_pathlib() -> None:
    for url in ("tier://latest", "s3://bucket/run"):
        assert tidy(url) == tidy(Path(url)) == url
    assert tidy(Path("/a/s3:/b")) == "/a/s3:/b"


def test_names_do_not_depend_on_where_a_node_keeps_the_run(tmp_path: Path) -> None:
    name = SaveName("logs/version_0/checkpoints/epoch=0.ckpt", "epoch=0.ckpt")
    for root in (tmp_path / "one", tmp_path / "two"):
        assert Places(root=str(root)).name_of(f"{root}/{name.name}") == name
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "two")
    assert Places(root=str(link)).name_of(f"{link}/{name.name}") == name
    assert Places(root=str(link)).name_of(f"{tmp_path}/two/{name.name}") == name


def test_a_path_outside_of_the_root_is_its_own_name(tmp_path: Path) -> None:
    outside = Places(root=str(tmp_path)).name_of("/nfs/team/last.ckpt")
    assert outside == SaveName("nfs/team/last.ckpt", "last.ckpt")


def test_a_relative_path_is_relative_to_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Places().name_of("a/../b/x.ckpt") == SaveName("b/x.ckpt", "x.ckpt")
    root = Places(root=str(tmp_path / "b"))
    assert root.name_of("b/x.ckpt") == SaveName("x.ckpt", "x.ckpt")


def test_a_callbacks_file_name_keeps_its_slashes(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    places = Places(root=str(tmp_path), dirpaths=(str(tmp_path), str(checkpoints)))
    file = "epoch=0-step=2-val/loss=0.3.ckpt"
    assert places.name_of(f"{checkpoints}/{file}") == SaveName(f"checkpoints/{file}", file)


def test_urls_are_named_by_their_path() -> None:
    places = Places(root="/project", dirpaths=("gs://bucket/ckpts", "/project/checkpoints"))
    assert places.name_of("gs://bucket/ckpts/a/b.ckpt") == SaveName(
        "bucket/ckpts/a/b.ckpt", "a/b.ckpt"
    )
    assert places.name_of("gs://other/b.ckpt") == SaveName("other/b.ckpt", "b.ckpt")


def test_our_name_for_a_link_is_that_of_the_link_not_of_its_target(tmp_path: Path) -> None:
    place_link(str(tmp_path / "here.ckpt"), Path("/staging/elsewhere.ckpt"))
    assert Places(root=str(tmp_path)).name_of(str(tmp_path / "here.ckpt")).name == "here.ckpt"


# --- links --------------------------------------------------------------------------------------


def test_a_link_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    staged = tmp_path / "nvme" / "a"
    staged.parent.mkdir()
    staged.write_text("staged")
    path = tmp_path / "deep" / "er" / ("é" * 100 + ".ckpt")  # 205 bytes
    for before in (None, "file", "dangling link"):
        if before == "file":
            path.unlink()
            path.write_text("old")
        elif before == "dangling link":
            path.unlink()
            path.symlink_to("/nowhere")
        place_link(str(path), staged)
        assert path.read_text() == "staged"
        assert list(path.parent.iterdir()) == [path]


def test_a_directory_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(IsADirectoryError):
        place_link(str(tmp_path / "checkpoint"), tmp_path / "staged")
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_only_links_into_staging_are_ours(tmp_path: Path) -> None:
    staging = tmp_path / "nvme"
    staging.mkdir()
    (staging / "staged").write_text("")
    (tmp_path / "file").write_text("")
    links = {
        "ours": staging / "staged",
        "evicted": staging / "gone",
        "linked": tmp_path / "ours",  # what save_last="link" makes
        "theirs": tmp_path / "file",
        "dangling": tmp_path / "nothing",
    }
    for name, target in links.items():
        (tmp_path / name).symlink_to(target)
    ours = {n for n in [*links, "file", "nothing"] if is_link_into(str(tmp_path / n), staging)}
    assert ours == {"ours", "evicted", "linked"}
