"""The rules of the source tree that no linter knows. There is no list of exemptions."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(
    path for top in ("ckpt_tiering", "integrations") for path in (ROOT / top).rglob("*.py")
)
FOLDERS = ["integrations", "tests", "examples", "benchmarks"]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "common", "misc", "manager"}
HEAVY = {
    "accelerate", "boto3", "botocore", "deepspeed", "lightning", "matplotlib", "pytorch_lightning",
    "rich", "s3transfer", "tensorboard", "torch", "transformers", "typer", "wandb",
}  # fmt: skip

every_module = pytest.mark.parametrize(
    "path", SHIPPED, ids=[str(path.relative_to(ROOT)) for path in SHIPPED]
)


def heavy_modules_after(statement: str) -> set[str]:
    """Run ``statement`` in a fresh interpreter and return the heavy packages it loaded."""
    report = "import json, sys; print(json.dumps([name.partition('.')[0] for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{report}"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return HEAVY & set(json.loads(done.stdout))


@every_module
def test_a_module_fits_in_a_head(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_MODULE_LINES


@every_module
def test_a_function_fits_on_a_screen(path: Path) -> None:
    too_long = {
        node.name: lines
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not too_long


@every_module
def test_a_module_is_named_after_what_it_does(path: Path) -> None:
    assert path.stem not in NAMES_THAT_SAY_NOTHING


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_module_is_named_like_one_it_imports(folder: str) -> None:
    """``examples/lightning.py`` that imports lightning would import itself."""
    namesakes = {
        str(path.relative_to(ROOT))
        for path in (ROOT / folder).rglob("*.py")
        if path.stem in imported_packages(path)
    }
    assert not namesakes


def imported_packages(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_named_like_a_framework_cannot_shadow_it(folder: str) -> None:
    """Only ``ckpt_tiering_*`` are packages; ``integrations/lightning`` must stay a mere folder."""
    packages = {
        str(init.parent.relative_to(ROOT))
        for init in (ROOT / folder).rglob("__init__.py")
        if not any(part.startswith("ckpt_tiering_") for part in init.relative_to(ROOT).parts)
    }
    assert not packages


def test_each_integration_is_one_package_of_its_own_name() -> None:
    for folder in (path for path in (ROOT / "integrations").iterdir() if path.is_dir()):
        assert (folder / f"ckpt_tiering_{folder.name}" / "__init__.py").is_file()


def test_importing_the_package_is_light() -> None:
    """It happens in every training process, so it loads no SDK, framework, tracker or CLI."""
    assert heavy_modules_after("import ckpt_tiering") == set()


def test_the_client_in_the_training_process_loads_no_sdk() -> None:
    assert heavy_modules_after("import ckpt_tiering.agent.client") == set()


def test_the_agent_loads_no_torch() -> None:
    """35 MB and 0.2 s to start without it, 270 MB and 1.3 s with it, on every node."""
    loaded = heavy_modules_after("import ckpt_tiering.agent.__main__")
    assert not loaded & {"torch", "lightning", "matplotlib", "wandb"}
