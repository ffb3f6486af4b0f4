"""``ckpt-tiering show``: what one save consists of."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tiering.cli.ls import save_fields
from ckpt_tiering.cli.options import (
    AsJson,
    EndpointUrl,
    Profile,
    Region,
    SaveName,
    StoreArgument,
    open_target,
    store_options,
)
from ckpt_tiering.cli.render import print_json, print_table, print_text, show_name, show_time
from ckpt_tiering.units import format_bytes

if TYPE_CHECKING:
    from ckpt_tiering.model.catalog import SaveInfo
    from ckpt_tiering.model.manifest import FileEntry, NodeManifest

__all__ = ["show"]

WithFiles = Annotated[
    bool, typer.Option("--files", help="Also list the files: object, offset, size, digest.")
]


def show(  # noqa: PLR0913  an option is a parameter
    url: StoreArgument,
    save: SaveName = None,
    files: WithFiles = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    as_json: AsJson = False,
) -> None:
    """Show what a save consists of; the newest one of a run by default."""
    target = open_target(url, store_options(endpoint_url, region, profile), save=save)
    with target.reader.keep_open():
        whole = target.reader.load(target.pick(save))
    if as_json:
        answer: dict[str, Any] = {
            "save": save_fields(whole.info),
            "nodes": [_node_fields(node) for node in whole.nodes],
        }
        if files:
            answer["files"] = [_file_fields(node, f) for node in whole.nodes for f in node.files]
        print_json(answer)
        return
    _print_save(whole.info)
    print_text()
    fields = [_node_fields(node) for node in whole.nodes]
    print_table(
        ("node", "ranks", ">files", ">objects", ">size"),
        [
            (
                node["node"],
                ",".join(map(str, node["ranks"])),
                str(node["num_files"]),
                str(node["num_objects"]),
                format_bytes(node["total_bytes"]),
            )
            for node in fields
        ],
    )
    if files:
        print_text()
        _print_files(whole.nodes)


def _node_fields(node: NodeManifest) -> dict[str, Any]:
    return {
        "node": node.node,
        "ranks": list(node.ranks),
        "num_files": sum(f.kind == "file" for f in node.files),
        "num_objects": len(node.objects),
        "total_bytes": sum(o.size_bytes for o in node.objects),
    }


def _file_fields(node: NodeManifest, file: FileEntry) -> dict[str, Any]:
    is_file = file.kind == "file"
    return {
        "path": file.path,
        "kind": file.kind,
        "node": node.node,
        "rank": file.rank,
        "mode": file.mode,
        "size_bytes": file.size_bytes,
        "crc64nvme": file.crc64nvme if is_file else None,
        "object": node.objects[file.object].key if is_file else None,
        "offset": file.offset if is_file else None,
        "target": file.target or None,
    }


def _print_save(info: SaveInfo) -> None:
    lines = [
        ("save", info.save_id),
        ("url", info.url),
        ("step", str(info.step)),
        ("name", show_name(info.name)),
        ("snapshot", show_time(info.snapshot_at)),
        ("size", f"{format_bytes(info.total_bytes)} in {info.num_files} files"),
        ("verified", _VERIFIED.get(info.verified, info.verified)),
    ]
    lines += [
        (f"metadata {show_name(key)}", json.dumps(value)) for key, value in info.metadata.items()
    ]
    for label, value in lines:
        print_text(f"{label:<10} {value}")


_VERIFIED = {
    "checksum": "checksum (the store's own checksums equal the digests taken at the source)",
    "read-back": "read-back (every byte was downloaded and digested: the store has no checksums "
    "that can be trusted)",
}


def _print_files(nodes: tuple[NodeManifest, ...]) -> None:
    rows = []
    for node in nodes:
        for file in node.files:
            is_file = file.kind == "file"
            rows.append(
                (
                    show_name(file.path),
                    str(file.size_bytes) if is_file else file.kind,
                    file.crc64nvme if is_file else "",
                    str(file.offset) if is_file else "",
                    show_name(node.objects[file.object].key)
                    if is_file
                    else f"-> {show_name(file.target)}" * (file.kind == "link"),
                )
            )
    print_table(("path", ">bytes", "crc64nvme", ">offset", "object"), rows)
