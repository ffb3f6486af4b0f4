from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tiering.errors import ConfigError, ErrorKind, FormatError
from ckpt_tiering.model.ids import MAX_REPEAT, MAX_STEP, SaveId, node_name
from ckpt_tiering.model.layout import (
    COMMITS_PREFIX,
    StagingLayout,
    StoreUrl,
    check_relative_path,
    commit_key,
    encode_path,
    file_key,
    node_manifest_key,
    node_manifest_prefix,
    pack_key,
    save_prefix,
)
from tests.unit.model.strategies import AWKWARD_PATHS, components, legal_paths

ID = SaveId(100, "abcd")
LONGEST_ID = SaveId(MAX_STEP, "z" * 32, MAX_REPEAT)
MAX_KEY_BYTES = 1024

# --- paths ----------------------------------------------------------------------------------------


@given(legal_paths)
def test_p11_legal_paths_pass_as_they_are(path: str) -> None:
    assert check_relative_path(path) == path


@pytest.mark.parametrize("path", AWKWARD_PATHS)
def test_p11_awkward_paths_are_legal(path: str) -> None:
    assert check_relative_path(path) == path


@given(st.text(st.sampled_from("ab./\0"), max_size=12))
def test_p12_a_path_that_passes_stays_below_its_root(path: str) -> None:
    try:
        check_relative_path(path)
    except FormatError:
        return
    inside = Path("/root/of") / path
    assert ".." not in inside.parts
    assert str(inside) == f"/root/of/{path}", "no component may vanish"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "/a",
        ".",
        "..",
        "a/..",
        "a/../b",
        "./a",
        "a//b",
        "a/",
        "a\x00b",
        "\udcff",
        "x" * 256,
        "\u00e4" * 128,
        "/".join(["d" * 200] * 21),
    ],
)
def test_p12_paths_that_leave_or_do_not_fit_are_refused(path: str) -> None:
    with pytest.raises(FormatError) as caught:
        check_relative_path(path)
    assert caught.value.kind is ErrorKind.PATH
    assert caught.value.hint


# --- keys -----------------------------------------------------------------------------------------


@given(legal_paths)
def test_p11_keys_hold_only_what_no_store_rewrites(path: str) -> None:
    encoded = encode_path(path)
    assert re.fullmatch(r"[A-Za-z0-9._=%/-]+", encoded)
    assert not {"", ".", ".."} & set(encoded.split("/"))
    assert max(map(len, encoded.split("/"))) <= 255
    if not encoded.startswith("sha256-"):
        assert unquote(encoded) == path, "the path can be read from the key"


@given(st.lists(st.one_of(legal_paths, components), min_size=2, max_size=6, unique=True))
def test_p11_no_two_paths_have_one_key(paths: list[str]) -> None:
    paths += [e for path in paths if (e := encode_path(path)) not in paths]
    assert len({encode_path(path) for path in paths}) == len(paths)


def test_p11_a_file_named_like_a_hashed_one_is_another_one() -> None:
    long = "/".join(["d" * 200] * 5) + "/model.pt"
    assert encode_path(long).startswith("sha256-")
    assert encode_path(long).endswith(".pt")
    assert encode_path(encode_path(long)) != encode_path(long)


@given(legal_paths)
def test_p11_every_key_fits_below_the_longest_root(path: str) -> None:
    root = StoreUrl.parse("s3://bucket/" + "r" * 247)
    key = root.prefix + file_key(LONGEST_ID, node_name(99_999), path)
    assert len(key.encode()) <= MAX_KEY_BYTES


def test_the_layout_of_keys_is_pinned() -> None:
    assert save_prefix(ID) == "saves/000000000100-abcd/"
    assert file_key(ID, "n00000", "a b/c") == "saves/000000000100-abcd/n00000/f/a%20b/c"
    assert pack_key(ID, "n00000", 3) == "saves/000000000100-abcd/n00000/p/0003.tar"
    assert node_manifest_prefix(ID) == "saves/000000000100-abcd/nodes/"
    assert node_manifest_key(ID, "n00001") == "saves/000000000100-abcd/nodes/n00001.json"
    assert commit_key(ID) == f"{COMMITS_PREFIX}000000000100-abcd.json"


