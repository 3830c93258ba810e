"""The result file of a benchmark: its schema, and its reader.

Every file is one JSON object with `format` and `format_version`. If `kind` is "run", the file has one run of the
workload, whose figures are fields of the object. If `kind` is "sweep" or "saturation", `points` has one object per
run with the fields that differ, and the shared fields are at the top level.

    version     versions of the program and of torch, as text; `packages` has the version of each package by name
    commit      commit of the checkout, from git describe
    command     arguments of the program
    machine     CPU, cores, memory and device
"""

import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._version import __version__
from ...option_values import unique_names
from ..provenance import commit_of_the_checkout, machine, versions
from .errors import InputError

FORMAT, FORMAT_VERSION = "batch-manager bench", 1
KINDS = ("run", "sweep", "saturation")
PACKAGES = ("torch", "triton", "numpy", "transformers")


def provenance(command: Sequence[str], device: str) -> dict[str, Any]:
    """Return the fields of a result that describe its origin.

    device   the engine's name for the device
    """
    facts = machine() | {"memory_gib": _memory_gib(), "device": _device(device)}
    return {"format": FORMAT, "format_version": FORMAT_VERSION, "machine": facts, "packages": versions(*PACKAGES),
            "commit": commit_of_the_checkout(), "command": list(command)}


def python_version() -> str:
    return platform.python_version()


def version_text() -> str:
    torch = sys.modules.get("torch")
    return f"batch_manager {__version__}" + ("" if torch is None else f", torch {torch.__version__}")


def read_result(path: Path) -> dict[str, Any]:
    """Read a result of this program.

    Raises InputError if the file cannot be read, is not a result, or has another format version than FORMAT_VERSION.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_names)
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}; expected a result of batch-manager bench; correct the path"
                         ) from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        found = f"its format is {result.get('format')!r}" if isinstance(result, dict) else "it is not a JSON object"
        raise InputError(f"{path} is not a result of batch-manager bench: {found}; expected the format {FORMAT!r}; "
                         "measure again with --out")
    if result.get("format_version") != FORMAT_VERSION:
        raise InputError(f"{path} has format_version {result.get('format_version')!r}; this program reads version "
                         f"{FORMAT_VERSION}; measure again, or use the program that wrote it")
    if result.get("kind") not in KINDS:
        raise InputError(f"{path} has the kind {result.get('kind')!r}; expected one of {', '.join(KINDS)}; the file "
                         "was edited: measure again")
    if result["kind"] != "run" and not isinstance(result.get("points"), list):
        raise InputError(f"{path} has the kind {result['kind']!r} and no list of points; expected the points; the "
                         "file was edited: measure again")
    return result


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError):
        return None


def _device(name: str) -> str:
    """Return the name of the device. The name of a GPU includes the hardware, as in "cuda:0 (NVIDIA H100)"."""
    torch = sys.modules.get("torch")
    if torch is None or name.split(":")[0] in ("cpu", "none"):
        return name
    from ...runtime.device.devices import device_name

    return device_name(torch.device(name))
