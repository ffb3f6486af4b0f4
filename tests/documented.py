"""Holds JSON that the command line printed against the tables of ``docs/cli-json.md``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent / "docs" / "cli-json.md"
_ROW = re.compile(r"\| `([^`]+)` \| ([a-z ]+) \|")
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def _rows(text: str) -> dict[str, str]:
    return dict(_ROW.findall(text))


def fields(command: str) -> dict[str, str]:
    """Return the documented fields of a command with their types, shared ones written out."""
    text = DOCS.read_text(encoding="utf-8")
    section = re.search(rf"(?ms)^## [^\n]*`{command}`[^\n]*\n(.*?)(?=^## |\Z)", text)
    assert section is not None, f"{command} is not documented"
    everywhere = _rows(text)
    shared = {
        "save": {k[2:]: v for k, v in everywhere.items() if k.startswith("S.")},
        "staged save": {k[2:]: v for k, v in everywhere.items() if k.startswith("N.")},
    }
    found: dict[str, str] = {}
    for path, kind in _rows(section[1]).items():
        if path.startswith("N."):
            continue
        if kind in shared:
            found |= {f"{path}.{name}": of for name, of in shared[kind].items()}
        else:
            found[path] = kind
    return found


def _walk(value: Any, path: str, known: dict[str, str]) -> Iterator[tuple[str, Any]]:
    if known.get(path) == "any":
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{path}.{key}" if path else key, known)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner, f"{path}[]", known)
    else:
        yield path, value


def _is(value: Any, kind: str) -> bool:
    names = kind.split(" or ")
    if kind == "any":
        return True
    if isinstance(value, bool):
        return "boolean" in names
    return isinstance(value, tuple(t for name in names for t in _TYPES[name]))


def _holders(value: Any, steps: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the objects that should have the field whose path ends with the last step."""
    if len(steps) == 1:
        yield value
        return
    name, is_list = steps[0].removesuffix("[]"), steps[0].endswith("[]")
    if name not in value:
        return
    for inner in value[name] if is_list else [value[name]]:
        yield from _holders(inner, steps[1:])


def check(command: str, answer: dict[str, Any]) -> None:
    """Fail unless all fields are documented, of their types, and all that are documented there."""
    documented = fields(command)
    known = {path.replace("?", ""): kind for path, kind in documented.items()}
    for path, value in _walk(answer, "", known):
        assert path in known, f"{path} of {command} is not documented"
        assert _is(value, known[path]), f"{path} of {command} is {value!r}, not {known[path]}"
    for path in documented:
        if "?" in path and path.split("?")[0] not in answer:
            continue
        steps = path.replace("?", "").split(".")
        for holder in _holders(answer, steps):
            name = steps[-1].removesuffix("[]")
            assert name in holder, f"{path} of {command} is missing"
