"""The command line against real servers: what it says, what it finds, and how it ends."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from ckpt_tiering.agent.__main__ import lock_staging
from ckpt_tiering.agent.loop import Agent
from ckpt_tiering.cli.main import app
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.journal.journal import Journal
from ckpt_tiering.model.layout import StagingLayout, StoreUrl, commit_key, file_key, pack_key
from ckpt_tiering.model.lifecycle import SaveState
from ckpt_tiering.pipeline.admit import admit
from ckpt_tiering.units import MIB
from tests.documented import check
from tests.staging import PART_BYTES, stage_save, tree

if TYPE_CHECKING:
    from collections.abc import Callable

    from mypy_boto3_s3.literals import ChecksumAlgorithmType
    from typer.testing import Result

    from ckpt_tiering.model.ids import SaveId
    from tests.servers import MotoServer, S3Server, WeedServer

SCRIPT = Path(sys.executable).with_name("ckpt-tiering")
EVIL = "e\x1b[31mvil\u202e\n.bin"
MODEL = "model é 日本.bin"
FILES = {
    MODEL: random.Random(7).randbytes(8 * MIB + 3),
    "dir [x]=1?*#/%&+~: y": b"awkward",
    "dir [x]=1?*#/b": b"b",
    EVIL: b"evil",
    "empty": b"",
    "n" * 200: b"long",
}


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def answer(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run a command with ``--json`` and hold the answer against the documentation."""
    done = cli(*arguments, "--json")
    assert done.exit_code == code, done.output
    value = json.loads(done.stdout)
    check(str(arguments[0]), value)
    assert isinstance(value, dict)
    return value


