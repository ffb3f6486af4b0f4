"""P9, P12: `TieredStorageReader` on other numbers of ranks than saved, from each tier, verified."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.dcp import TieredStorageReader
from ckpt_tiering.errors import ConfigError, FormatError, IntegrityError, NotFoundError
from ckpt_tiering.model.layout import StagingLayout, StoreUrl
from ckpt_tiering.observe.bus import read_events
from ckpt_tiering.units import MIB
from tests.integration import dcp_load_job as job
from tests.staging import reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.servers import WeedServer

ROOT = Path(__file__).parent.parent.parent
PART_BYTES = 5 * MIB
WAIT_S = 90.0
SAVED_ON = (2, 4)
no_processes = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILES = {2: ["__0_0.distcp", "__1_0.distcp"], 4: [f"__{rank}_0.distcp" for rank in range(4)]}


def put_save(url: str, staging: Path, step: int, directory: Path) -> str:
    with TieredCheckpointer(url, staging=staging, part_bytes=PART_BYTES) as saver:
        save_id = saver.save(step, directory)
        saver.wait(WAIT_S)
    return str(save_id)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class Job:
    """Two checkpoints of stock DCP, brought into a store, and all loads of them."""

    def __init__(self, weed: WeedServer, out: Path) -> None:
        self.out, self.weed = out, weed
        self.url = weed.new_root()
        self.launch("save", 4, groups=SAVED_ON, save_on=SAVED_ON)
        self.staging = out / "nvme"
        self.saves = {n: self.put(n, n, self.staging) for n in SAVED_ON}
        sources = {"store": None, "nvme": str(self.staging)}
        both = list(sources)

        def case(ranks: int, saved_on: int, source: str) -> dict[str, Any]:
            name = f"{ranks} of {saved_on} from {source}"
            saves = [self.saves[saved_on]]
            return self.case(name, ranks, saved_on, saves, sources[source])

        eight = [
            case(ranks, saved_on, both[(i + j) % 2])
            for i, ranks in enumerate((8, 4, 2))
            for j, saved_on in enumerate(SAVED_ON)
        ]
        three = [case(3, 2, "store"), case(3, 4, "nvme"), *self.bad_cases()]
        self.found = self.launch("eight", 8, groups=(8, 4, 2), cases=eight)
        self.found |= self.launch("three", 3, groups=(3,), cases=three)
        self.names = [c["name"] for c in (*eight, *three)]

    def put(self, step: int, saved_on: int, staging: Path) -> str:
        return put_save(self.url, staging, step, self.out / f"dcp-{saved_on}")

    def case(
        self, name: str, ranks: int, saved_on: int, saves: Sequence[str], staging: str | None
    ) -> dict[str, Any]:
        return {
            "name": name,
            "ranks": ranks,
            "saved_on": saved_on,
            "saves": saves,
            "staging": staging,
            "store": self.url,
        }

    def bad_cases(self) -> list[dict[str, Any]]:
        rotten = self.put(20, 2, self.out / "rotten")
        self.rotten = self.staged(self.out / "rotten", rotten, "__0_0.distcp")
        flip(self.rotten, 6 * MIB)
        damaged = self.put(21, 2, self.out / "other")
        self.damage(damaged, "n00000/f/__1_0.distcp", 6 * MIB)
        unreadable = self.put(22, 4, self.out / "other")
        self.damage(unreadable, "n00000/p/0000.tar", 600)  # .metadata is its first member
        different = [self.saves[2], self.saves[4], self.saves[2]]
        return [
            self.case("bad copy", 3, 2, [rotten], str(self.out / "rotten")),
            self.case("bad object", 3, 2, [damaged], None),
            self.case("bad index", 3, 4, [unreadable], None),
            self.case("different saves", 3, 2, different, None),
            self.case("no such save", 3, 2, ["000000000099-abcd"], None),
        ]

    def staged(self, staging: Path, save_id: str, path: str) -> Path:
        layout = StagingLayout(staging)
        save_dir = layout.run_dir(StoreUrl.parse(self.url)) / "saves" / save_id
        return layout.staged_file(save_dir, 0, path)

    def damage(self, save_id: str, object_name: str, at: int) -> None:
        """Flip a bit of an object, behind the store's back as it were."""
        bucket, _, prefix = self.url.removeprefix("s3://").partition("/")
        key = f"{prefix}/saves/{save_id}/{object_name}"
        client = self.weed.client()
        data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        data[at] ^= 1
        client.put_object(Bucket=bucket, Key=key, Body=bytes(data))

    def launch(self, phase: str, num_ranks: int, **arguments: Any) -> dict[str, list[Any]]:
        """Run ranks; return for each case what each of its ranks found."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"),
                *(str(num_ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
                *("-m", "tests.integration.dcp_load_job"),
                json.dumps({"phase": phase, "out": str(self.out), **arguments}),
            ],
            cwd=ROOT,
            env=os.environ | self.weed.env() | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        paths = [self.out / f"{phase}-{rank}.json" for rank in range(num_ranks)]
        found: dict[str, list[Any]] = {}
        for path in paths:
            for name, result in json.loads(path.read_text(encoding="utf-8")).items():
                found.setdefault(name, []).append(result)
        return found


@pytest.fixture(scope="module")
def ranks(weed: WeedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in weed.env().items():
            patch.setenv(name, value)
        yield Job(weed, tmp_path_factory.mktemp("dcp"))


@pytest.mark.timeout(290)  # the first of these waits for all ranks
@pytest.mark.parametrize("saved_on", SAVED_ON)
@pytest.mark.parametrize("loaded_on", [2, 3, 4, 8])
def test_p9_another_number_of_ranks_loads_the_same(
    ranks: Job, loaded_on: int, saved_on: int
) -> None:
    (name,) = [n for n in ranks.names if n.startswith(f"{loaded_on} of {saved_on} ")]
    results = ranks.found[name]
    assert len(results) == loaded_on
    assert [r.get("differences") for r in results] == [[]] * loaded_on, results
    if name.endswith("nvme"):
        assert {r["downloaded_bytes"] for r in results} == {0}
        assert all(r["nvme_bytes"] for r in results)
    else:
        assert {r["nvme_bytes"] for r in results} == {0}
        total = sum((ranks.out / f"dcp-{saved_on}" / f).stat().st_size for f in FILES[saved_on])
        headers = 1024 * len(FILES[saved_on])  # of a pack, between its members
        assert all(r["downloaded_bytes"] <= total + headers for r in results)


@no_processes
@pytest.mark.timeout(290)
@pytest.mark.parametrize("saved_on", SAVED_ON)
@pytest.mark.parametrize("source", ["store", "nvme", "stock"])
def test_p9_one_process_loads_the_same(
    ranks: Job, saved_on: int, source: str, tmp_path: Path
) -> None:
    """Without ``torch.distributed``; and stock DCP reads what `restore` brings back."""
    model = job.make_model()
    optimizer = torch.optim.Adam(model.parameters())
    state = {
        "tensors": job.fresh(job.tensors()),
        "objects": dict.fromkeys(job.OBJECTS, "unset") | {"nested": ["", {"b": 0, "c": 0}]},
        **job.learner(model, optimizer),
    }
    staging = ranks.staging if source == "nvme" else None
    storage: Any = TieredStorageReader(ranks.url, ranks.saves[saved_on], staging)
    if source == "stock":
        found = reader(ranks.url)
        found.restore(found.resolve(ranks.saves[saved_on]), tmp_path)
        storage = FileSystemReader(tmp_path)
    load(state, storage_reader=storage)
    expected = torch.load(ranks.out / f"expected-{saved_on}.pt", weights_only=False)
    assert job.differences(state, expected) == []
    if source == "nvme":
        assert storage.report.downloaded_bytes == 0


def test_differences_would_be_seen(ranks: Job) -> None:
    """Negative control: the two checkpoints hold different models, and equality is equality."""
    one, other = (torch.load(ranks.out / f"expected-{n}.pt", weights_only=False) for n in SAVED_ON)
    assert job.differences(one, one) == []
    assert job.differences(job.fresh(one["tensors"]), one["tensors"]) != []
    assert job.differences(one["objects"], {**one["objects"], "step": 8}) != []
    assert other.keys() == one.keys()


def test_p9_a_flipped_bit_on_nvme_falls_to_the_store(ranks: Job) -> None:
    """All three ranks read that file; whoever sees the bit first sets the copy aside."""
    results = ranks.found["bad copy"]
    assert [r.get("differences") for r in results] == [[]] * 3, results
    assert any(r["downloaded_bytes"] for r in results)
    assert [copy for r in results for copy in r["quarantined"]] == [str(ranks.rotten)]
    assert not ranks.rotten.exists()
    assert len(list(ranks.rotten.parent.glob("*.corrupt"))) == 1
    events = read_events(StagingLayout(ranks.out / "rotten").events)
    assert [e["where"] for e in events if e["kind"] == "corrupt"] == ["nvme"]
    assert sum(e["kind"] == "restored" for e in events) == 6  # index and data, on three ranks


def test_p9_a_flipped_bit_in_the_store_is_an_error_on_all_ranks(ranks: Job) -> None:
    for result in ranks.found["bad object"]:
        assert "IntegrityError" in result["kinds"].values()
        assert "/f/__1_0.distcp: bytes 5242880 to " in result["error"]
        assert "the manifest says" in result["error"]
        assert "differences" not in result


def test_p9_a_flipped_bit_in_the_index_is_an_error_on_all_ranks(ranks: Job) -> None:
    for result in ranks.found["bad index"]:
        assert "'.metadata' have CRC64NVME" in result["error"]


def test_p9_ranks_that_found_different_saves_all_raise(ranks: Job) -> None:
    for result in ranks.found["different saves"]:
        assert "the ranks found different saves" in result["error"]
        assert all(save_id in result["error"] for save_id in ranks.saves.values())


def test_what_is_not_there_is_said_on_all_ranks(ranks: Job) -> None:
    for result in ranks.found["no such save"]:
        assert "000000000099-abcd is not durable" in result["error"]


# --- one process ----------------------------------------------------------------------------------


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def failures(state: dict[str, Any], storage: TieredStorageReader) -> Exception:
    """Load what can't be loaded; return the reason that DCP wrapped."""
    with pytest.raises(BaseException, match="CheckpointException") as caught:
        load(state, storage_reader=storage)
    failed: Any = caught.value
    return failed.failures[0][0]  # type: ignore[no-any-return]


