"""A checkpoint in any supported format: its configuration and its tensors."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from ..errors import ModelLoadError
from .folder import A_CHECKPOINT, CheckpointFile, CheckpointFolder, existing_path, is_gguf_name
from .gguf_checkpoint import GgufCheckpoint
from .json_file import Fields, read_json_file, shown
from .quantisation_scheme import read_scheme
from .quantised_folder import QuantisedFolderWeights
from .safetensors_source import SafetensorsWeights
from .source import Weights

CONFIG_FILE, GENERATION_CONFIG_FILE = "config.json", "generation_config.json"


class StoredWeights(Weights, Protocol):
    """Weights that are stored in files.

    num_weights   number of elements in all tensors of the files
    stored_types  name of a tensor type in the files, such as "BF16" or "Q4_K" -> number of tensors of this type
    loaded_bytes  size of all tensors in memory
    """

    num_weights: int
    stored_types: Mapping[str, int]
    loaded_bytes: int

    def keeps(self, name: str) -> bool:
        """Whether the matrix `name` is kept in the blocks of the file, see Checkpoint.weights."""
        ...

    def cache_scales(self, name: str) -> tuple[float, float]:
        """See DenseSource."""
        ...

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Close the files. Raises ModelLoadError if a tensor was never requested and its name matches no pattern of
        `harmless`."""
        ...


class Checkpoint(Protocol):
    """The protocol of checkpoints: the files of one model. Every method raises ModelLoadError for a fault in a file.

    path   the path that errors name
    """

    path: Path

    def config(self) -> Fields:
        """Return the configuration, under the field names of Hugging Face's config.json."""
        ...

    def generation_config(self) -> Fields | None:
        """Return the fields of generation_config.json; None if the checkpoint has none."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype, kept_types: Collection[str] = ()) -> StoredWeights:
        """Open the tensor files. Returns the source of tensors on `device` in `dtype`, with Hugging Face's names.

        Matrices whose type is in `kept_types`, such as "Q4_0", keep the blocks of the file if a layer loads them.

        On the device "meta", tensors have only shapes, and all checks run except those of the tensors' values.
        """
        ...


class HuggingFaceFolder:
    """The Checkpoint of a folder with config.json and safetensors files."""

    def __init__(self, path: str | os.PathLike) -> None:
        self._folder = CheckpointFolder(path)
        self.path = self._folder.path

    def config(self) -> Fields:
        if not self._folder.has(CONFIG_FILE):
            self._refuse_a_folder_of_gguf_files()
        return self._read(self._folder.file(CONFIG_FILE))

    def generation_config(self) -> Fields | None:
        if not self._folder.has(GENERATION_CONFIG_FILE):
            return None
        return self._read(self._folder.file(GENERATION_CONFIG_FILE))

    def weights(self, device: torch.device, dtype: torch.dtype, kept_types: Collection[str] = ()
                ) -> SafetensorsWeights:
        scheme = read_scheme(self.config())
        if scheme is None:
            return SafetensorsWeights(self._folder, device, dtype)
        return QuantisedFolderWeights(self._folder, scheme, device, dtype, kept_types)

    def _refuse_a_folder_of_gguf_files(self) -> None:
        try:
            names = sorted(name for name in os.listdir(self.path) if is_gguf_name(name))
        except OSError:
            return
        if names:
            raise ModelLoadError(f"{self.path} has no {CONFIG_FILE}, but {len(names)} GGUF file{'s' * bool(names[1:])}",
                                 A_CHECKPOINT, f"pass the path of the file, such as {shown(names[0])} in that folder")

    @staticmethod
    def _read(file: CheckpointFile) -> Fields:
        return Fields(read_json_file(file.real_path, str(file)), str(file))


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Open the checkpoint at `path`: a folder, or a file whose name ends in .gguf. Raises ModelLoadError."""
    found = existing_path(path)
    if is_gguf_name(found.name) and not found.is_dir():
        return GgufCheckpoint(found)
    return HuggingFaceFolder(found)
