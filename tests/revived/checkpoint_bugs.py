"""Bugs of checkpoint loaders, reintroduced: bugs of this engine that the fuzzer found, and bugs of other loaders.

Each bug is a function that gets pytest's `monkeypatch` and breaks the engine. The test runs seeds of the checkpoint
fuzzer until one finds a violation.
"""

import json
from collections.abc import Callable

import torch

from batch_manager.errors import BatchManagerError, ModelLoadError
from batch_manager.weights import folder, json_file, safetensors_header, safetensors_source
from batch_manager.weights.folder import CheckpointFile, CheckpointFolder
from batch_manager.weights.json_file import Fields
from batch_manager.weights.safetensors_header import StoredTensor
from batch_manager.weights.safetensors_source import FileTensor, SafetensorsWeights


def a_message_takes_over_what_the_file_says(patch) -> None:
    patch.setattr(ModelLoadError, "__init__", BatchManagerError.__init__)
    patch.setattr(json_file, "_name", lambda name: name)


def a_message_is_as_long_as_the_file(patch) -> None:
    for module in (json_file, folder, safetensors_header, safetensors_source):
        patch.setattr(module, "shown", repr)


def a_number_may_be_of_any_size(patch) -> None:
    patch.setattr(json_file, "MAX_NUMBER", 1e308)
    number = Fields.number
    patch.setattr(Fields, "number",
                  lambda self, name, *default, minimum=0.0: number(self, name, *default, minimum=-1e308))


def a_bool_is_a_number(patch) -> None:
    def get(self, name, default, is_good, expectation, bools=False):
        value = self.values.get(name)
        if value is None and default is not Fields._REQUIRED:
            return default
        if not is_good(value):
            raise self.fault(name, expectation)
        return value
    patch.setattr(Fields, "_get", get)


def the_last_of_two_keys_counts(patch) -> None:
    patch.setattr(json_file, "_without_duplicates", dict)


def the_library_alone_looks_at_the_header(patch) -> None:
    def read_header(file):
        with safetensors_source.safe_open(file.real_path, framework="pt", device="cpu") as reader:
            views = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118
            return {name: StoredTensor(view.get_dtype(), tuple(view.get_shape()), 0, 0) for name, view in views.items()}
    patch.setattr(safetensors_source, "read_header", read_header)


def the_places_of_tensors_are_not_compared(patch) -> None:
    """The loader does not refuse overlapping tensors. The safetensors library does, but does not name the tensors."""
    patch.setattr(safetensors_header, "_check_ranges", lambda path, tensors, data_bytes: None)


def a_link_may_lead_anywhere(patch) -> None:
    patch.setattr(CheckpointFolder, "file", lambda self, name, named_by="": CheckpointFile(
        self.path / name, (self.path / name).resolve()))


def a_pipe_is_opened(patch) -> None:
    """The loader opens a pipe. The open would block for ever, so the patch raises an exception."""
    real = CheckpointFolder.file

    def file(self, name, named_by=""):
        if (self.path / name).is_fifo():
            raise RuntimeError("this would hang")
        return real(self, name, named_by)
    patch.setattr(CheckpointFolder, "file", file)


def what_the_model_does_not_ask_for_is_overlooked(patch) -> None:
    patch.setattr(SafetensorsWeights, "finish", lambda self, harmless=(): self._tensors.clear())


def index_and_shards_need_not_agree(patch) -> None:
    def open_shards(self, index: CheckpointFile) -> None:
        for shard in dict.fromkeys(json.loads(index.real_path.read_bytes())["weight_map"].values()):
            self._open(self.folder.file(shard, named_by=str(index)))
    patch.setattr(SafetensorsWeights, "_open_shards", open_shards)


def a_tied_head_is_not_compared(patch) -> None:
    patch.setattr(SafetensorsWeights, "tied", lambda self, name, to: self._used.add(name))


def numbers_of_sixteen_bits_are_all_of_one_kind(patch) -> None:
    real = FileTensor.read

    def read(self, index=None):
        tensor = real(self, index)
        return tensor.view(torch.float16) if tensor.dtype == torch.bfloat16 else tensor
    patch.setattr(FileTensor, "read", read)


def a_file_that_is_no_safetensors_file_is_unpickled(patch) -> None:
    real = SafetensorsWeights._open

    def open_file(self, file: CheckpointFile) -> None:
        try:
            real(self, file)
        except ModelLoadError:
            import pickle

            if file.real_path.read_bytes()[:1] == b"\x80":
                pickle.loads(file.real_path.read_bytes())
            raise
    patch.setattr(SafetensorsWeights, "_open", open_file)


CHECKPOINT_BUGS: list[Callable] = [
    a_message_takes_over_what_the_file_says, a_message_is_as_long_as_the_file, a_number_may_be_of_any_size,
    a_bool_is_a_number, the_last_of_two_keys_counts, the_library_alone_looks_at_the_header,
    the_places_of_tensors_are_not_compared, a_link_may_lead_anywhere, a_pipe_is_opened,
    what_the_model_does_not_ask_for_is_overlooked, index_and_shards_need_not_agree, a_tied_head_is_not_compared,
    numbers_of_sixteen_bits_are_all_of_one_kind, a_file_that_is_no_safetensors_file_is_unpickled,
]
