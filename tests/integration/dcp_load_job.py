"""Ranks that save with stock DCP, and ranks that load it with `TieredStorageReader`.

Started by ``torch.distributed.run`` with one JSON argument; each rank writes what it found.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ckpt_tiering.dcp import TieredStorageReader

# On two ranks, a shard of `big` is an object of its own; on four, it is a member of a pack.
BIG_ROWS, BIG_COLUMNS = 2103, 1001
OBJECTS: dict[str, Any] = {
    "step": 7,
    "nested": ["a", {"b": 2.5, "c": (1, None)}],
    "numpy": np.float64(3.5),
    "set": {1, 2},
}


def tensors() -> dict[str, torch.Tensor]:
    numbers = torch.arange(BIG_ROWS * BIG_COLUMNS, dtype=torch.float64)
    return {
        "big": numbers.reshape(BIG_ROWS, BIG_COLUMNS),
        "odd": numbers[:35].reshape(7, 5).float(),
        "vector": numbers[:13].long(),
        "scalar": numbers[9].clone(),
        "bfloat": numbers[:15].reshape(5, 3).bfloat16(),
        "grid": numbers[:63].reshape(9, 7).float(),
        "strided": numbers[:77].reshape(7, 11).t().contiguous().t(),
        "same": numbers[:11].float(),
    }


class Ranks:
    """The first ranks of the job, as if they were all."""

    def __init__(self, num_ranks: int) -> None:
        self.num = num_ranks
        ranks = torch.arange(num_ranks)
        self.group = dist.new_group(ranks.tolist(), backend="gloo")
        self.mesh = DeviceMesh("cpu", ranks)
        self.grid = DeviceMesh("cpu", ranks.reshape(2, -1)) if num_ranks % 2 == 0 else None

    def state(self, values: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Distribute tensors: by rows, by columns, in two dimensions, or not at all."""
        placed: dict[str, Any] = {}
        for name, value in values.items():
            if name == "scalar":
                placed[name] = value.clone()
            elif name == "grid" and self.grid is not None:
                placed[name] = distribute_tensor(value, self.grid, [Shard(0), Shard(1)])
            elif name == "same":
                placed[name] = distribute_tensor(value, self.mesh, [Replicate()])
            else:
                columns = name in {"odd", "bfloat"}
                placed[name] = distribute_tensor(value, self.mesh, [Shard(int(columns))])
        return placed

    def model(self, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = make_model()
        for layer in (*model.children(), model):
            fully_shard(layer, mesh=self.mesh)
        return model, torch.optim.Adam(model.parameters(), lr=0.01 * seed)


def make_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(13, 7), torch.nn.ReLU(), torch.nn.Linear(7, 5))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(2):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 13)).square().mean().backward()
        optimizer.step()


def fresh(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.full_like(value, -1) for name, value in values.items()}


def learner(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def whole(value: Any) -> Any:
    """Gather all tensors of a state."""
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    if isinstance(value, list):
        return [whole(part) for part in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def differences(found: Any, expected: Any, path: str = "") -> list[str]:
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{path}: {sorted(found)} != {sorted(expected)}"]
        return [d for k in expected for d in differences(found[k], expected[k], f"{path}.{k}")]
    if isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [d for n, (f, e) in pairs for d in differences(f, e, f"{path}.{n}")]
    if isinstance(expected, torch.Tensor):
        same = found.dtype == expected.dtype and torch.equal(found, expected)
    else:
        same = found == expected and type(found) is type(expected)
    return [] if same else [f"{path}: {found} != {expected}"]


def save_on(ranks: Ranks, out: Path) -> None:
    """Save with DCP's own writer; write down what it is that was saved."""
    model, optimizer = ranks.model(seed=3)
    train(model, optimizer)
    state = {"tensors": ranks.state(tensors()), "objects": OBJECTS, **learner(model, optimizer)}
    writer = FileSystemWriter(out / f"dcp-{ranks.num}", sync_files=False)
    save(state, storage_writer=writer, process_group=ranks.group)
    expected = whole(state)
    if dist.get_rank() == 0:
        torch.save(expected, out / f"expected-{ranks.num}.pt")


def load_on(ranks: Ranks, case: dict[str, Any], out: Path) -> dict[str, Any]:
    """Load into a state of other values; say what came of it."""
    model, optimizer = ranks.model(seed=5)
    state = {
        "tensors": ranks.state(fresh(tensors())),
        "objects": dict.fromkeys(OBJECTS, "unset") | {"nested": ["", {"b": 0, "c": 0}]},
        **learner(model, optimizer),
    }
    saves = case["saves"]
    reader = TieredStorageReader(
        case["store"], saves[dist.get_rank() % len(saves)], case.get("staging")
    )
    try:
        load(state, storage_reader=reader, process_group=ranks.group)
    except CheckpointException as error:
        kinds = {rank: type(cause).__name__ for rank, (cause, _) in error.failures.items()}
        return {"error": str(error), "kinds": kinds}
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    found = whole({**state, **learner(model, optimizer)})
    expected = torch.load(out / f"expected-{case['saved_on']}.pt", weights_only=False)
    report = reader.report
    assert report is not None
    return {
        "differences": differences(found, expected),
        "nvme_bytes": report.nvme_bytes,
        "downloaded_bytes": report.downloaded_bytes,
        "quarantined": report.quarantined,
    }


def main() -> None:
    arguments = json.loads(sys.argv[1])
    out = Path(arguments["out"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    groups = {n: Ranks(n) for n in arguments["groups"]}
    for num_ranks in arguments.get("save_on", ()):
        if rank < num_ranks:
            save_on(groups[num_ranks], out)
    for case in arguments.get("cases", ()):
        if rank < case["ranks"]:
            found[case["name"]] = load_on(groups[case["ranks"]], case, out)
    path = out / f"{arguments['phase']}-{rank}.json"
    path.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
