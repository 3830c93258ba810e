"""A checkpoint folder: the one place that turns names into files.

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

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A regular file of a checkpoint.

    path        in the folder, as errors name it
    real_path   with links followed, as it is opened: to point a link elsewhere later changes nothing
    """

    path: Path
    real_path: Path

    def __str__(self) -> str:
        return str(self.path)


class CheckpointFolder:
    """Files directly inside one folder, by bare name.

    A link is followed to a file of the folder, and from a snapshot of a Hugging Face cache to one of the same
    repository's `blobs`. Any other link is refused, and so is a name that leads out of the folder.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        try:
            given = os.fsdecode(path)
        except Exception as fault:                  # of an os.PathLike of the user's too, whose repr may raise as well
            raise ModelLoadError(f"model_path is a {type_name(path)} that is no path ({type_name(fault)})",
                                 "a folder with config.json and *.safetensors files") from None
        if not given:                               # the working directory, to pathlib
            raise ModelLoadError("model_path is empty", "a folder with config.json and *.safetensors files",
                                 'pass its path, "." for the working directory')
        try:
            self.path = Path(given).resolve(strict=True)
        except (OSError, ValueError, RuntimeError) as fault:
            way_out = ["pass the path of one that is there"]
            if HUB_NAME.fullmatch(given):
                way_out = [f"it looks like a name on the Hugging Face hub, from which nothing is downloaded here: `hf "
                           f"download {given}` prints the folder to pass"]
            raise ModelLoadError(f"the model folder {given!r} cannot be opened ({fault})",
                                 "a folder with config.json and *.safetensors files", *way_out) from None
        if not self.path.is_dir():
            raise ModelLoadError(f"{self.path} is not a folder",
                                 "a folder with config.json and *.safetensors files", "pass the folder, not a file")

    def has(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def file(self, name: str, named_by: str = "") -> CheckpointFile:
        """A regular file of the folder. `named_by` says, for the message, where the name came from.

        Raises ModelLoadError.
        """
        where = f" (named by {named_by})" if named_by else ""
        if not name or name in (".", "..") or not name.isprintable() or any(sign in name for sign in "/\\:"):
            raise ModelLoadError(f"{shown(name)}{where} is not the bare name of a file",
                                 f"files stand directly in {self.path}")
        path = self.path / name
        try:
            target = path.resolve(strict=True) if path.is_symlink() else path
            mode = target.stat().st_mode
        except (OSError, ValueError, RuntimeError) as fault:
            raise ModelLoadError(f"{self.path}: {shown(name)}{where} cannot be opened ({type(fault).__name__})",
                                 "a complete checkpoint has this file", "copy it into the folder") from None
        if target.parent not in (self.path, self._blobs):
            raise ModelLoadError(f"{path}{where} is a link that leads out of the folder, to {target}",
                                 "every file of a checkpoint stands in its folder itself, or in blobs of the same "
                                 "repository of a Hugging Face cache",
                                 "copy the folder with links followed, for example with cp -rL")
        if not stat.S_ISREG(mode):
            raise ModelLoadError(f"{path}{where} is not a regular file")
        return CheckpointFile(path, target)

    @property
    def _blobs(self) -> Path | None:
        """Where the files of a snapshot of a Hugging Face cache lie; None where the folder is none.

        No link leads to it or is passed on the way: `path` is resolved, and so is what is compared with it.
        """
        snapshots, repository = self.path.parent, self.path.parent.parent
        is_cached = snapshots.name == "snapshots" and repository.name.startswith("models--")
        return repository / "blobs" if is_cached else None
