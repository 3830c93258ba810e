"""A digest of a checkpoint, by which ranks find out whether they load the same model."""

import os
from hashlib import sha256
from pathlib import Path

SAMPLES = 16                     # of each file, at equal distances
SAMPLE_BYTES = 1 << 16


def checkpoint_digest(model_path: str | os.PathLike[str]) -> str:
    """Return 64 hexadecimal digits for config.json, and for the sizes, headers and samples of the weight files.

    Equal for copies of a checkpoint, in any folder. Other weights of the same shapes have another digest unless they
    differ in few places. Returns "" for a path without such files, which the loader refuses with a better reason.
    """
    path = Path(model_path)
    files = [path] if path.is_file() else sorted(
        file for pattern in ("config.json", "*.safetensors") for file in path.glob(pattern))
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{'' if path.is_file() else file.name} {size} ".encode())
        with open(file, "rb") as content:
            for sample in range(SAMPLES):
                content.seek(size * sample // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""
