"""A checkpoint folder. Only this module turns file names into paths.

A folder of the Hugging Face cache holds links to files of its repository:

    models--ORGANISATION--NAME/snapshots/REVISION/config.json -> ../../blobs/5f3a...
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError, type_name
from .json_file import shown

A_CHECKPOINT = "expected a folder with config.json and *.safetensors files, or a .gguf file"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SHARD_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A regular file of a checkpoint.

    path        full path in the folder, where the file may be a link; errors name this path
    real_path   the path with links resolved. The file is opened by this path, so changing a link later has no effect
    """

    path: Path
    real_path: Path

    def __str__(self) -> str:
        return str(self.path)


def existing_path(path: str | os.PathLike) -> Path:
    """Return `path` with links resolved, but keep its last component if that is a link to a file.

    Raises ModelLoadError if the path does not exist.
    """
    try:
        given = os.fsdecode(path)
    except Exception as fault:                      # an os.PathLike of the user's can raise anything, in its repr too
        raise ModelLoadError(f"model_path is of type {type_name(path)}, which is not a path ({type_name(fault)})",
                             A_CHECKPOINT) from None
    if not given:                                   # pathlib would take it for the working directory
        raise ModelLoadError("model_path is empty", A_CHECKPOINT, 'pass "." for the working directory')
    try:
        target = Path(given).resolve(strict=True)
        return target if target.is_dir() else Path(given).parent.resolve(strict=True) / Path(given).name
    except (OSError, ValueError, RuntimeError) as fault:
        way_out = ["pass an existing path"]
        if HUB_NAME.fullmatch(given) and not is_gguf_name(given):
            way_out = [f"it looks like a name on the Hugging Face hub, and models are not downloaded here: run `hf "
                       f"download {given}` and pass the folder that it prints"]
        what = "GGUF file" if is_gguf_name(given) else "model folder"
        raise ModelLoadError(f"the {what} {given!r} cannot be opened ({fault})", A_CHECKPOINT, *way_out) from None


def is_gguf_name(name: str) -> bool:
    return name.lower().endswith(".gguf")


def gguf_file(path: str | os.PathLike) -> CheckpointFile:
    """Return the regular file at `path`. It may be a link to a file in any folder, because the user passed it.

    Raises ModelLoadError if there is no regular file.
    """
    found = existing_path(path)
    target = found.resolve()
    if not target.is_file():
        raise ModelLoadError(f"{found} is not a regular file", "expected a GGUF file")
    return CheckpointFile(found, target)


class CheckpointFolder:
    """The files directly inside one folder, by bare name.

    A link may lead to a file of the same folder. In a snapshot of a Hugging Face cache, a link may also lead to a file
    in `blobs` of the same repository. Any other link is refused, and so is a name that leads out of the folder.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = existing_path(path).resolve()
        if not self.path.is_dir():
            raise ModelLoadError(f"{self.path} is neither a folder nor a .gguf file", A_CHECKPOINT,
                                 "pass the folder that contains the file, or a file whose name ends in .gguf")

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def file(self, name: str, named_by: str = "") -> CheckpointFile:
        """Return the file `name` of the folder. Error messages say that the name comes from `named_by`.

        Raises ModelLoadError if `name` is not a bare file name, or if the file is missing, is not a regular file, or is
        a link that the class does not allow.
        """
        where = f" (named by {named_by})" if named_by else ""
        if not name or name in (".", "..") or not name.isprintable() or any(sign in name for sign in "/\\:"):
            raise ModelLoadError(f"{shown(name)}{where} is not a bare file name",
                                 f"expected the name of a file directly in {self.path}")
        path = self.path / name
        try:
            target = path.resolve(strict=True) if path.is_symlink() else path
            mode = target.stat().st_mode
        except (OSError, ValueError, RuntimeError) as fault:
            raise ModelLoadError(f"{self.path}: {shown(name)}{where} cannot be opened ({type(fault).__name__})",
                                 "expected a complete checkpoint, which has this file", "copy the file into the folder"
                                 ) from None
        if target.parent not in (self.path, self._blobs):
            raise ModelLoadError(f"{path}{where} is a link that leads out of the folder, to the file {target}",
                                 "expected a link to a file of the folder, or to one in the blobs of the same "
                                 "repository of a Hugging Face cache",
                                 "copy the folder with links followed, for example with cp -rL")
        if not stat.S_ISREG(mode):
            raise ModelLoadError(f"{path}{where} is not a regular file", "expected a regular file")
        return CheckpointFile(path, target)

    @property
    def _blobs(self) -> Path | None:
        """The path of the repository's `blobs`, if this folder is a snapshot in a Hugging Face cache; otherwise None.

        The path has no links, so it can be compared with the resolved target of a link.
        """
        snapshots, repository = self.path.parent, self.path.parent.parent
        is_cached = snapshots.name == "snapshots" and repository.name.startswith("models--")
        return repository / "blobs" if is_cached else None
