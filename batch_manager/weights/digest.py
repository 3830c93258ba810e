"""A digest of a checkpoint, by which ranks find out whether they load the same model."""

import os
from contextlib import suppress
from hashlib import file_digest, sha256
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


def content_digest(model_path: str | os.PathLike[str], kept_in: str | os.PathLike[str] | None = None,
                   may_write: bool = True) -> str:
    """Return 64 hexadecimal digits for all bytes of config.json and of the weight files.

    kept_in     folder in which the digest of a file is kept, under its device, number, size and times; None: nowhere

    Raises OSError.
    """
    path = Path(model_path)
    files = [path] if path.is_file() else sorted(
        file for pattern in ("config.json", "*.safetensors") for file in path.glob(pattern))
    digest = sha256()
    for file in files:
        digest.update(f"{'' if path.is_file() else file.name} {_digest_of_file(file, kept_in, may_write)} ".encode())
    return digest.hexdigest()


def _digest_of_file(file: Path, kept_in: str | os.PathLike[str] | None, may_write: bool) -> str:
    found = file.stat()
    name = sha256(repr((found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)).encode())
    kept = None if kept_in is None else Path(kept_in) / f"weights-{name.hexdigest()}"
    if kept is not None:
        with suppress(OSError, UnicodeDecodeError):
            text = kept.read_text("ascii")
            digest, _, check = text.partition(" ")
            if check == sha256(digest.encode()).hexdigest():
                return digest
    with open(file, "rb") as content:
        digest = file_digest(content, "sha256").hexdigest()
    if kept is not None and may_write:
        with suppress(OSError):
            temporary = kept.with_name(f"tmp-{os.getpid()}-{kept.name}")
            temporary.write_text(f"{digest} {sha256(digest.encode()).hexdigest()}", "ascii")
            os.replace(temporary, kept)
    return digest
