"""The origin of a result: machine, versions and commit."""

import contextlib
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .._version import __version__

# Extensions that determine which matrix products a CPU supports.
EXTENSIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")


def machine() -> dict[str, str | int | list[str]]:
    """Return the name and architecture of the CPU, the number of cores, and its extensions for matrix products.

    Only the extensions listed in EXTENSIONS are reported, such as AVX2 and AVX-512.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    lines = [line.partition(":") for line in text.splitlines()]
    facts = {name.strip(): value.strip() for name, _, value in reversed(lines)}     # values of the first core
    flags = facts.get("flags", facts.get("Features", "")).split()
    name = facts.get("model name", platform.processor() or platform.machine())
    if "model" in facts:
        name += f", model {facts['model']}"
    return {"cpu": name, "architecture": platform.machine(), "cores": os.cpu_count() or 1,
            "extensions": [extension for extension in EXTENSIONS if extension in flags]}


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of this package, of Python, and of the given packages if installed."""
    found = {"batch_manager": __version__, "python": platform.python_version()}
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit_of_the_checkout() -> str:
    """Return the output of git describe, with a + if tracked files differ from the commit.

    Returns "unknown" without git or outside a repository.
    """
    if shutil.which("git") is None:
        return "unknown"
    described = subprocess.run(["git", "describe", "--always", "--dirty=+"], capture_output=True, text=True,
                               cwd=Path(__file__).parent, check=False)
    return described.stdout.strip() or "unknown"
