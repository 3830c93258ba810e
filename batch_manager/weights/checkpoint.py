"""A checkpoint, whatever files it is made of: its configuration and its tensors."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from .folder import CheckpointFile, CheckpointFolder
from .json_file import Fields, read_json_file
from .safetensors_source import SafetensorsWeights
from .source import Weights

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"


class StoredWeights(Weights, Protocol):
    """Tensors that files hold.

    num_weights   numbers in all tensors that the files say they hold
    """

    num_weights: int

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Close the files. Raises ModelLoadError when a tensor was not asked for and its name matches no pattern of
        `harmless`."""
        ...


class Checkpoint(Protocol):
    """What a model is loaded from. Every fault that a method finds in a file is a ModelLoadError.

    path   as errors name the checkpoint
    """

    path: Path

    def config(self) -> Fields:
        """The configuration, by the names of Hugging Face's config.json."""
        ...

    def generation_config(self) -> Fields | None:
        """What generation_config.json has; None where there is none."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype) -> StoredWeights:
        """Open the files with the tensors. Their names are those of Hugging Face's checkpoints."""
        ...


class HuggingFaceFolder:
    """A folder with config.json and safetensors files."""

    def __init__(self, path: str | os.PathLike) -> None:
        self._folder = CheckpointFolder(path)
        self.path = self._folder.path

    def config(self) -> Fields:
        return self._read(self._folder.file(CONFIG_FILE))

    def generation_config(self) -> Fields | None:
        if not self._folder.has(GENERATION_CONFIG_FILE):
            return None
        return self._read(self._folder.file(GENERATION_CONFIG_FILE))

    def weights(self, device: torch.device, dtype: torch.dtype) -> SafetensorsWeights:
        return SafetensorsWeights(self._folder, device, dtype)

    @staticmethod
    def _read(file: CheckpointFile) -> Fields:
        return Fields(read_json_file(file.real_path, str(file)), str(file))


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """The checkpoint at `path`. Raises ModelLoadError."""
    return HuggingFaceFolder(path)
