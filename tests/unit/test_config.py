from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tiering.config import StoreOptions, TieringConfig, load_config
from ckpt_tiering.errors import ConfigError
from ckpt_tiering.units import MIB

ROOT: dict[str, Any] = {"store": "s3://bucket/run", "staging": "/nvme"}


def refusal(environ: dict[str, str] | None = None, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(environ or {}, **ROOT | arguments)
    return str(caught.value)


def file_with(tmp_path: Path, text: str, name: str = "c.yaml") -> dict[str, str]:
    path = tmp_path / name
    path.write_text(text)
    return {"CKPT_TIERING_CONFIG": str(path)}


# --- precedence -----------------------------------------------------------------------------------


def test_arguments_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    environ = file_with(tmp_path, "concurrency: 1\nlinger: 1s\nresume_wait: 1s\nregion: file\n")
    environ |= {"CKPT_TIERING_CONCURRENCY": "2", "CKPT_TIERING_LINGER": "2s"}
    config = load_config(environ, **ROOT, concurrency=3, region=None)
    assert (config.concurrency, config.linger, config.resume_wait) == (3, 2.0, 1.0)
    assert config.region == "file", "None means not given"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "ckpt_tiering: {store: 's3://b/r', staging: /n, part_bytes: 8MiB}\nother: 1\n"),
        ("c.yml", "store: s3://b/r\nstaging: /n\npart_bytes: 8388608\n"),
        ("c.toml", '[ckpt_tiering]\nstore = "s3://b/r"\nstaging = "/n"\npart_bytes = "8MiB"\n'),
    ],
)
def test_files_are_yaml_or_toml_with_or_without_a_section(
    tmp_path: Path, name: str, text: str
) -> None:
    config = load_config(file_with(tmp_path, text, name))
    assert (config.store, config.staging, config.part_bytes) == ("s3://b/r", Path("/n"), 8 * MIB)


def test_everything_can_come_from_the_environment() -> None:
    config = load_config(
        {
            "CKPT_TIERING_STORE": "s3://b/r",
            "CKPT_TIERING_STAGING": "/n",
            "CKPT_TIERING_MAX_BANDWIDTH": "2.5GB/s",
            "CKPT_TIERING_ON_FAILURE": "raise",
            "AWS_REGION": "not ours",
        }
    )
    assert (config.max_bandwidth, config.on_failure) == (2_500_000_000, "raise")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "not valid"),
        ("- a\n", "no options"),
        ("", "no options"),
        ("ckpt_tiering: 3\n", "no options"),
        ("\x00", "not valid"),
    ],
    ids=["torn", "list", "empty", "number", "binary"],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, why: str) -> None:
    message = refusal(file_with(tmp_path, text))
    assert "c.yaml" in message
    assert why in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "gone.yaml can't be read" in refusal(
        {"CKPT_TIERING_CONFIG": str(tmp_path / "gone.yaml")}
    )
    (tmp_path / "latin.yaml").write_bytes(b"region: \xff\n")
    assert "not text" in refusal({"CKPT_TIERING_CONFIG": str(tmp_path / "latin.yaml")})


# --- what is wrong, all at once -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "arguments"),
    [({}, {"part_byts": 1}), ({"CKPT_TIERING_PART_BYTS": "1"}, {})],
    ids=["argument", "environment"],
)
def test_an_unknown_option_gets_the_nearest_name(
    environ: dict[str, str], arguments: dict[str, Any]
) -> None:
    message = refusal(environ, **arguments)
    assert "'part_byts'" in message
    assert "did you mean 'part_bytes'?" in message


def test_an_unknown_option_of_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    message = refusal(file_with(tmp_path, "zzz: 1\n"))
    assert "'zzz'" in message
    assert "c.yaml" in message
    assert "the options are endpoint_url" in message


def test_p5_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    environ = file_with(tmp_path, "stor: s3://b\n") | {"CKPT_TIERING_LINGR": "1s"}
    message = refusal(
        environ,
        store="ftp://b",
        endpoint_url="http://a:b@h",
        concurrency=0,
        linger="soon",
        stging=1,
    )
    for name in ("'stor'", "'lingr'", "'stging'", "store:", "endpoint_url:", "concurrency:"):
        assert name in message
    assert "'soon' is not a duration" in message


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="store: Field required; staging: Field required"):
        load_config({})


# --- values ---------------------------------------------------------------------------------------

MANY = 10**9


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [
        ("part_bytes", 1, str(5 * MIB)),
        ("part_bytes", "6GiB", str(5120 * MIB)),
        ("concurrency", 0, "1"),
        ("concurrency", 65, "64"),
        ("concurrency", MANY, "64"),
        ("max_bandwidth", -1, str(MIB)),
        ("max_bandwidth", 0, str(MIB)),
        ("nvme_budget", 5, str(MIB)),
        ("linger", -1, "0"),
        ("drain_timeout", -0.5, "0"),
    ],
)
def test_p5_b22_values_out_of_range_are_refused_with_the_range(
    option: str, value: Any, bound: str
) -> None:
    message = refusal(**{option: value})
    assert f"{option}:" in message
    assert bound in message


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_bandwidth", float("inf")),
        ("linger", float("inf")),
        ("linger", float("nan")),
        ("part_bytes", True),
        ("part_bytes", [1]),
        ("concurrency", "many"),
        ("concurrency", 1.5),
        ("on_failure", "ignore"),
        ("staging", ""),
        ("staging", 3),
        ("store", 3),
        ("region", 1),
    ],
)
def test_p5_values_of_another_kind_are_config_errors(option: str, value: Any) -> None:
    assert f"{option}" in refusal(**{option: value})


def test_nothing_in_a_file_is_not_given_or_refused(tmp_path: Path) -> None:
    assert load_config(file_with(tmp_path, "max_bandwidth:\n"), **ROOT).max_bandwidth is None
    assert "part_bytes" in refusal(file_with(tmp_path, "part_bytes:\n"))


def test_p10_secrets_are_refused_and_not_repeated() -> None:
    assert "s3cr3t" not in refusal(endpoint_url="http://key:s3cr3t@host")
    assert "s3cr3t" not in refusal(store="s3://key:s3cr3t@bucket/run", concurrency=0)
    assert "s3cr3t" not in refusal(store="https://key:s3cr3t@bucket/run")
    with pytest.raises(ValueError, match="credentials"):
        StoreOptions(endpoint_url="http://key:s3cr3t@host")


def test_settings_without_effect_are_refused() -> None:
    assert "no effect" in refusal(store="memory://b/run", endpoint_url="http://localhost:1")


def test_the_staging_directory_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert load_config({}, **ROOT | {"staging": "here"}).staging == tmp_path / "here"
    assert load_config({}, **ROOT | {"staging": "~/ckpt"}).staging == Path("/home/me/ckpt")


def test_a_configuration_is_frozen_and_splits_off_what_a_store_needs() -> None:
    config = load_config({}, **ROOT, region="eu-central-1", endpoint_url="http://h:1")
    assert config.store_options == StoreOptions(endpoint_url="http://h:1", region="eu-central-1")
    assert str(config.url) == "s3://bucket/run"
    with pytest.raises(ValueError, match="frozen"):
        config.concurrency = 5  # type: ignore[misc]


def test_every_option_is_described() -> None:
    described = f"{TieringConfig.__doc__}{StoreOptions.__doc__}"
    assert [name for name in TieringConfig.model_fields if f"{name}:" not in described] == []