def script(*arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the console script that was installed."""
    return subprocess.run(
        [SCRIPT, *map(str, arguments)],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def ship(staging: Path) -> None:
    """Run an agent in this process until nothing is left to do."""
    layout = StagingLayout(staging)
    lock = lock_staging(layout)
    assert lock is not None
    Agent(layout, until="idle").run()
    os.close(lock)


class Bucket:
    """What others may do to the run's objects, behind our back."""

    def __init__(self, server: S3Server, url: str) -> None:
        self._client = server.client()
        self._bucket, _, self._prefix = url.removeprefix("s3://").partition("/")

    def get(self, key: str) -> bytes:
        answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")
        return answer["Body"].read()

    def put(self, key: str, data: bytes, algorithm: ChecksumAlgorithmType = "CRC32") -> None:
        self._client.put_object(
            Bucket=self._bucket,
            Key=f"{self._prefix}/{key}",
            Body=data,
            ChecksumAlgorithm=algorithm,
        )

    def delete(self, key: str) -> None:
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")

    def keys(self) -> list[str]:
        listing = self._client.list_objects_v2(Bucket=self._bucket, Prefix=f"{self._prefix}/")
        return [entry["Key"] for entry in listing.get("Contents", ())]


@dataclass(frozen=True)
class Run:
    """A run on weed with two durable saves, for tests that only look."""

    url: str
    staging: Path
    older: SaveId
    newer: SaveId


@pytest.fixture(scope="module")
def made_run(weed: WeedServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    staging = tmp_path_factory.mktemp("run") / "nvme"
    url = weed.new_root()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in weed.env().items():
            patch.setenv(name, value)
        older = stage_save(staging, url, FILES, name="epoch=1/a.ckpt")
        newer = stage_save(staging, url, FILES, step=20, name=f"{EVIL}[bold]")
        ship(staging)
    return Run(url, staging, older, newer)


@pytest.fixture
def run(made_run: Run, bucket_url: str) -> Run:
    """Make the run, with the environment leading to it."""
    return made_run


@pytest.fixture
def bucket(weed: WeedServer, bucket_url: str) -> Bucket:
    return Bucket(weed, bucket_url)


@pytest.fixture
def save_id(bucket_url: str, tmp_path: Path) -> SaveId:
    """Make one durable save in a run of its own, to be spoilt."""
    save_id = stage_save(tmp_path / "nvme", bucket_url, FILES)
    ship(tmp_path / "nvme")
    return save_id


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def large_key(save_id: SaveId) -> str:
    return file_key(save_id, "n00000", MODEL)


# --- ls, show ------------------------------------------------------------------------------------


def test_ls(run: Run) -> None:
    seen = answer("ls", run.url)
    assert seen["unusable"] == []
    assert [s["save_id"] for s in seen["saves"]] == [str(run.newer), str(run.older)]
    assert [s["name"] for s in seen["saves"]] == [f"{EVIL}[bold]", "epoch=1/a.ckpt"]
    assert seen["saves"][0]["verified"] == "checksum"
    done = cli("ls", run.url)
    assert (done.exit_code, done.stderr) == (0, "")
    assert "\x1b" not in done.output
    assert "\u202e" not in done.output
    assert "e\\x1b[31mvil\\u202e\\n.bin[bold]" in done.stdout
    ids = [line.split()[0] for line in done.stdout.splitlines()]
    assert ids == ["save", str(run.newer), str(run.older)]


def test_ls_warns_of_what_is_no_commit(bucket: Bucket, bucket_url: str) -> None:
    bucket.put("commits/READ\x1bME.txt", b"not ours")
    bucket.put("commits/000000000099-zzzzzzzz.json", b"{")
    seen = answer("ls", bucket_url)
    assert sorted(u["problem"] for u in seen["unusable"]) == ["foreign", "manifest"]
    done = cli("ls", bucket_url)
    assert done.exit_code == 0
    assert "READ\\x1bME.txt is no commit of ours" in done.stderr
    assert "000000000099-zzzzzzzz.json is not JSON" not in done.stdout


def test_show(run: Run) -> None:
    older, newer, bucket_url = run.older, run.newer, run.url
    assert answer("show", bucket_url)["save"]["save_id"] == str(newer)
    for arguments in (
        [f"{bucket_url}/{commit_key(older)}"],
        [f"{bucket_url}/saves/{older}"],
        [bucket_url, "--save", older],
        [bucket_url, "--save", "epoch=1/a.ckpt"],
        [bucket_url, "--save", "/other/node/epoch=1/a.ckpt"],
    ):
        assert answer("show", *arguments)["save"]["save_id"] == str(older)
    files = {f["path"]: f for f in answer("show", bucket_url, "--files")["files"]}
    assert files.keys() == FILES.keys()
    assert files[MODEL]["object"] == large_key(newer)
    assert files["dir [x]=1?*#/b"]["object"] == pack_key(newer, "n00000", 0)
    assert files["empty"]["crc64nvme"] == "0" * 16
    human = cli("show", bucket_url, "--files")
    assert human.exit_code == 0
    assert "\x1b" not in human.output
    assert "e\\x1b[31mvil" in human.stdout


def test_the_files_that_show_lists_lie_where_it_says(run: Run, weed: WeedServer) -> None:
    bucket = Bucket(weed, run.url)
    for file in answer("show", run.url, "--files")["files"]:
        data = bucket.get(file["object"])
        start = file["offset"]
        assert data[start : start + file["size_bytes"]] == FILES[file["path"]]


# --- verify --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_of_good_saves(deep: list[str], run: Run) -> None:
    how = "read" if deep else "checksum"
    everything = answer("verify", run.url, "--all", *deep)
    assert [(s["save_id"], s["ok"]) for s in everything["saves"]] == [
        (str(run.newer), True),
        (str(run.older), True),
    ]
    newest = answer("verify", run.url, *deep)
    assert [s["save_id"] for s in newest["saves"]] == [str(run.newer)]
    assert newest["saves"][0]["checked_by"] == {"size": 0, "checksum": 0, "read": 0} | {how: 2}
    assert newest["findings"] == []
    assert "ok" in cli("verify", run.url).stdout


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_finds_a_deleted_object(
    deep: list[str], save_id: SaveId, bucket: Bucket, bucket_url: str
) -> None:
    bucket.delete(large_key(save_id))
    seen = answer("verify", bucket_url, *deep, code=1)
    assert [(f["problem"], f["key"]) for f in seen["findings"]] == [("missing", large_key(save_id))]
    assert seen["saves"][0]["ok"] is False
    assert sum(seen["saves"][0]["checked_by"].values()) == 1


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32"])
@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_finds_a_flipped_bit(
    deep: list[str],
    algorithm: ChecksumAlgorithmType,
    save_id: SaveId,
    bucket: Bucket,
    bucket_url: str,
) -> None:
    """Put there with a checksum that fits it: the store is content, the manifest knows better."""
    bucket.put(large_key(save_id), flip(FILES[MODEL], PART_BYTES + 1), algorithm)
    seen = answer("verify", bucket_url, *deep, code=1)
    whole, *others = seen["findings"]
    assert (whole["problem"], whole["key"]) == ("checksum", large_key(save_id))
    assert whole["expected"] != whole["found"]
    assert {len(whole["expected"]), len(whole["found"])} == {16}
    was_read = deep or algorithm == "CRC32"
    assert [(f["problem"], f["path"], f["start"], f["end"]) for f in others] == (
        [("file", MODEL, PART_BYTES, len(FILES[MODEL]))] if was_read else []
    )
    human = cli("verify", bucket_url, *deep)
    assert human.exit_code == 1
    assert whole["expected"] in human.stdout
    assert whole["found"] in human.stdout


def test_verify_names_the_file_that_is_damaged_in_a_pack(
    save_id: SaveId, bucket: Bucket, bucket_url: str
) -> None:
    key = pack_key(save_id, "n00000", 0)
    data = bucket.get(key)
    bucket.put(key, flip(data, data.index(b"awkward")))
    seen = answer("verify", bucket_url, "--deep", code=1)
    assert [(f["problem"], f["path"]) for f in seen["findings"]] == [
        ("checksum", None),
        ("file", "dir [x]=1?*#/%&+~: y"),
    ]
    bucket.put(key, flip(data, 1))  # in a tar header: no file is damaged
    seen = answer("verify", bucket_url, "--deep", code=1)
    assert [f["problem"] for f in seen["findings"]] == ["checksum"]


@pytest.mark.parametrize("deep", [[], ["--deep"]])
def test_verify_finds_a_cut_object(
    deep: list[str], save_id: SaveId, bucket: Bucket, bucket_url: str
) -> None:
    good = FILES[MODEL]
    bucket.put(large_key(save_id), good[:-1])
    (found,) = answer("verify", bucket_url, *deep, code=1)["findings"]
    assert (found["problem"], found["expected"], found["found"]) == (
        "size",
        str(len(good)),
        str(len(good) - 1),
    )


def test_verify_finds_what_is_no_commit(
    save_id: SaveId, bucket: Bucket, bucket_url: str, tmp_path: Path
) -> None:
    older = save_id
    newer = stage_save(tmp_path / "nvme", bucket_url, FILES, step=20)
    ship(tmp_path / "nvme")
    manifest = bucket.get(commit_key(newer))
    bucket.put("commits/foreign\x1b.json", b"{}")
    bucket.put(commit_key(newer), manifest[: len(manifest) // 2])
    # The newest that can be used is looked at, and the one that hides it is told.
    seen = answer("verify", bucket_url, code=1)
    assert [(s["save_id"], s["ok"]) for s in seen["saves"]] == [
        (str(newer), False),
        (str(older), True),
    ]
    assert [(f["problem"], f["key"]) for f in seen["findings"]] == [("manifest", commit_key(newer))]
    seen = answer("verify", bucket_url, "--all", code=1)
    assert [f["problem"] for f in seen["findings"]] == ["manifest", "foreign"]
    assert answer("verify", bucket_url, "--save", older)["ok"]
    seen = answer("verify", f"{bucket_url}/{commit_key(newer)}", code=1)
    assert [s["ok"] for s in seen["saves"]] == [False]
    assert "\x1b" not in cli("verify", bucket_url, "--all").output
    # A manifest of another save, and one that was edited.
    bucket.put(commit_key(newer), bucket.get(commit_key(older)))
    assert answer("verify", f"{bucket_url}/{commit_key(newer)}", code=1)
    bucket.put(commit_key(newer), manifest.replace(b'"num_files":6', b'"num_files":5'))
    (found,) = answer("verify", bucket_url, code=1)["findings"]
    assert "does not follow from its node manifests" in found["message"]


@pytest.mark.parametrize("spoil", ["delete", "replace"])
def test_verify_finds_a_spoilt_node_manifest(
    spoil: str, save_id: SaveId, bucket: Bucket, bucket_url: str
) -> None:
    key = f"saves/{save_id}/nodes/n00000.json"
    if spoil == "delete":
        bucket.delete(key)
    else:
        bucket.put(key, bucket.get(key).replace(b'"rank":0', b'"rank":1'))
    (found,) = answer("verify", bucket_url, code=1)["findings"]
    assert (found["problem"], found["key"]) == (
        "missing" if spoil == "delete" else "manifest",
        key,
    )
    assert len(found["expected"]) == 64


def test_where_checksums_lie_verify_says_what_it_compared(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in moto.env().items():
        monkeypatch.setenv(name, value)
    url = moto.new_root()
    save_id = stage_save(tmp_path / "nvme", url, FILES)
    ship(tmp_path / "nvme")
    assert answer("ls", url)["saves"][0]["verified"] == "read-back"
    assert answer("verify", url)["saves"][0]["checked_by"] == {"size": 2, "checksum": 0, "read": 0}
    assert "use --deep" in cli("verify", url).stdout
    Bucket(moto, url).put(large_key(save_id), flip(FILES[MODEL], 0))
    found = answer("verify", url, "--deep", code=1)["findings"]
    assert [f["problem"] for f in found] == ["checksum", "file"]


def test_verify_of_a_save_that_is_not_there(bucket_url: str) -> None:
    done = cli("verify", f"{bucket_url}/commits/000000000010-abcd1234.json", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not durable" in done.stderr


# --- restore, pull -------------------------------------------------------------------------------


def test_restore_is_byte_exact(run: Run, tmp_path: Path) -> None:
    seen = answer("restore", run.url, tmp_path / "out")
    assert tree(tmp_path / "out") == FILES
    assert (seen["from_nvme"], seen["from_store"]) == (0, len(FILES))
    assert seen["total_bytes"] == sum(map(len, FILES.values()))

    again = cli("restore", run.url, tmp_path / "out")
    assert again.exit_code == 2
    assert "is not empty" in again.stderr
    (tmp_path / "out" / "empty").write_bytes(b"no longer")
    forced = answer("restore", run.url, tmp_path / "out", "--force")
    assert forced["from_nvme"] == len(FILES) - 1
    assert tree(tmp_path / "out") == FILES


def test_restore_takes_good_copies_of_staging(run: Run, tmp_path: Path) -> None:
    seen = answer("restore", run.url, tmp_path / "out", "--staging", run.staging)
    assert tree(tmp_path / "out") == FILES
    assert (seen["from_nvme"], seen["downloaded_bytes"]) == (len(FILES), 0)


def test_pull_of_some_paths(run: Run, tmp_path: Path) -> None:
    paths = ["--path", "dir [x]=1?*#/", "--path", EVIL]
    seen = answer("pull", f"{run.url}/{commit_key(run.older)}", tmp_path / "out", *paths)
    wanted = {path for path in FILES if path.startswith("dir ") or path == EVIL}
    assert tree(tmp_path / "out") == {path: FILES[path] for path in wanted}
    assert seen["num_files"] == len(wanted)
    human = cli("pull", run.url, tmp_path / EVIL, *paths)
    assert human.exit_code == 0
    assert "\x1b" not in human.output
    missing = cli("pull", run.url, tmp_path / "no", "--path", "empty", "--path", "dir")
    assert missing.exit_code == 2
    assert "'dir'" in missing.stderr
    assert not (tmp_path / "no").exists()


def test_restore_never_hands_out_a_damaged_file(
    save_id: SaveId, bucket: Bucket, bucket_url: str, tmp_path: Path
) -> None:
    bucket.put(large_key(save_id), flip(FILES[MODEL], 5))
    done = cli("restore", bucket_url, tmp_path / "out", "--json")
    assert (done.exit_code, done.stdout) == (2, "")
    assert large_key(save_id) in done.stderr
    assert not (tmp_path / "out" / MODEL).exists()


# --- the console script --------------------------------------------------------------------------


def test_script_finds_the_store_as_boto3_users_expect(
    run: Run, weed: WeedServer, tmp_path: Path
) -> None:
    listed = script("ls", run.url, "--json")
    assert listed.returncode == 0, listed.stderr
    assert json.loads(listed.stdout)["saves"][0]["save_id"] == str(run.newer)
    shared = tmp_path / "credentials"
    shared.write_text(
        f"[other]\naws_access_key_id={weed.access_key}\naws_secret_access_key={weed.secret_key}\n"
    )
    bare = dict.fromkeys(weed.env(), "") | {"AWS_SHARED_CREDENTIALS_FILE": str(shared)}
    by_options = script(
        *("ls", run.url, "--profile", "other", "--region", "us-east-1"),
        *("--endpoint-url", weed.endpoint_url),
        **bare,
    )
    assert by_options.returncode == 0, by_options.stderr
    assert str(run.newer) in by_options.stdout


def test_script_reports_errors_without_traceback_or_secret(
    bucket_url: str, weed: WeedServer
) -> None:
    wrong = script("ls", bucket_url, AWS_SECRET_ACCESS_KEY="wrong-secret-key")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "error: " in wrong.stderr
    assert "hint: " in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert weed.access_key not in wrong.stderr
    missing = script("ls", "s3://no-such-bucket/run")
    assert missing.returncode == 2
    assert "NoSuchBucket" in missing.stderr


def test_script_prints_names_in_any_locale(run: Run) -> None:
    done = script("show", run.url, "--files", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout


# --- doctor --------------------------------------------------------------------------------------


def checks(seen: dict[str, Any]) -> dict[str, bool]:
    return {c["check"]: c["ok"] for c in seen["checks"]}


def test_doctor_of_an_honest_store(bucket_url: str, weed: WeedServer, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    seen = answer("doctor", bucket_url, "--staging", tmp_path)
    assert seen["ok"] is True
    assert seen["durability"] == "checksum"
    assert all(checks(seen).values()), seen["checks"]
    assert {"clock", "staging_local", "staging_writable", "staging_private"} <= checks(seen).keys()
    assert Bucket(weed, bucket_url).keys() == [], "the keys were to be thrown away"
    assert "can be used" in cli("doctor", bucket_url).stdout


def test_doctor_of_a_store_that_lies(
    moto: MotoServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in moto.env().items():
        monkeypatch.setenv(name, value)
    url = moto.new_root()
    seen = answer("doctor", url)
    assert seen["ok"] is True, "it can be used all the same"
    assert seen["durability"] == "read-back"
    lie = next(c for c in seen["checks"] if c["check"] == "checksum_refused")
    assert (lie["ok"], lie["needed"]) == (False, False)
    assert "reading back" in lie["lost"]
    assert "read-back" in cli("doctor", url).stdout


@pytest.mark.parametrize("why", ["no_bucket", "bad_secret", "no_server"])
def test_doctor_of_a_store_that_can_not_be_used(
    why: str, bucket_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket_url
    if why == "no_bucket":
        url = "s3://no-such-bucket/run"
    elif why == "bad_secret":
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    else:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    seen = answer("doctor", url, code=1)
    assert (seen["ok"], seen["durability"], seen["capabilities"]) == (False, None, None)
    (reach,) = (c for c in seen["checks"] if c["check"] == "reach")
    assert reach["needed"] is True
    assert "wrong-secret-key" not in json.dumps(seen)
    human = cli("doctor", url)
    assert human.exit_code == 1
    assert "MISSING" in human.stdout


def test_doctor_of_a_staging_directory_that_is_no_good(bucket_url: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    seen = answer("doctor", bucket_url, "--staging", tmp_path)
    assert checks(seen)["staging_private"] is False
    seen = answer("doctor", bucket_url, "--staging", "/proc/1/task", code=1)
    assert checks(seen)["staging_writable"] is False
    missing = answer("doctor", bucket_url, "--staging", tmp_path / "a" / "b")
    assert checks(missing)["staging_writable"] is True
    assert not (tmp_path / "a").exists(), "a look changes nothing"


# --- status, agent -------------------------------------------------------------------------------


def test_status_of_what_was_never_used(tmp_path: Path) -> None:
    seen = answer("status", tmp_path)
    assert (seen["agent"]["state"], seen["source"], seen["runs"]) == ("none", "none", [])
    assert list(tmp_path.iterdir()) == [], "a look changes nothing"


def test_status_of_a_save_that_no_agent_has_taken_in(bucket_url: str, tmp_path: Path) -> None:
    save_id = stage_save(tmp_path, bucket_url, FILES)
    seen = answer("status", tmp_path, code=1)
    (pending,) = seen["runs"][0]["pending"]
    assert (pending["save_id"], pending["state"]) == (str(save_id), "sealed")
    assert [f["problem"] for f in seen["findings"]] == ["no_agent"]
    assert "ckpt-tiering agent" in cli("status", tmp_path).stdout


def test_status_after_the_agent_has_ended(run: Run) -> None:
    seen = answer("status", run.staging, "--events", 50)
    assert seen["source"] == "journal"
    newest, _ = seen["runs"][0]["durable"]
    assert newest["save_id"] == str(run.newer)
    assert newest["sent_bytes"] == newest["total_bytes"]
    assert seen["runs"][0]["pending"] == []
    kinds = [e["kind"] for e in seen["events"] if e["kind"] != "restored"]  # by another test
    assert kinds[0] == "agent_started"
    assert kinds[-2:] == ["durable", "agent_stopped"]
    assert len(answer("status", run.staging, "--events", 2)["events"]) == 2
    human = cli("status", run.staging, "--events", 3)
    assert human.exit_code == 0
    assert str(run.newer) in human.stdout


def test_status_with_a_journal_that_can_not_be_read(save_id: SaveId, tmp_path: Path) -> None:
    layout = StagingLayout(tmp_path / "nvme")
    layout.journal.write_bytes(b"not a database" * 1000)
    seen = answer("status", tmp_path / "nvme", "--events", 1, code=1)
    assert seen["source"] == "page"
    assert [d["save_id"] for d in seen["runs"][0]["durable"]] == [str(save_id)]
    assert [f["problem"] for f in seen["findings"]] == ["journal"]


def start_agent(staging: Path, *options: str, **environ: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [SCRIPT, "agent", "--staging", staging, *options],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert "serves" in process.stderr.readline()
    return process


def wait_for(staging: Path, good: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Look at the status until it is as it should be, but leave the processor to the agent."""
    for _ in range(600):
        done = cli("status", staging, "--json")
        seen: dict[str, Any] = json.loads(done.stdout)
        if good(seen):
            check("status", seen)
            return seen
        SystemClock().sleep(0.1)
    raise AssertionError("the status never was as it should be")


def test_status_while_an_agent_lives_is_killed_and_is_replaced(
    bucket_url: str, tmp_path: Path
) -> None:
    save_id = stage_save(tmp_path, bucket_url, FILES)
    # It can't reach its store: the save stays pending for as long as the test needs.
    agent = start_agent(tmp_path, AWS_ENDPOINT_URL="http://127.0.0.1:1")
    try:
        seen = wait_for(tmp_path, lambda s: s["agent"]["state"] == "running" and s["runs"])
        assert seen["agent"]["pid"] == agent.pid
        (pending,) = seen["runs"][0]["pending"]
        assert (pending["save_id"], pending["state"]) == (str(save_id), "staged")
        assert pending["sent_bytes"] == 0
        assert "no_agent" not in {f["problem"] for f in seen["findings"]}
        second = script("agent", "--staging", tmp_path, "--until-idle")
        assert second.returncode == 2
        assert "already" in second.stderr
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.communicate()
    seen = answer("status", tmp_path, code=1)
    assert seen["agent"]["state"] == "gone"
    assert seen["findings"][-1]["problem"] == "no_agent"

    done = script("agent", "--staging", tmp_path, "--until-idle", "--json")
    assert done.returncode == 0, done.stderr
    check("agent", json.loads(done.stdout))
    seen = answer("status", tmp_path)
    assert [d["save_id"] for d in seen["runs"][0]["durable"]] == [str(save_id)]
    assert seen["agent"]["state"] == "gone"


def test_agent_ends_at_a_signal_and_says_what_is_left(bucket_url: str, tmp_path: Path) -> None:
    save_id = stage_save(tmp_path, bucket_url, FILES)
    agent = start_agent(tmp_path, "--json", AWS_ENDPOINT_URL="http://127.0.0.1:1")
    wait_for(tmp_path, lambda s: s["agent"]["state"] == "running" and s["runs"])
    agent.send_signal(signal.SIGTERM)
    out, err = agent.communicate(timeout=60)
    assert agent.returncode == 1, err
    assert json.loads(out) == {"staging": str(tmp_path), "pending": [str(save_id)], "failed": []}


def test_status_of_wishes(tmp_path: Path) -> None:
    layout = StagingLayout(tmp_path)
    layout.agent_dir.mkdir()
    with closing(Journal(layout.journal, owner="test")) as journal:
        journal.request_removal("s3://b/run", "{}", save_id="000000000010-abcd1234")
        journal.request_removal("s3://b/run", "{}", name=EVIL, not_of="abcd1234")
        journal.pin("s3://b/run", ["000000000010-abcd1234"])
    seen = answer("status", tmp_path)
    assert [(w["save_id"], w["name"], w["pinned"]) for w in seen["removals"]] == [
        ("000000000010-abcd1234", None, True),
        (None, EVIL, False),
    ]
    human = cli("status", tmp_path)
    assert "\x1b" not in human.output
    assert "pinned" in human.stdout


def test_status_of_a_save_that_failed(bucket_url: str, tmp_path: Path) -> None:
    save_id = stage_save(tmp_path, bucket_url, FILES)
    layout = StagingLayout(tmp_path)
    shard = layout.rank_dir(StoreUrl.parse(bucket_url), save_id, 0)
    layout.agent_dir.mkdir()
    with closing(Journal(layout.journal, owner="test")) as journal:
        admit(journal, shard.parent, 0.0, check_digests=False)
        row = journal.find(bucket_url, str(save_id))
        assert row is not None
        journal.move(row, SaveState.FAILED, error="no such bucket\x1b")
    seen = answer("status", tmp_path, code=1)
    assert [(f["problem"], f["save_id"]) for f in seen["findings"]] == [("failed", str(save_id))]
    assert seen["runs"][0]["failed"][0]["error"] == "no such bucket\x1b"
    human = cli("status", tmp_path)
    assert human.exit_code == 1
    assert "no such bucket\\x1b" in human.stdout


def test_status_of_a_save_that_an_error_keeps_coming_back_to(
    bucket_url: str, tmp_path: Path
) -> None:
    save_id = stage_save(tmp_path, bucket_url, FILES)
    layout = StagingLayout(tmp_path)
    layout.agent_dir.mkdir()
    directory = layout.save_dir(StoreUrl.parse(bucket_url), save_id)
    with closing(Journal(layout.journal, owner="test")) as journal:
        admit(journal, directory, 0.0, check_digests=False)
        row = journal.find(bucket_url, str(save_id))
        assert row is not None
        journal.update(row, error="expired\n  hint: renew", attempts=3, retry_at=5.0)
    seen = answer("status", tmp_path, code=1)
    assert [f["problem"] for f in seen["findings"]] == ["stuck", "no_agent"]
    assert seen["runs"][0]["pending"][0]["retry_at"] == 5.0
    assert "renew" in cli("status", tmp_path).stdout
