"""Usage, exit codes and errors: what needs no server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from ckpt_tiering import __version__
from ckpt_tiering.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

NEEDS_URL = ["ls", "show", "verify", "doctor"]
HEAVY = {"awscrt", "boto3", "botocore", "psutil", "pydantic", "rich", "sqlite3", "torch"}


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"ckpt-tiering {__version__}\n")


def test_starting_is_quick() -> None:
    code = "import sys, json, ckpt_tiering.cli.main; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & HEAVY


def test_the_commands() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for name in ("ls", "show", "verify", "restore", "pull", "status", "doctor", "agent"):
        assert f" {name} " in done.stdout


@pytest.mark.parametrize("command", ["ls", "show", "verify", "restore", "pull", "status", "doctor"])
def test_help_of_each_command(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["no-such"], ["ls", "--no-such"], ["restore", "s3://b"]])
def test_wrong_usage(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2


@pytest.mark.parametrize("command", NEEDS_URL)
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("tier://latest", "give the store"),
        ("gs://bucket/run", "s3://bucket/path"),
        ("bucket/run", "s3://bucket/path"),
        ("s3://key:secret@bucket/run", "AWS_*"),
    ],
)
def test_urls_that_are_refused(command: str, url: str, says: str) -> None:
    done = CliRunner().invoke(app, [command, url, "--json"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "hint: " in done.stderr
    assert says in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_endpoint_with_credentials_is_refused() -> None:
    done = CliRunner().invoke(app, ["ls", "s3://b/run", "--endpoint-url", "http://me:pw@host"])
    assert done.exit_code == 2
    assert "me:pw" not in done.stderr


def test_two_saves_at_once_are_refused() -> None:
    url = "memory://b/run/commits/000000000010-abcd1234.json"
    done = CliRunner().invoke(app, ["show", url, "--save", "latest"])
    assert done.exit_code == 2
    assert "memory://b/run" in done.stderr
    assert CliRunner().invoke(app, ["verify", url, "--all"]).exit_code == 2
    assert CliRunner().invoke(app, ["show", "memory://b/run", "--save", "s3://x/y"]).exit_code == 2


def test_an_unknown_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("ckpt_tiering.reader.Reader.catalog", broken)
    done = CliRunner().invoke(app, ["ls", "memory://b/run"])
    assert isinstance(done.exception, ZeroDivisionError)


@pytest.mark.parametrize("arguments", [["show"], ["verify"], ["restore", "DIR"]])
def test_nothing_is_there(arguments: list[str], tmp_path: Path) -> None:
    command, *rest = [a.replace("DIR", str(tmp_path / "out")) for a in arguments]
    done = CliRunner().invoke(app, [command, "memory://nothing/run", *rest])
    assert done.exit_code == 2
    assert "memory://nothing/run/commits/" in done.stderr
    assert not (tmp_path / "out").exists()


def test_ls_of_nothing_is_fine() -> None:
    done = CliRunner().invoke(app, ["ls", "memory://nothing/run"])
    assert (done.exit_code, done.stdout) == (0, "")
    assert "no durable saves" in done.stderr


@pytest.mark.parametrize("how", ["file", "below_file", "full"])
def test_directories_that_can_not_be_restored_into(how: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = {"file": "file", "below_file": "file/x", "full": "."}[how]
    arguments = ["restore", "memory://nothing/run", str(tmp_path / directory)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert "no durable save" not in done.stderr


def test_status_of_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["status", str(tmp_path / "no")])
    assert done.exit_code == 2
    assert "there is no directory" in done.stderr


def test_doctor_of_a_memory_store() -> None:
    done = CliRunner().invoke(app, ["doctor", "memory://d/run", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["durability"] == "checksum"
