"""The hooks for PyInstaller name every module that the package imports by name, and every file that is not Python.

python tests/campaigns/frozen_program.py freezes and runs a program with them.
"""

import ast
import importlib.util
import runpy
import tomllib
from importlib import import_module
from pathlib import Path

import batch_manager
from batch_manager.models.registry import _SHIPPED
from batch_manager.tools.__main__ import COMMANDS
from batch_manager.triton_kernels.cpu.native.build import HEADERS, PANEL_KERNELS, STEP

REPOSITORY = Path(__file__).parents[2]
KERNELS = REPOSITORY / "triton_kernels"
# File with a call of import_module -> modules that it can import, besides kernels.
IMPORTERS = {
    "batch_manager/__init__.py": {f"batch_manager.{module}" for module in batch_manager._PUBLIC.values()},
    "batch_manager/models/registry.py": {f"batch_manager.models.{module}" for module, _ in _SHIPPED.values()},
    "batch_manager/tools/__main__.py": {f"batch_manager.tools.{module}" for module, _ in COMMANDS.values()},
    "triton_kernels/dispatch.py": set()}


def hooks():
    """Return {name of the hooked module: globals of the hook}, found as PyInstaller finds them."""
    entry = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["pyinstaller40"]
    module, _, function = entry["hook-dirs"].partition(":")
    (folder,) = getattr(import_module(module), function)()
    return {path.stem.removeprefix("hook-"): runpy.run_path(str(path)) for path in Path(folder).glob("hook-*.py")}


def test_every_module_that_is_imported_by_its_name_is_named():
    found = set()
    for path in [*(REPOSITORY / "batch_manager").rglob("*.py"), *KERNELS.rglob("*.py")]:
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        if any(ast.unparse(call.func) in ("import_module", "importlib.import_module", "__import__") for call in calls):
            found.add(path.relative_to(REPOSITORY).as_posix())
    assert found == set(IMPORTERS)
    by_module = hooks()
    assert set(by_module) == {"batch_manager", "batch_manager.tools.__main__"}
    named = {name for hook in by_module.values() for name in hook["hiddenimports"]}
    kernels = {".".join(["batch_manager", *path.relative_to(REPOSITORY).with_suffix("").parts])
               for path in KERNELS.rglob("*.py") if path.name != "__init__.py"}
    assert named >= set().union(kernels, *IMPORTERS.values()) and len(kernels) > 20
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def test_every_file_that_is_not_python_is_named():
    hook = hooks()["batch_manager"]
    held = {f"{folder}/{Path(path).name}" for path, folder in hook["datas"]}
    native = "batch_manager/triton_kernels/cpu/native"
    page = {f"batch_manager/tools/draw/page/{path.name}"
            for path in (REPOSITORY / "batch_manager/tools/draw/page").iterdir()}
    assert held >= page | {f"{native}/{name}" for name in (STEP.name, PANEL_KERNELS.name, *HEADERS)} and len(page) > 2
    assert all(Path(path).is_file() for path, _ in hook["datas"])
    assert hook["module_collection_mode"] == {"batch_manager.triton_kernels": "pyz+py"}
