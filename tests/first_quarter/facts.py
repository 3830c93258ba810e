"""Prints the machine, the versions of packages, and whether the kernels that were compiled ahead will be used.

    python -m tests.first_quarter.facts [FOLDER]          FOLDER is what --prepare made
"""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

KERNELS = "kernels.tar.xz"               # in the folder of --prepare: a Triton cache
KEY_FILE = "triton_key"                  # in the folder of --prepare
PROBLEMS = "FIRST_QUARTER_PROBLEMS"      # variable: what could not be unpacked, one per line


def triton_key() -> str:
    """Return a hash of this installation of triton. Compiled kernels are used only where it is the same."""
    from triton.runtime import cache

    return hashlib.sha256(cache.triton_key().encode()).hexdigest()


def main(folder: Path | None) -> None:
    if shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi"], check=False)
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "triton", "numpy", "transformers")))
    import torch

    import batch_manager.gpt_manager  # noqa: F401
    import batch_manager.triton_kernels.dispatch  # noqa: F401

    print("GPU:", torch.cuda.get_device_name() if torch.cuda.is_available() else "none")
    key = triton_key()
    prepared = (folder / KEY_FILE).read_text().strip() if folder and (folder / KEY_FILE).exists() else None
    verdict = {None: "none were prepared", key: "used"}.get(prepared, f"not used: made for the triton {prepared}")
    problems = os.environ.get(PROBLEMS, "")
    if problems:
        print(problems)
    verdict = "not used: they could not be unpacked" if KERNELS in problems else verdict
    print(f"this triton: {key}; kernels compiled ahead: {verdict}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
