"""One rank of a job that saves sharded states; run under ``torchrun`` by the tests of DCP."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.agent.client import read_status
from ckpt_tiering.clock import SystemClock
from ckpt_tiering.dcp import ShardedSaver, TieredStorageWriter
from ckpt_tiering.dcp import exchange as exchange_module
from ckpt_tiering.errors import CkptTieringError
from ckpt_tiering.model.layout import StagingLayout
from tests.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_S = 60.0
dcp: Any = torch.distributed.checkpoint  # exports nothing, for the type checker


@dataclasses.dataclass
class Progress:
    epoch: int


def stock_load(state: dict[str, Any], directory: Path) -> None:
    """Load a directory with nothing but DCP's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=FileSystemReader(directory))


class Job:
    """What all phases need; phases are the methods that are named like them."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = arguments
        self.out = Path(arguments["out"])
        self.store: str = arguments["store"]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.found: dict[str, Any] = {}

    def staging(self, name: str, *, nodes: int = 1) -> Path:
        return self.out / f"{name}-node{self.rank * nodes // self.size}"

    def checkpointer(self, name: str, *, nodes: int = 1, **options: Any) -> TieredCheckpointer:
        settings: dict[str, Any] = {"staging_mode": "memory", "linger": 5.0}
        settings |= {"drain_timeout": 5.0} | options
        staging = self.staging(name, nodes=nodes)
        return TieredCheckpointer(f"{self.store}/{name}", staging=staging, **settings)

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Have everything fail by which ranks could talk to each other."""
        names = [n for n in dir(dist) if n.startswith(("all_", "broadcast", "gather", "scatter"))]
        names += ["barrier", "monitored_barrier", "new_group", "reduce", "send", "recv"]
        before = {name: getattr(dist, name) for name in names}
        meet = exchange_module.Exchange.meet

        def refuse(*_: Any, **__: Any) -> Any:
            raise AssertionError("ranks talk")

        for name in names:
            setattr(dist, name, refuse)
        exchange_module.Exchange.meet = refuse  # type: ignore[method-assign]
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(dist, name, function)
            exchange_module.Exchange.meet = meet  # type: ignore[method-assign]

    def error_of(self, call: Any) -> str:
        try:
            call()
        except CkptTieringError as error:
            return f"{type(error).__name__}: {error}"
        except dcp.CheckpointException as error:
            return f"CheckpointException: {error}"
        return ""

    def restored(self, saver: TieredCheckpointer) -> Path:
        """Wait, restore on rank 0 where no NVMe has a copy, and have the stock reader look."""
        saver.wait(WAIT_S)
        dist.barrier()
        return self.restored_now(saver, saver.resolve("latest").save_id)

    # --- phases ------------------------------------------------------------------------------

    def fsdp(self) -> None:
        """FSDP2 and Adam with odd dimensions; stock ``dcp.load`` of what was saved, by all."""
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.ReLU(), torch.nn.Linear(13, 3))
        fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

        def train() -> None:
            optimizer.zero_grad()
            model(torch.randn(5, 7)).square().mean().backward()
            optimizer.step()

        def state() -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {
                "model": weights,
                "optim": moments,
                "rank0": self.rank == 0,
                "note": [self.rank],
            }

        def full(part: dict[str, Any]) -> dict[str, Any]:
            flat = dcp.default_planner.flatten_state_dict(part)[0]
            return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in flat.items()}

        train()
        with self.checkpointer("fsdp", nodes=2, part_bytes=5 << 20) as saver:
            saver.save(1, state(), name="first", metadata={"loss": 0.5})
            train()
            expected = pickle.loads(pickle.dumps(full(state())))  # noqa: TID251
            with self.without_collectives():
                saver.save(2, state(), extra={f"meta{self.rank}.pt": b"m"}, directory="d.ckpt")
                for part in (*model.parameters(), *optimizer.state.values()):
                    for tensor in part.values() if isinstance(part, dict) else [part]:
                        tensor.data.zero_()
            target = self.restored(saver)
            into = state()
            stock_load(into, target / "d.ckpt")
            loaded = full(into)
            fresh = TieredCheckpointer(f"{self.store}/fsdp", staging=self.out / f"fresh{self.rank}")
            for number, reader in enumerate((saver, fresh)):
                again = state()
                for part in (*model.parameters(), *optimizer.state.values()):
                    for tensor in part.values() if isinstance(part, dict) else [part]:
                        tensor.data.fill_(7)
                self.found[f"resumed{number}"] = [
                    reader.restore(into=again, save="latest").step,
                    all(
                        torch.equal(v, expected[k]) if isinstance(v, torch.Tensor) else True
                        for k, v in full(again).items()
                    ),
                ]
            fresh.close()
            self.found["equal"] = loaded.keys() == expected.keys() and all(
                torch.equal(loaded[k], v) if isinstance(v, torch.Tensor) else loaded[k] == v
                for k, v in expected.items()
                if k not in {"rank0", "note"}
            )
            self.found["replicated"] = [loaded["rank0"], loaded["note"]]
            self.found["files"] = sorted(str(p.relative_to(target)) for p in target.rglob("*.*"))
            info = saver.resolve("latest")
            self.found["info"] = [info.num_nodes, info.step, dict(info.metadata)]
            self.found["named"] = saver.resolve("first").step
            self.found["load"] = self.error_of(saver.load)

    def mesh(self) -> None:
        """Two-dimensional meshes, every placement, on odd shapes."""
        mesh = init_device_mesh("cpu", (2, self.size // 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(11.0 * 7).view(11, 7)
        choices: list[tuple[Placement, ...]] = [
            (Shard(0), Shard(1)),
            (Shard(0), Shard(0)),
            (Replicate(), Shard(0)),
        ]
        choices += [(Shard(1), Replicate()), (Replicate(), Replicate())]
        state = {str(n): distribute_tensor(whole + n, mesh, c) for n, c in enumerate(choices)}
        with self.checkpointer("mesh") as saver:
            for step in (1, 2):
                saver.save(step, state)
            target = self.restored(saver)
        out = {name: torch.zeros(11, 7) for name in state}
        stock_load(out, target)
        self.found["equal"] = all(torch.equal(out[n], whole + int(n)) for n in out)

    def instant(self) -> None:
        """Everything changes in place while the agent stands still."""
        mesh = init_device_mesh("cpu", (self.size,))
        base = torch.arange(1000.0)
        state: dict[str, Any] = {
            "sharded": distribute_tensor(torch.arange(300_007.0), mesh, [Shard(0)]),
            "view": base[10:20],
            "strided": base.view(10, 100)[:, ::3],
            "array": np.arange(5),
            "list": [1, 2],
            "dict": {"a": (1, torch.ones(2))},
            "dataclass": Progress(3),
            "rng": torch.get_rng_state(),
            "step": 7,
        }
        rng = state["rng"].clone()
        with self.checkpointer("instant") as saver:
            saver.save(6, state)
            saver.wait(WAIT_S)
            dist.barrier()
            page = until(lambda: read_status(StagingLayout(self.staging("instant"))), "a page")
            if self.rank == 0:
                os.kill(page.pid, signal.SIGSTOP)
            dist.barrier()
            try:
                saver.save(7, state)
                state["sharded"].to_local().zero_()
                base.zero_()
                state["array"] += 9
                state["list"].append(3)
                state["dict"]["a"][1].zero_()
                state["dataclass"].epoch = 4
                state["rng"].zero_()
            finally:
                dist.barrier()
                if self.rank == 0:
                    os.kill(page.pid, signal.SIGCONT)
            target = self.restored(saver)
        out = state | {"sharded": torch.zeros(300_007), "step": 0, "array": 0, "dataclass": 0}
        out |= {
            "list": 0,
            "dict": {"a": 0},
            "view": torch.zeros(10),
            "strided": torch.zeros(10, 34),
        }
        stock_load(out, target)
        one = torch.arange(1000.0)
        self.found["equal"] = [
            torch.equal(out["sharded"], torch.arange(300_007.0)),
            torch.equal(out["view"], one[10:20]),
            torch.equal(out["strided"], one.view(10, 100)[:, ::3]),
            out["array"].tolist() == [0, 1, 2, 3, 4],
            out["list"] == [1, 2],
            out["dict"]["a"][0] == 1 and bool((out["dict"]["a"][1] == 1).all()),
            out["dataclass"].epoch == 3,
            torch.equal(out["rng"], rng),
            out["step"] == 7,
        ]

    def layouts(self) -> None:
        """Layouts that change: on all ranks, on rank 0's side only, on one rank alone."""
        mesh = init_device_mesh("cpu", (self.size,))

        def state(rows: int, **more: Any) -> dict[str, Any]:
            return {"w": distribute_tensor(torch.ones(rows, 3), mesh, [Shard(0)]), **more}

        def own(text: str) -> dict[str, Any]:
            return {f"own{self.rank}": text}

        # What never becomes whole stays pending: nobody waits for it in the end.
        options: dict[str, Any] = {"staging_mode": self.arguments["mode"], "drain_timeout": 0.0}
        with self.checkpointer("layouts", **options) as saver:
            sharded = ShardedSaver(saver, timeout_s=1.0)
            ids = [sharded.save(1, state(5, note="x", **own("a")))]
            with self.without_collectives():
                ids.append(sharded.save(2, state(5, note="x" * 100_000, **own("b" * 4000))))
                ids.append(sharded.save(3, state(5, note="", **own("c"))))
            ids.append(sharded.save(4, state(9, other=1, **own("d"))))
            saver.wait(WAIT_S)
            dist.barrier()
            # On one rank alone: it hears within a second; the others save what never becomes whole.
            if self.rank == 1:
                self.found["alone"] = self.error_of(lambda: sharded.save(5, state(9, only=1)))
                large = state(9, other=1, **own("e" * 5000))
                self.found["outgrown"] = self.error_of(lambda: sharded.save(5, large))
            else:
                sharded.save(5, state(9, other=1, **own("d")))
                sharded.save(5, state(9, other=1, **own("d")))
            dist.barrier()
            self.found["latest"] = saver.resolve("latest").step
            ids.append(sharded.save(5, state(9, other=1, **own("f"))))
            until(lambda: saver.resolve("latest").step == 5, "step 5")
            self.found["ids"] = ids
            target = self.restored_now(saver, ids[1])
            sizes = {k: len(v) for k, v in self.read(target, "own0", "own1", "note").items()}
            self.found["second"] = sizes
            target = self.restored_now(saver, ids[-1])
            self.found["last"] = self.read(target, "own0", "own1", "other")

    def restored_now(self, saver: TieredCheckpointer, save: str) -> Path:
        target = self.out / save
        dist.barrier()
        if self.rank == 0:
            saver.restore(target, save)
        dist.barrier()
        return target

    def read(self, target: Path, *keys: str) -> dict[str, Any]:
        out = dict.fromkeys(keys, 0)
        stock_load(out, target)
        return out

    def disagree(self) -> None:
        """Ranks that were configured differently save nothing."""
        with self.checkpointer("disagree", part_bytes=(5 + self.rank) << 20) as saver:
            self.found["error"] = self.error_of(
                lambda: saver.save(1, {"w": torch.ones(3)}, sharded=True)
            )
            dist.barrier()
            self.found["saves"] = len(saver.saves())

    def writer(self) -> None:
        """``dcp.save`` and ``dcp.async_save``, and saves in which one rank fails."""
        mesh = init_device_mesh("cpu", (self.size,))

        def state(n: int) -> dict[str, Any]:
            whole = torch.arange(10_007.0) + n
            return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "n": n, "t": torch.tensor(n)}

        def writer(step: int, **options: Any) -> TieredStorageWriter:
            settings: dict[str, Any] = {"staging_mode": "memory", "linger": 5.0} | options
            url, staging = f"{self.store}/writer", self.staging("writer", nodes=2)
            return TieredStorageWriter(url, step=step, staging=staging, **settings)

        with self.checkpointer("writer", nodes=2) as looking:
            dcp.save(state(1), storage_writer=writer(1, metadata={"k": 1}), checkpoint_id="one")
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            for step in (2, 3):
                dcp.save(state(step), storage_writer=writer(step), planner=planner)
            for step, kind in ((4, "THREAD"), (5, "THREAD"), (6, "PROCESS")):
                if step == 6 and not self.arguments["process"]:
                    continue
                dcp.async_save(
                    state(step),
                    storage_writer=writer(step),
                    async_checkpointer_type=AsyncCheckpointerType[kind],
                ).result()
            last = 6 if self.arguments["process"] else 5
            until(lambda: (i := looking.latest()) is not None and i.step == last, "the last save")
            dist.barrier()

            class Failing(TieredStorageWriter):
                def write_data(self, plan: Any, planner: Any) -> Any:
                    if dist.get_rank() == 1:
                        raise OSError("no more memory here")
                    return super().write_data(plan, planner)

            failing = Failing(
                f"{self.store}/writer", step=7, staging=self.staging("writer", nodes=2)
            )
            self.found["failed"] = self.error_of(lambda: dcp.save(state(7), storage_writer=failing))
            self.found["alone"] = self.error_of(
                lambda: dcp.save(state(7), storage_writer=writer(7), use_collectives=False)
            )
            self.found["steps"] = self.error_of(
                lambda: dcp.save(state(7), storage_writer=writer(7 + self.rank))
            )
            dist.barrier()
            self.found["latest"] = looking.resolve("latest").step
            dist.barrier()
            again = writer(9)
            dcp.save(state(9), storage_writer=again)
            until(lambda: looking.resolve("latest").step == 9, "step 9")
            again.close()
            self.found["named"] = looking.resolve("one").step
            self.found["saves"] = sorted(info.step for info in looking.saves())
            self.found["numbers"] = []
            for info in looking.saves():
                target = self.restored_now(looking, info.save_id)
                out: dict[str, Any] = {"w": torch.zeros(10_007), "n": 0, "t": torch.tensor(0)}
                stock_load(out, target)
                same = torch.equal(out["w"], torch.arange(10_007.0) + info.step)
                self.found["numbers"].append(same and out["n"] == out["t"].item() == info.step)

    def storm(self) -> None:
        """Saves every 50 ms while the loop all-reduces and an agent is delayed at random."""
        seconds = float(self.arguments["seconds"])
        mesh = init_device_mesh("cpu", (self.size,))
        state: dict[str, Any] = {
            "w": distribute_tensor(torch.ones(100_003), mesh, [Shard(0)]),
            "step": 0,
        }
        clock, stop = SystemClock(), threading.Event()
        with self.checkpointer("storm", nodes=2, drain_timeout=60.0, linger=60.0) as saver:
            saver.save(0, state)
            page = until(
                lambda: read_status(StagingLayout(self.staging("storm", nodes=2))), "a page"
            )

            def delay() -> None:
                rng = random.Random(7)
                while not clock.wait(stop, rng.uniform(0.1, 0.6)):
                    os.kill(page.pid, signal.SIGSTOP)
                    clock.wait(stop, rng.uniform(0.05, 0.8))
                    os.kill(page.pid, signal.SIGCONT)

            delayer = threading.Thread(target=delay)
            if self.rank == 1:
                delayer.start()
            ids, step, total = [""], 0, torch.zeros(1)
            begin = clock.monotonic()
            try:
                while True:
                    go = torch.tensor([float(clock.monotonic() - begin < seconds)])
                    dist.all_reduce(go, op=dist.ReduceOp.MIN)
                    if not go:
                        break
                    step += 1
                    state["w"].to_local().fill_(step)
                    state["step"] = step
                    ids.append(saver.save(step, state))
                    dist.all_reduce(total.fill_(1.0))
                    assert total == self.size
                    clock.sleep(0.05)
            finally:
                stop.set()
                if self.rank == 1:
                    delayer.join()
            saver.wait(seconds + WAIT_S)
            dist.barrier()
            saver.wait(seconds + WAIT_S)
            self.found["ids"] = ids
            until(lambda: saver.resolve("latest").save_id == ids[-1], "the last save")
            self.found["committed"] = len(saver.saves())
            target = self.restored(saver)
        out: dict[str, Any] = {"w": torch.zeros(100_003), "step": 0}
        stock_load(out, target)
        self.found["equal"] = bool((out["w"] == step).all()) and out["step"] == step


def main() -> None:
    arguments = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    job = Job(arguments)
    for phase in arguments["phases"]:
        job.found = {}
        getattr(job, phase)()
        dist.barrier()
        found = job.out / f"{phase}-{job.rank}.json"
        found.write_text(json.dumps(job.found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
