"""P13: a checkpoint is recovered from the bucket with an S3 client, tarfile and torch alone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import torch

from ckpt_tiering import TieredCheckpointer
from ckpt_tiering.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

# What a person without this package would do, following docs/manifest.md. Runs with the package
# made impossible to import.
BY_HAND = """
import hashlib, io, json, sys, tarfile
from pathlib import Path
sys.modules["ckpt_tiering"] = None
import boto3, torch
bucket, root, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
s3 = boto3.client("s3")
def cp(key):
    return s3.get_object(Bucket=bucket, Key=f"{root}/{key}")["Body"].read()
commits = s3.list_objects_v2(Bucket=bucket, Prefix=f"{root}/commits/")["Contents"]
newest = max(item["Key"] for item in commits)
manifest = json.loads(cp(newest.removeprefix(f"{root}/")))
for node in manifest["nodes"]:
    data = cp(node["key"])
    assert hashlib.sha256(data).hexdigest() == node["sha256"]
    node_manifest = json.loads(data)
    for index, obj in enumerate(node_manifest["objects"]):
        body = cp(obj["key"])
        assert len(body) == obj["size_bytes"]
        if obj["key"].endswith(".tar"):
            tarfile.open(fileobj=io.BytesIO(body)).extractall(out, filter="data")
            continue
        files = [f for f in node_manifest["files"] if f["kind"] == "file"]
        (file,) = [f for f in files if f["object"] == index]
        (out / file["path"]).parent.mkdir(parents=True, exist_ok=True)
        (out / file["path"]).write_bytes(body)
state = torch.load(out / "weights/model.pt", weights_only=True)
extra = torch.load(out / "rng é.pt", weights_only=True)
print(int(state["w"].sum()), extra["step"])
"""


def test_p13_recovered_by_hand(bucket_url: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "weights").mkdir(parents=True)
    torch.save({"w": torch.ones(3 * MIB)}, source / "weights" / "model.pt")
    torch.save({"step": 7}, source / "rng é.pt")
    with TieredCheckpointer(bucket_url, staging=tmp_path / "nvme", part_bytes=5 * MIB) as saver:
        saver.save(7, source)
        saver.wait(90)
    bucket, _, root = bucket_url.removeprefix("s3://").partition("/")
    (tmp_path / "out").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BY_HAND, bucket, root, str(tmp_path / "out")],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.stdout.split() == [str(3 * MIB), "7"], done.stderr
