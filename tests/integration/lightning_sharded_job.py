"""A tiny FSDP2 job of Lightning's for the ranks of ``torchrun``; each phase answers with JSON.

torchrun --nproc-per-node 2 -m tests.integration.lightning_sharded_job '{"phases": [...], ...}'
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ckpt_tiering.agent.client import read_status
from ckpt_tiering.dcp.reader import TieredStorageReader
from ckpt_tiering.model.layout import StagingLayout
from ckpt_tiering_lightning import TieredCheckpointIO, attach
from tests.integration.lightning_job import Losses, Node, TinyModel, every, tiered, trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    import lightning.pytorch as pl

STEPS = 20
KILLED_AT = 13


def shard(net: torch.nn.Module, mesh: Any) -> None:
    for layer in net.children():
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)


def digest(values: Any) -> str:
    """Digest what all ranks have together of some tensors. A collective."""
    found = hashlib.sha256()
    for value in values:
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(whole.detach().numpy().tobytes())
    return found.hexdigest()[:16]


class ShardedModel(TinyModel):
    """Has its weights on all ranks; the last layer, of one row, on but one of them."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed)
        self.began: dict[str, str] = {}

    def configure_model(self) -> None:
        if not isinstance(self.net, FSDPModule):
            assert self.device_mesh is not None
            shard(self.net, self.device_mesh["data_parallel"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not self.began or self.global_step == 10:
            self.began = self.state()

    def state(self) -> dict[str, str]:
        optimizer: Any = self.optimizers()
        kept = [v["exp_avg_sq"] for v in optimizer.optimizer.state.values()]
        return {"weights": digest(self.parameters()), "optimizer": digest(kept)}


class Job:
    """The phases, and what they share."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.out = Path(arguments["out"])
        self.store: str = arguments["store"]
        self.rank = int(os.environ["RANK"])
        self.size = int(os.environ["WORLD_SIZE"])

    def node(self, name: str) -> Node:
        return Node(self.out / name)

    def trainer(self, node: Node, io: Any, *, sharded: bool = True, **more: Any) -> pl.Trainer:
        strategy = ModelParallelStrategy(
            data_parallel_size=self.size,
            tensor_parallel_size=1,
            save_distributed_checkpoint=sharded,
        )
        options: dict[str, Any] = {"max_steps": STEPS, "strategy": strategy, "devices": self.size}
        return trainer(node, io, **(options | more))

    def fit(
        self, node: Node, io: Any, reference: Any = None, *, seed: int = 2, **more: Any
    ) -> ShardedModel:
        model = ShardedModel(seed)
        self.trainer(node, io, **more).fit(model, ckpt_path=reference)
        return model

    def resume(self, name: str, reference: Any, store: str = "", **more: Any) -> ShardedModel:
        node = self.node(name)
        return self.fit(node, tiered(store or self.store, node), reference, **more)

    def error_of(self, call: Callable[[], Any]) -> str:
        try:
            call()
        except (Exception, CheckpointException) as error:  # noqa: BLE001  what was raised counts
            return f"{type(error).__name__}: {error}"
        return "no error"

    # --- phases ------------------------------------------------------------------------------

    def reference(self) -> Any:
        """An uninterrupted run without us."""
        model = self.fit(self.node("reference"), None, seed=1)
        return {"losses": model.losses, "began": model.began}

    def killed(self) -> Any:
        """A run that is gone, agent and all, between two saves."""
        node = self.node("first")
        io = tiered(self.store, node)
        job = self

        class Killed(ShardedModel):
            def on_train_batch_end(self, *_: Any) -> None:
                if self.global_step == KILLED_AT:
                    io.checkpointer.wait(60)
                    job.answer("killed", {"losses": self.losses, "links": job.links(node)})
                    job.kill_all(node)

        self.trainer(node, io, callbacks=[every(5)]).fit(Killed(1))

    def links(self, node: Node) -> dict[str, list[str]]:
        dist.barrier()
        directories = sorted((node.root / "checkpoints").iterdir())
        return {d.name: sorted(link.name for link in d.iterdir()) for d in directories}

    def kill_all(self, node: Node) -> None:
        pids: list[int] = [0] * self.size
        dist.all_gather_object(pids, os.getpid())
        if self.rank == 0:
            page = read_status(StagingLayout(node.staging))
            assert page is not None
            for pid in (*pids[1:], page.pid, pids[0]):
                os.kill(pid, signal.SIGKILL)
        signal.pause()

    def resumed(self) -> Any:
        """Every way to go on from the bucket."""
        newest = tiered(self.store, self.node("x")).checkpointer.saves()[0]
        elsewhere = "/gone/with/the/node/project/checkpoints/epoch=0-step=5.ckpt"
        found: dict[str, Any] = {"metadata": newest.metadata, "name": newest.name}
        for label, reference in {
            "last": "last",
            "latest": "tier://latest",
            "id": f"tier://{newest.save_id}",
            "url": newest.url,
            "earlier": elsewhere,
        }.items():
            model = self.resume(label, reference)
            found[label] = {"losses": model.losses, "began": model.began}
        nodes = self.node(f"nodes/{self.rank}")
        found["nodes"] = {"losses": self.fit(nodes, tiered(self.store, nodes), "last").losses}
        found["forgetful"] = {"losses": self.forgetful().losses}
        found["scratch"] = {"losses": self.resume("scratch", None).losses}
        empty = self.store.replace("/run", "/empty")
        found["nothing"] = {"losses": self.resume("empty", "last", empty).losses}
        found["missing"] = self.error_of(lambda: self.resume("m", "nowhere/different.ckpt"))
        return found

    def forgetful(self) -> ShardedModel:
        class Forgets(ShardedModel):
            def on_train_start(self) -> None:
                optimizer: Any = self.optimizers()
                optimizer.optimizer.state.clear()

        node = self.node("forgetful")
        model = Forgets(2)
        self.trainer(node, tiered(self.store, node)).fit(model, ckpt_path="last")
        return model

    def one_rank(self) -> Any:
        return self.resume("alone", "tier://latest", max_steps=11).began

    def kept(self) -> Any:
        """A run of its own, ended in order, and what is left of it here and in the bucket."""
        store, node = self.store.replace("/run", "/kept"), self.node("kept")
        io = tiered(store, node)
        callbacks = [
            every(5, save_top_k=1, save_last=True),
            every(4, save_weights_only=True, filename="weights-{step}"),
        ]
        by = self.trainer(node, io, callbacks=callbacks)
        model = ShardedModel(1)
        by.fit(model)
        by.save_checkpoint(node.root / "after" / "fit.ckpt")
        io.checkpointer.wait(60)
        links = self.links(node)
        after = sorted(p.name for p in (node.root / "after" / "fit.ckpt").iterdir())
        dist.barrier()
        by.strategy.remove_checkpoint(node.root / "after" / "fit.ckpt")
        dist.barrier()
        by.save_checkpoint(node.root / "after" / "more.ckpt", weights_only=True)
        io.close()
        dist.barrier()
        saves = tiered(store, node).checkpointer.saves()
        rejected = self.error_of(lambda: by.save_checkpoint("x.ckpt", storage_options={}))
        return {
            "links": links,
            "after": [after, (node.root / "after" / "fit.ckpt").exists()],
            "saves": [[s.step, s.name, bool(s.metadata.get("weights_only"))] for s in saves],
            "state": {"weights": digest(model.parameters())},
            "rejected": rejected,
        } | self.from_kept(store, node, model)

    def from_kept(self, store: str, node: Node, model: ShardedModel) -> dict[str, Any]:
        """Go on from it: with its NVMe, with weights only, with other models."""
        here = self.watched(lambda: self.fit(node, tiered(store, node), "last", max_steps=21))
        weights = "/gone/with/the/node/project/checkpoints/weights-step=20.ckpt"

        def validated(seed: int, path: Any, **options: Any) -> str:
            other = ShardedModel(seed)
            by = self.trainer(self.node("validate"), tiered(store, self.node("validate")))
            by.validate(other, ckpt_path=path, verbose=False, **options)
            return digest(other.parameters())

        class Wider(ShardedModel):
            def __init__(self) -> None:
                super().__init__(2)
                self.more = torch.nn.Parameter(torch.ones(3))

        class Lenient(Wider):
            strict_loading = False

        def wider(model: ShardedModel) -> str:
            by = self.trainer(self.node("wider"), tiered(store, self.node("wider")))
            by.validate(model, ckpt_path=weights, verbose=False)
            return digest(model.net.parameters())

        return {
            "from_nvme": here,
            "on_weights": self.error_of(lambda: self.resume("w", weights, store)),
            "validated": validated(3, weights),
            "strict": self.error_of(lambda: wider(Wider())),
            "lenient": wider(Lenient()) == digest(model.net.parameters()),
        }

    def watched(self, call: Callable[[], Any]) -> dict[str, Any]:
        """Call, and say from which tiers DCP's files came meanwhile."""
        reports: list[Any] = []
        read = TieredStorageReader.read_data

        def read_data(reader: TieredStorageReader, plan: Any, planner: Any) -> Any:
            done = read(reader, plan, planner)
            reports.append(reader.report)
            return done

        TieredStorageReader.read_data = read_data  # type: ignore[assignment,method-assign]
        try:
            call()
        finally:
            TieredStorageReader.read_data = read  # type: ignore[method-assign]
        return {
            "nvme": sorted({file for report in reports for file in report.nvme_files}),
            "store": sorted({file for report in reports for file in report.store_files}),
        }

    def stock(self) -> Any:
        """Lightning without us, from what `restore` brought back."""
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        node = self.node("stock")
        if self.rank == 0:
            tiered(self.store, node).checkpointer.restore(node.path / "restored", "latest")
        dist.barrier()
        (directory,) = (node.path / "restored").iterdir()
        model = self.fit(node, None, directory)
        with_ours = self.resume("converted", directory)  # an ordinary directory to us
        return {
            "directory": [directory.name, sorted(p.name for p in directory.iterdir())],
            "losses": model.losses,
            "ordinary": with_ours.losses,
        }

    def whole(self) -> Any:
        """Checkpoints of one file, and those of DDP, in a strategy that shards."""
        store, node = self.store.replace("/run", "/whole"), self.node("whole")
        io = tiered(store, node)
        self.fit(node, io, seed=1, sharded=False, callbacks=[every(5)], max_steps=10)
        nodes = self.node(f"whole-nodes/{self.rank}")
        again = self.fit(nodes, tiered(store, nodes), "last", sharded=False)
        sharded = self.resume("whole-sharded", "last", store)
        back = self.resume("shards-whole", "tier://latest", sharded=False)
        ddp = self.error_of(lambda: self.ddp("tier://latest"))
        path = node.root / "checkpoints" / "epoch=0-step=10.ckpt"
        return {
            "whole": again.losses,
            "sharded": sharded.losses,
            "back": back.losses,
            "ddp": ddp,
            "is_file": path.is_file(),
        }

    def ddp(self, reference: str) -> None:
        node = self.node("ddp")
        by = trainer(
            node, tiered(self.store, node), max_steps=11, strategy="ddp", devices=self.size
        )
        by.fit(TinyModel(), ckpt_path=reference)

    def excepted(self) -> Any:
        """An exception on all ranks, with hyperparameters that only their class can make again."""
        store, node = self.store.replace("/run", "/excepted"), self.node("excepted")

        class Fails(ShardedModel):
            def on_train_batch_end(self, *_: object) -> None:
                if self.global_step == 8:
                    raise ValueError("as planned")

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["mine"] = Node(Path("of a class"))

        def again(node: Node) -> OnExceptionCheckpoint:
            return OnExceptionCheckpoint(node.root / "checkpoints")

        io = tiered(store, node)
        failed = self.error_of(
            lambda: self.trainer(node, io, callbacks=[again(node)]).fit(Fails(1))
        )
        fresh = self.node("excepted-fresh")
        refused = self.error_of(
            lambda: self.fit(fresh, tiered(store, fresh), callbacks=[again(fresh)])
        )
        by = self.trainer(fresh, tiered(store, fresh), callbacks=[again(fresh)])
        model = ShardedModel(2)
        by.fit(model, weights_only=False)
        return {"failed": failed, "refused": refused, "losses": model.losses}

    def slow(self) -> Any:
        """A checkpoint that is staged and not durable yet, on one node and on two."""
        return {
            "one node": self.validated_before_durable(self.node("slow"), "/slow"),
            "two nodes": self.validated_before_durable(self.node(f"slow-{self.rank}"), "/slower"),
        }

    def validated_before_durable(self, node: Node, name: str) -> list[Any]:
        store = self.store.replace("/run", name)
        options = {"max_bandwidth": "1MiB", "drain_timeout": 0, "resume_wait": 0.2}
        big = bytes(40 << 20)  # keeps the agent busy for more than this takes

        class Heavy(ShardedModel):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["big"] = big

        model = Heavy(1)
        by = self.trainer(node, tiered(store, node, **options), max_steps=5, callbacks=[every(5)])
        by.fit(model)
        assert by.checkpoint_callback is not None
        path = by.checkpoint_callback.best_model_path  # type: ignore[attr-defined]
        other = ShardedModel(2)
        by = self.trainer(node, tiered(store, node, **options))
        error = self.error_of(lambda: by.validate(other, ckpt_path=path, verbose=False))
        durable = tiered(store, node).checkpointer.latest() is not None
        pids: list[int] = [0] * self.size
        page = read_status(StagingLayout(node.staging))
        dist.all_gather_object(pids, page.pid if page else 0)
        if self.rank == 0:
            for pid in set(pids) - {0}:
                os.kill(pid, signal.SIGKILL)
        equal = digest(other.parameters()) == digest(model.parameters())
        return [error, equal, durable]

    def fsdp1(self) -> Any:
        """The older FSDP has no CPUs in mind, but can be told to use them."""

        class OnCpu(FSDPStrategy):
            def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
                return FullyShardedDataParallel(
                    model, device_id=torch.device("cpu"), use_orig_params=True
                )

        def fit(node: Node, io: Any, reference: Any = None, **more: Any) -> Losses:
            strategy = OnCpu(
                state_dict_type="sharded", process_group_backend="gloo", use_orig_params=True
            )
            model = TinyModel(2 if reference else 1)
            options: dict[str, Any] = {"max_steps": STEPS, "strategy": strategy}
            trainer(node, io, **(options | {"devices": self.size} | more)).fit(
                model, ckpt_path=reference
            )
            return model.losses

        store, node = self.store.replace("/run", "/fsdp1"), self.node("fsdp1")
        fit(node, tiered(store, node), callbacks=[every(5)], max_steps=10)
        fresh = self.node("fsdp1-fresh")
        again = fit(fresh, tiered(store, fresh), "last")
        if self.rank == 0:
            tiered(store, node).checkpointer.restore(fresh.path / "restored", "latest")
        dist.barrier()
        (directory,) = (fresh.path / "restored").iterdir()
        return {"ours": again, "stock": fit(fresh, None, directory)}

    def fabric(self) -> Any:
        return {"sharded": self.with_fabric(sharded=True), "whole": self.with_fabric(sharded=False)}

    def with_fabric(self, *, sharded: bool) -> Any:
        kind = "sharded" if sharded else "whole"
        store, node = self.store.replace("/run", f"/fabric-{kind}"), self.node(f"fabric-{kind}")

        def begin(io: TieredCheckpointIO, seed: int) -> tuple[Fabric, dict[str, Any]]:
            strategy = FabricStrategy(
                parallelize_fn=self.parallelize,
                data_parallel_size=self.size,
                tensor_parallel_size=1,
                save_distributed_checkpoint=sharded,
            )
            fabric = Fabric(accelerator="cpu", devices=self.size, strategy=strategy)
            fabric.launch()
            attach(fabric, io)
            torch.manual_seed(seed)
            net = fabric.setup_module(torch.nn.Sequential(torch.nn.Linear(16, 3)))
            optimizer = fabric.setup_optimizers(torch.optim.Adam(net.parameters(), lr=0.1))
            return fabric, {"model": net, "optimizer": optimizer, "step": 0, "note": "fresh"}

        def train(fabric: Fabric, state: dict[str, Any], steps: int) -> Losses:
            losses: Losses = {}
            for step in range(state["step"], steps):
                generator = torch.Generator().manual_seed(step * 64 + self.rank)
                loss = state["model"](torch.randn(8, 16, generator=generator)).square().mean()
                fabric.backward(loss)
                state["optimizer"].step()
                state["optimizer"].zero_grad()
                losses[step] = float(loss.item()).hex()
                state["step"] = step + 1
            return losses

        io = tiered(store, node)
        fabric, state = begin(io, 1)
        train(fabric, state, 3)
        state["note"] = "saved"
        fabric.save(node.root / "fabric.ckpt", state)
        after = train(fabric, state, 6)
        io.close()
        dist.barrier()
        fresh = tiered(store, self.node(f"fabric-{kind}-fresh"))
        fabric, state = begin(fresh, 2)
        remainder = fabric.load("tier://latest", state)
        found = [state["step"], state["note"], remainder]
        return {"equal": train(fabric, state, 6) == after, "found": found, "losses": len(after)}

    def parallelize(self, net: torch.nn.Module, mesh: Any) -> torch.nn.Module:
        shard(net, mesh["data_parallel"])
        return net

    def answer(self, phase: str, found: Any) -> None:
        (self.out / f"{phase}-{self.rank}.json").write_text(json.dumps(found))


def main() -> None:
    arguments = json.loads(sys.argv[1])
    job = Job(arguments)
    for phase in arguments["phases"]:
        job.answer(phase, getattr(job, phase)())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