# --- URLs -----------------------------------------------------------------------------------------


@given(st.lists(components, max_size=4))
def test_a_url_is_normalised_once(parts: list[str]) -> None:
    text = "s3://bucket/" + "/".join(p.replace("?", "").replace("#", "") for p in parts)
    try:
        url = StoreUrl.parse(text)
    except ConfigError:
        return
    assert StoreUrl.parse(str(url)) == url
    assert StoreUrl.parse(str(url) + "//") == url
    assert not url.prefix or re.fullmatch(r"([A-Za-z0-9._=%-]+/)+", url.prefix)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", url.slug)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/run",
        "http://bucket/run",
        "s3://",
        "s3:///run",
        "s3://-b/run",
        "s3://b/a/../c",
        "s3://b/./c",
        "s3://b/%2e%2e/c",
        "s3://[b/run",
        "s3://b/\udcff",
        "s3://b/" + "r" * 300,
        "s3://b:99/run",
    ],
)
def test_urls_that_are_no_root_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        StoreUrl.parse(url)


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:s3cr3t@bucket/run",
        "s3://bucket/run?X-Amz-Signature=s3cr3t",
        "s3://bucket/run#s3cr3t",
        "https://key:s3cr3t@bucket/run",
        "https://bucket.s3.amazonaws.com/run?X-Amz-Signature=s3cr3t",
        "s3:/key:s3cr3t@bucket/run",
        "key:s3cr3t@bucket/run",
    ],
)
def test_p10_a_url_with_credentials_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        StoreUrl.parse(url)
    assert "s3cr3t" not in str(caught.value)


ROOTS = ["s3://b", "s3://b/run", "s3://b/a/saves/exp1", "s3://b/commits", "s3://b/saves/saves"]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("save_id", [ID, SaveId(100, "abcd", 12)], ids=str)
@pytest.mark.parametrize(
    "below",
    [
        "commits/{}.json",
        "commits/{}",
        "saves/{}",
        "saves/{}/",
        "saves/{}/nodes/n00000.json",
        "saves/{}/n00000/f/saves/x/model.pt",
        "saves/{}/n00000/f/commits/000000000001-zzzz.json",
        "saves/{}/n00000/p/0000.tar",
    ],
)
def test_the_url_of_anything_in_a_save_leads_to_its_root(
    root: str, save_id: SaveId, below: str
) -> None:
    url = StoreUrl.parse(f"{root}/{below.format(save_id)}")
    assert url.split_save() == (StoreUrl.parse(root), save_id)


@pytest.mark.parametrize("url", [*ROOTS, "s3://b/saves/not-an-id", "s3://b/x000000000100-abcd"])
def test_the_url_of_a_root_has_no_save(url: str) -> None:
    assert StoreUrl.parse(url).split_save() == (StoreUrl.parse(url), None)


# --- the staging disk -----------------------------------------------------------------------------


def test_runs_do_not_share_a_directory() -> None:
    layout = StagingLayout(Path("/nvme"))
    urls = ["s3://b/a-b", "s3://b/a/b", "s3://b-a/b", "memory://b/a/b", f"s3://b/{'x' * 90}/1"]
    urls.append(f"s3://b/{'x' * 90}/2")
    directories = {layout.run_dir(StoreUrl.parse(url)) for url in urls}
    assert len(directories) == len(urls)
    assert all(d.parent == layout.runs_dir for d in directories)


def test_the_layout_of_the_staging_disk_is_pinned() -> None:
    layout, url = StagingLayout(Path("/nvme")), StoreUrl.parse("s3://b/run")
    run = layout.run_dir(url)
    assert re.fullmatch(r"/nvme/runs/b-run-[0-9a-f]{10}", str(run))
    assert layout.save_dir(url, ID) == run / "saves/000000000100-abcd"
    assert layout.rank_dir(url, ID, 3) == run / "saves/000000000100-abcd/r000003"
    assert layout.staged_file(layout.save_dir(url, ID), 3, "a/b") == (
        layout.rank_dir(url, ID, 3) / "f/a/b"
    )
    assert layout.restored_dir(url, ID) == run / "restored/000000000100-abcd"
