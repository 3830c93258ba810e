"""Where a figure comes from: the machine, the versions and the commit that a result names."""

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .._version import __version__

# Extensions that decide which products a CPU has for the weights of a model.
EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")


def machine() -> dict[str, str | int | list[str]]:
    """Of the CPU: its name, the cores of this machine and those of EXTENSIONS that it has."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    lines = [line.partition(":") for line in text.splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in reversed(lines)}     # of the first core
    flags = facts.get("flags", facts.get("Features", "")).split()
    name = facts.get("model name", platform.processor() or platform.machine())
    if "model" in facts:
        name += f", model {facts['model']}"
    return {"cpu": name, "architecture": platform.machine(), "cores": os.cpu_count() or 1,
            "extensions": [extension for extension in EXTENSIONS if extension in flags]}


def versions(*packages: str) -> dict[str, str]:
    """Of this package, of Python, and of those of these packages that are installed."""
    found = {"batch_manager": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit_of_the_checkout() -> str:
    """As git describes it, with a + where a tracked file differs; "unknown" without git, or outside a repository."""
    if shutil.which("git") is None:
        return "unknown"
    described = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True,
                               cwd=Path(__file__).parent, check=False)
    return described.stdout.strip() or "unknown"