@no_processes
def test_p12_objects_run_no_code_unless_they_may(bucket_url: str, tmp_path: Path) -> None:
    marker, source = tmp_path / "executed", tmp_path / "source"
    save({"x": Evil(marker), "w": torch.ones(3)}, checkpoint_id=source)
    put_save(bucket_url, tmp_path / "nvme", 1, source)
    state = {"x": 0, "w": torch.zeros(3)}
    error = failures(state, TieredStorageReader(bucket_url))
    assert isinstance(error, FormatError)
    assert "object 'x'" in error.message
    assert not marker.exists()
    load({"w": torch.zeros(3)}, storage_reader=TieredStorageReader(bucket_url))
    assert not marker.exists(), "what is not asked for is not read"
    load(state, storage_reader=TieredStorageReader(bucket_url, allow_pickle=True))
    assert marker.exists()


@no_processes
def test_p12_a_hostile_index_runs_no_code(bucket_url: str, tmp_path: Path) -> None:
    marker, source = tmp_path / "executed", tmp_path / "source"
    save({"w": torch.ones(3)}, checkpoint_id=source)
    (source / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    put_save(bucket_url, tmp_path / "nvme", 1, source)
    storage = TieredStorageReader(bucket_url)
    with pytest.raises(FormatError, match=r"needs posix\.system"):
        storage.read_metadata()
    assert "needs posix.system" in str(failures({"w": torch.zeros(3)}, storage))
    assert not marker.exists()


@no_processes
def test_where_the_index_is_is_found_or_asked(bucket_url: str, tmp_path: Path) -> None:
    source, staging = tmp_path / "source", tmp_path / "nvme"
    (source / "deep").mkdir(parents=True)
    (source / "meta.pt").write_bytes(b"x")
    none = put_save(bucket_url, staging, 1, source)
    for value, name in enumerate(("deep/a.ckpt", "b.ckpt")):
        save({"w": torch.full((3,), value + 1)}, checkpoint_id=source / name)
        put_save(bucket_url, staging, value + 2, source)
    run = reader(bucket_url)
    saves = {info.step: info for info in run.saves()}

    def loaded(storage: TieredStorageReader) -> float:
        state = {"w": torch.zeros(3, dtype=torch.int64)}
        load(state, storage_reader=storage)
        return state["w"].sum().item()

    assert loaded(TieredStorageReader.of(run, saves[2])) == 3
    assert loaded(TieredStorageReader(f"{bucket_url}/commits/{saves[2].save_id}.json")) == 3
    assert loaded(TieredStorageReader(bucket_url, prefix="b.ckpt/")) == 6
    assert loaded(TieredStorageReader.of(run, saves[3], prefix="deep/a.ckpt")) == 3
    with pytest.raises(ConfigError, match=r"several DCP checkpoints: 'b\.ckpt', 'deep/a\.ckpt'"):
        TieredStorageReader(bucket_url).read_metadata()
    with pytest.raises(NotFoundError, match="is not a DCP checkpoint"):
        TieredStorageReader(bucket_url, none).read_metadata()
    with pytest.raises(NotFoundError, match=r"no \.metadata in 'c'"):
        TieredStorageReader(bucket_url, prefix="c").read_metadata()
    with pytest.raises(FileNotFoundError):
        TieredStorageReader(bucket_url).read_metadata(rank=0)
    with pytest.raises(ConfigError, match="names save"):
        TieredStorageReader(f"{bucket_url}/saves/{none}/", "b.ckpt")
    with pytest.raises(ConfigError, match="did you mean 'concurrency'"):
        TieredStorageReader(bucket_url, concurency=3)
    wrong = failures(
        {"w": torch.zeros(4, dtype=torch.int64)}, TieredStorageReader.of(run, saves[2])
    )
    assert "w" in str(wrong)


@no_processes
def test_p9_what_fetch_brought_is_used_too(bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save({"w": torch.arange(9)}, checkpoint_id=source)
    put_save(bucket_url, tmp_path / "first", 1, source)
    here = reader(bucket_url, tmp_path / "second")
    info = here.resolve("latest")
    fetched = here.fetch(info)
    for rotten, expected in ((False, 0), (True, (source / "__0_0.distcp").stat().st_size)):
        if rotten:
            flip(fetched / "__0_0.distcp", 1000)
        state = {"w": torch.zeros(9, dtype=torch.int64)}
        storage = TieredStorageReader.of(here, info)
        load(state, storage_reader=storage)
        assert torch.equal(state["w"], torch.arange(9))
        assert storage.report is not None
        assert storage.report.downloaded_bytes == expected
    assert not (fetched / "__0_0.distcp").exists()


@no_processes
def test_p9_an_error_of_the_store_reaches_the_caller(
    bucket_url: str, weed: WeedServer, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save({"w": torch.arange(9)}, checkpoint_id=source)
    save_id = put_save(bucket_url, tmp_path / "nvme", 1, source)
    bucket, _, prefix = bucket_url.removeprefix("s3://").partition("/")
    key = f"{prefix}/saves/{save_id}/n00000/p/0000.tar"
    client = weed.client()
    data = bytearray(client.get_object(Bucket=bucket, Key=key)["Body"].read())
    data[-2000] ^= 1
    client.put_object(Bucket=bucket, Key=key, Body=bytes(data))
    error = failures({"w": torch.zeros(9, dtype=torch.int64)}, TieredStorageReader(bucket_url))
    assert isinstance(error, IntegrityError)
