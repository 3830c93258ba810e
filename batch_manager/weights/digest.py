"""A digest of a checkpoint, by which ranks find out whether they load the same model."""

import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

from .folder import SHARD_NAME

SAMPLES = 16                     # of each file, at equal distances
SAMPLE_BYTES = 1 << 16


def checkpoint_digest(model_path: str | os.PathLike[str]) -> str:
    """Return 64 hexadecimal digits for sizes, headers and samples of config.json and the weight files.

    Equal for copies of a checkpoint, in any folder. Other weights of the same shapes have another digest unless they
    differ in few places. Returns "" for a path without such files, which the loader refuses with a better reason.
    """
    digest, files = sha256(), weight_files(model_path)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''} {size} ".encode())
        with open(file, "rb") as content:
            for sample in range(SAMPLES):
                content.seek(size * sample // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else ""


def weight_files(model_path: str | os.PathLike[str]) -> list[Path]:
    """Return config.json and the weight files of a folder, or all shards of a GGUF file, by name."""
    path = Path(model_path)
    if not path.is_file():
        return sorted(file for pattern in ("config.json", "*.safetensors") for file in path.glob(pattern))
    name = SHARD_NAME.fullmatch(path.name)
    if name is None:
        return [path]
    return [path.with_name(f"{name[1]}-{number:05}-of-{name[3]}{name[4]}") for number in range(1, int(name[3]) + 1)]


def identities(model_path: str | os.PathLike[str]) -> dict[Path, tuple[int, ...]]:
    """Return device, number, size and times of config.json and each weight file: take them before these are read.

    Returns {} for a path without such files, and for what is no path: the loader refuses it with a better reason.
    """
    try:
        return {file: _identity(file.stat()) for file in weight_files(model_path)}
    except (OSError, TypeError, ValueError):
        return {}


def content_digest(files: Mapping[Path, tuple[int, ...]], kept_in: str | os.PathLike[str] | None = None,
                   may_write: bool = True) -> str:
    """Return 64 hexadecimal digits for all bytes of config.json and of the weight files.

    files       `identities` from before and after the weights were read: the digest is that of these bytes; empty: they
                were different
    kept_in     folder in which the digest of a file is kept, under its device, number, size and times; None: nowhere

    Raises OSError, also for a file that was changed or replaced since.
    """
    if not files:
        raise OSError("the files of the checkpoint were changed or replaced while they were loaded")
    digest = sha256()
    for file, identity in files.items():
        of_file = _digest_of_file(file, identity, kept_in, may_write)
        digest.update(f"{file.name if len(files) > 1 else ''} {of_file} ".encode())
    return digest.hexdigest()


def _digest_of_file(file: Path, identity: tuple[int, ...], kept_in: str | os.PathLike[str] | None,
                    may_write: bool) -> str:
    name = sha256(repr(identity).encode())
    kept = None if kept_in is None else Path(kept_in) / f"weights-{name.hexdigest()}"
    if kept is not None:
        with suppress(OSError, UnicodeDecodeError):
            text = kept.read_text("ascii")
            digest, _, check = text.partition(" ")
            if check == sha256(digest.encode()).hexdigest():
                return digest
    with open(file, "rb") as content:
        is_same = _identity(os.fstat(content.fileno())) == identity
        digest = file_digest(content, "sha256").hexdigest()
        if not is_same or _identity(os.fstat(content.fileno())) != identity:
            raise OSError(f"{file.name} was changed or replaced after it was loaded")
    if kept is not None and may_write:
        with suppress(OSError):
            temporary = kept.with_name(f"tmp-{os.getpid()}-{kept.name}")
            temporary.write_text(f"{digest} {sha256(digest.encode()).hexdigest()}", "ascii")
            os.replace(temporary, kept)
    return digest


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
