"""LoRA adapters in files: folders as the peft library writes them, and folders of the original's pair of .npy files.

A folder is converted to the tensors `lora_weights` and `lora_config` of a request.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .adapter_values import MODULE_NAMES, locate_projection
from .config import PeftCacheConfig
from .errors import ModelLoadError, type_name
from .layers.context import LayerContext
from .models.implementation import NATIVE
from .models.loading import class_and_spec
from .models.registry import is_shipped
from .weights.adapter_selection import Selection
from .weights.checkpoint import open_checkpoint
from .weights.folder import CheckpointFile, CheckpointFolder
from .weights.json_file import MAX_NUMBER, Fields, read_json_file, shown
from .weights.matrices import Part
from .weights.safetensors_header import ELEMENT_BYTES
from .weights.safetensors_source import TORCH_DTYPES, FileTensor, open_tensors, unsupported_type
from .weights.source import DummyWeights

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PICKLED_FILES = ("adapter_model.bin", "adapter_model.pt")
WEIGHTS_FILE, MODULES_FILE = "model.lora_weights.npy", "model.lora_config.npy"
AN_ADAPTER = f"expected a folder with {CONFIG_FILE} and {TENSOR_FILE}, as peft writes it"
LARGEST_RANK = 1024
LARGEST_TENSOR = 2**34               # bytes of lora_weights, whose rows are padded to the length of the longest one
LARGEST_TASK_ID = 2**64 - 1

# Keys of adapter_config.json that change nothing about what a trained adapter computes: training, and initial values
# that leave the base model as it is.
HARMLESS_KEYS = frozenset((
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying", "eva_config"))
SELECTING_KEYS = frozenset(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"))
# Keys of variants that compute other numbers -> the variant, for the error. Null, false and empty values are accepted.
REFUSED_KEYS = {
    "use_dora": "DoRA scales the weight by a magnitude", "lora_bias": "the adapter has biases",
    "modules_to_save": "whole modules are replaced", "layer_replication": "the model gets other layers",
    "target_parameters": "parameters without a module are adapted", "trainable_token_indices": "embeddings change",
    "alora_invocation_tokens": "an activated LoRA acts on some tokens", "use_qalora": "QALoRA pools the inputs",
    "use_bdlora": "the factors are block-diagonal", "arrow_config": "Arrow routes between adapters",
    "monteclora_config": "Monteclora samples the factors", "kasa_config": "KaSA truncates the weight",
    "velora_config": "VeLoRA has a product of its own", "megatron_config": "the layers are Megatron's",
    "corda_config": "CorDA changes the weight", "lora_ga_config": "LoRA-GA changes the weight",
    "loftq_config": "LoftQ changes the weight"}
# Initial values that leave the weights of the base model as they are.
HARMLESS_INITIAL_VALUES = (True, False, "gaussian", "eva", "orthogonal")

_PREFIX = "base_model.model."
_TENSOR = re.compile(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", re.DOTALL)
_PATTERN = re.compile(r"\^?[\w.\-]+", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterTensors:
    """The tensors of an adapter, as a request takes them.

    lora_weights   [rows, w]: row i has A [D, in], then B [out, D], both flattened, then zeros. Any factor is in B
    lora_config    [rows, 3] int32: row i has module id, layer and rank D
    """

    lora_weights: torch.Tensor
    lora_config: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Projection:
    """A projection as the model's files name it. `sizes` are the numbers of outputs of the modules `ids`."""

    ids: tuple[int, ...]
    layer: int
    in_size: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Factors:
    """The tensors A and B of a projection in the file, and the factor on their product."""

    projection: _Projection
    a: FileTensor
    b: FileTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.stored.shape[0]


def read_peft_folder(adapter_folder: str | os.PathLike[str], model_folder: str | os.PathLike[str]) -> AdapterTensors:
    """Read an adapter that peft wrote for the model of `model_folder`, which is a checkpoint folder or a GGUF file.

    Only adapter_config.json and adapter_model.safetensors are read, and of the model its configuration. The numbers
    are those of the file if they hold the scaled B exactly, otherwise float32.

    Raises ModelLoadError, which names file and field, for a fault in a file, for an option of peft that is not
    supported, and for a key that is not known.
    """
    return _read_peft_folder(_folder(adapter_folder), projections_of(model_folder))


def read_prefetch_folder(folder: str | os.PathLike[str],
                         model_folder: str | os.PathLike[str]) -> Iterator[tuple[int, AdapterTensors]]:
    """Yield task id and tensors of each adapter in `folder`, in ascending order of the ids.

    Each subfolder is named by a task id in decimal digits. It is a peft folder, or has the two files
    model.lora_weights.npy and model.lora_config.npy.

    Raises ModelLoadError, which names file and field. The values in .npy files are not checked: an engine does that
    when it loads them, with a ModelLoadError that names subfolder, tensor and row.
    """
    path = _folder(folder, "expected a folder with one subfolder for each task id").path
    found: dict[int, Path] = {}
    for name in os.listdir(path):
        if not re.fullmatch("0|[1-9][0-9]{0,19}", name, re.ASCII) or int(name) > LARGEST_TASK_ID:
            raise ModelLoadError(f"{path} contains {shown(name)}",
                                 f"expected only subfolders named by task ids, in 0..{LARGEST_TASK_ID}",
                                 "move other files to another folder")
        found[int(name)] = path / name
    projections = projections_of(model_folder)
    for task_id in sorted(found):
        subfolder = _folder(found[task_id], AN_ADAPTER + f", or with {WEIGHTS_FILE} and {MODULES_FILE}")
        if subfolder.has(WEIGHTS_FILE) or subfolder.has(MODULES_FILE):
            yield task_id, AdapterTensors(_array(subfolder.file(WEIGHTS_FILE), "fV"),
                                          _array(subfolder.file(MODULES_FILE), "iu"))
        else:
            yield task_id, _read_peft_folder(subfolder, projections)


def projections_of(model_folder: str | os.PathLike[str]) -> Mapping[str, "_Projection"]:
    """Return the projections that an adapter can change, by their names in the model. No weight is read."""
    checkpoint = open_checkpoint(model_folder)
    model_class, spec, implementation = class_and_spec(checkpoint)
    if implementation != NATIVE or not is_shipped(spec.architecture, model_class):
        raise ModelLoadError(f"{checkpoint.path} is computed by {model_class.__name__}",
                             "expected a model class of this package, whose projections have known names",
                             "send lora_weights and lora_config with the requests")
    port, device = _Projections(), torch.device("meta")
    with torch.inference_mode():
        model_class(spec, _Shapes(0, device, torch.float32),
                    LayerContext(device=device, dtype=torch.float32, adapters=port))
    return port.found


def cache_for(model_folder: str | os.PathLike[str], largest_rank: int, on_device: int = 0, on_host: int = 0
              ) -> PeftCacheConfig:
    """Return caches with room for so many adapters of the largest rank; 0: the default sizes, which are bytes.

    Raises the errors of `projections_of`.
    """
    size = largest_rank * sum(len(one.ids) for one in projections_of(model_folder).values())
    return PeftCacheConfig(max_adapter_size=largest_rank, num_device_module_layer=on_device * size,
                           num_host_module_layer=on_host * size)


def dummy_adapter(model_folder: str | os.PathLike[str], rank: int, seed: int) -> AdapterTensors:
    """Return an adapter of all projections with small random numbers, in bfloat16, as a load for a benchmark."""
    rows = [(module, one.layer, one.in_size + size) for one in projections_of(model_folder).values()
            for module, size in zip(one.ids, one.sizes)]
    weights = torch.empty((len(rows), rank * max(size for *_, size in rows)), dtype=torch.bfloat16, device="cpu")
    weights.uniform_(-0.02, 0.02, generator=torch.Generator("cpu").manual_seed(seed))
    return AdapterTensors(weights, torch.tensor([(module, layer, rank) for module, layer, _ in rows],
                                                dtype=torch.int32, device="cpu"))


class _Projections:
    """The AdapterPort that notes which projections a model has."""

    def __init__(self) -> None:
        self.found: dict[str, _Projection] = {}

    def of(self, names: Sequence[str], in_size: int, sizes: Sequence[int], **how_stored: Any) -> None:
        groups = [tuple(sizes)] if len(names) == 1 else [(size,) for size in sizes]
        for name, group in zip(names, groups, strict=True):
            if (located := locate_projection(name)) is not None:
                layer, modules = located
                outputs = group if len(modules) == len(group) else (sum(group),)
                self.found[name] = _Projection(tuple(map(MODULE_NAMES.index, modules)), layer, in_size, outputs)

    def plan(self, step: Any) -> None:
        return None

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        pass


class _Shapes(DummyWeights):
    """Weights that have shapes only, on the device "meta"."""

    def _load(self, target: torch.Tensor, stored_name: str, part: Part) -> None:
        pass


# ---------------------------------------------------------------------- folders


def _folder(path: str | os.PathLike[str], expected: str = AN_ADAPTER) -> CheckpointFolder:
    try:
        given = os.fsdecode(path)
    except Exception as fault:                      # an os.PathLike of the user's can raise anything, in its repr too
        raise ModelLoadError(f"the adapter's folder is of type {type_name(path)}, which is not a path "
                             f"({type_name(fault)})", expected) from None
    try:
        is_folder = given != "" and Path(given).is_dir()
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise ModelLoadError(f"{given!r} is not a folder", expected, "pass the path of an existing folder")
    return CheckpointFolder(given)


def _array(file: CheckpointFile, kinds: str) -> torch.Tensor:
    """Read a .npy file with numbers of one of the dtype kinds. Records of two bytes are bfloat16, as in the original.

    A mapped array is checked against the size of its file before memory is taken, and objects are never read.
    """
    try:
        found = np.array(np.lib.format.open_memmap(file.real_path, mode="r"))
    except Exception as fault:                      # numpy parses the header and raises errors of many types
        raise ModelLoadError(f"{file} is not a .npy file of numbers ({type_name(fault)}: {str(fault)[:200]})",
                             "expected an array that numpy.save wrote", "write the file again") from None
    if found.dtype == np.dtype("V2") and "V" in kinds:
        return torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    if found.dtype.kind not in kinds or found.dtype.kind == "V" or found.dtype.itemsize > 8:
        raise ModelLoadError(f"{file} holds values of dtype {found.dtype}",
                             "expected " + ("integers" if "i" in kinds else "float32, float16 or bfloat16 numbers"),
                             "convert the array")
    found = found.astype(found.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(found.astype(np.int64) if "i" in kinds else found)


# ---------------------------------------------------------------------- peft


def _read_peft_folder(folder: CheckpointFolder, projections: Mapping[str, _Projection]) -> AdapterTensors:
    config = _read_config(folder)
    factors = _read_factors(folder, config, projections)
    dtype = _common_dtype(factors)
    width = max(one.rank * (one.projection.in_size + size) for one in factors for size in one.projection.sizes)
    num_rows = sum(len(one.projection.ids) for one in factors)
    if num_rows * width * 4 > LARGEST_TENSOR:
        raise ModelLoadError(f"{folder.path / TENSOR_FILE}: the adapter takes {num_rows:,} rows of {width:,} numbers",
                             f"expected at most {LARGEST_TENSOR:,} bytes", "use smaller ranks")
    weights = torch.zeros(num_rows, width, dtype=dtype, device="cpu")
    rows, modules = iter(weights), list[tuple[int, int, int]]()
    for one in sorted(factors, key=lambda one: (one.projection.layer, one.projection.ids)):
        a, b = _checked(one.a, 1.0), _checked(one.b, one.scale)
        if dtype is not torch.float32 and not torch.equal(b.to(dtype).float(), b):
            weights, dtype = weights.float(), torch.float32
            rows = iter(weights[len(modules) :])
        for module, part in zip(one.projection.ids, b.split(one.projection.sizes)):
            row = next(rows)
            row[: a.numel()] = a.flatten()
            row[a.numel() : a.numel() + part.numel()] = part.flatten()
            modules.append((module, one.projection.layer, one.rank))
    return AdapterTensors(weights, torch.tensor(modules, dtype=torch.int32, device="cpu"))


def _read_config(folder: CheckpointFolder) -> Fields:
    """Read adapter_config.json, and refuse every key that could change what the adapter computes."""
    for name, other in ((CONFIG_FILE, ""), (TENSOR_FILE, next(filter(folder.has, PICKLED_FILES), ""))):
        if not folder.has(name):
            but = f", but {other}, which is pickled" if other else ""
            raise ModelLoadError(f"{folder.path} has no {name}{but}", AN_ADAPTER,
                                 "save the adapter with save_pretrained(folder, safe_serialization=True)")
    file = folder.file(CONFIG_FILE)
    config = Fields(read_json_file(file.real_path, str(file)), str(file))
    if config.text("peft_type") != "LORA":
        raise config.fault("peft_type", "'LORA'", "use an adapter of this type")
    for name, why in REFUSED_KEYS.items():
        if config.values.get(name) not in (None, False, {}, []):
            raise config.fault(name, f"no value, because it is not supported that {why}", "use a plain LoRA adapter")
    if config.text("bias", "none") != "none":
        raise config.fault("bias", "'none', because biases of the base model would change", "use a plain LoRA adapter")
    initial = config.values.get("init_lora_weights", True)
    if initial is not None and not any(type(initial) is type(known) and initial == known
                                       for known in HARMLESS_INITIAL_VALUES):
        raise config.fault("init_lora_weights", "true, false, 'gaussian', 'eva' or 'orthogonal', because other "
                           "initial values change the weights of the base model", "convert the adapter with peft: "
                           "save_pretrained(path_initial_model_for_weight_conversion=...)")
    config.count("r", maximum=LARGEST_RANK)
    config.number("lora_alpha", minimum=-MAX_NUMBER)
    config.flag("use_rslora", False)
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.fields(name, Fields({}, config.where))
        for pattern in patterns.values:
            if not _PATTERN.fullmatch(pattern):
                raise ModelLoadError(f"{patterns.where} has the key {shown(pattern)}",
                                     "expected the path of a module or its end, with ^ before a whole path, because "
                                     "other regular expressions are not read from files", "write each module's path")
            if name == "rank_pattern":
                patterns.count(pattern, maximum=LARGEST_RANK)
            else:
                patterns.number(pattern, minimum=-MAX_NUMBER)
    known = HARMLESS_KEYS | SELECTING_KEYS | REFUSED_KEYS.keys() | config.asked_for | {"init_lora_weights"}
    for name in config.values:
        if name not in known:
            raise ModelLoadError(f"{file} has the key {shown(name)}", "expected only keys that are known to change "
                                 "nothing, or that are read", "remove the key if it changes nothing")
    return config


def _read_factors(folder: CheckpointFolder, config: Fields, projections: Mapping[str, _Projection]) -> list[_Factors]:
    tensors = open_tensors(folder.file(TENSOR_FILE))
    path = folder.path / TENSOR_FILE
    pairs: dict[str, dict[str, FileTensor]] = {}
    selection = Selection(config)
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None or match[1] not in projections:
            raise ModelLoadError(f"{path} contains tensor {shown(name)}", _what_is_wrong(name, match is not None),
                                 "train the adapter on projections of attention and MLP only")
        if match[1] not in pairs:
            selection.check(match[1], name)
        pairs.setdefault(match[1], {})[match[2]] = tensor
    if not pairs:
        raise ModelLoadError(f"{path} has no tensors", "expected the factors of at least one projection",
                             "save the adapter again")
    return [_factors(path, config, module, pair, projections[module]) for module, pair in pairs.items()]


def _what_is_wrong(name: str, is_factor: bool) -> str:
    if "lora_magnitude_vector" in name:
        return "expected no magnitudes, because DoRA is not supported"
    if ".lora_embedding_" in name or is_factor and re.search(r"(lm_head|embed_out|embed_tokens|wte)\.lora_", name):
        return "expected no adapters on embeddings or on the head, which are not supported"
    if re.search(r"\.lora_[AB]\.bias$", name):
        return "expected no biases, because lora_bias is not supported"
    if is_factor:
        return "expected factors of projections that this model has, under the names of its own files"
    return f"expected the names {_PREFIX}MODULE.lora_A.weight and {_PREFIX}MODULE.lora_B.weight"


def _factors(path: Path, config: Fields, module: str, pair: Mapping[str, FileTensor],
             projection: _Projection) -> _Factors:
    if len(pair) == 1:
        (letter, tensor), = pair.items()
        raise ModelLoadError(f"{path} has tensor {shown(tensor.name)} without lora_{'BA'[letter == 'B']}",
                             "expected both factors of a module", "save the adapter again")
    a, b = pair["A"], pair["B"]
    rank = _of_module(config, "rank_pattern", "r", module)
    for tensor, shape in ((a, (rank, projection.in_size)), (b, (sum(projection.sizes), rank))):
        if tensor.stored.shape != shape:
            raise ModelLoadError(f"{path}: tensor {shown(tensor.name)} has shape {shown(list(tensor.stored.shape))}",
                                 f"expected {list(shape)}, by {CONFIG_FILE} and the model",
                                 "check r and rank_pattern, and that the adapter belongs to this model")
        if tensor.stored.dtype not in ELEMENT_BYTES:
            raise unsupported_type(path, tensor.name, tensor.stored.dtype)
    alpha = _of_module(config, "alpha_pattern", "lora_alpha", module)
    return _Factors(projection, a, b, alpha / (rank**0.5 if config.flag("use_rslora", False) else rank))


def _of_module(config: Fields, pattern_name: str, name: str, module: str) -> Any:
    """Return the number for a module: that of the first pattern that matches its path, as in peft; else the common one.

    A pattern has only word characters, dots and hyphens, so the expression is matched in linear time.
    """
    patterns = config.fields(pattern_name, Fields({}, config.where))
    return next((value for pattern, value in patterns.values.items() if re.match(rf"(.*\.)?({pattern})$", module)),
                config.values[name])


def _common_dtype(factors: Sequence[_Factors]) -> torch.dtype:
    """Return the dtype of all tensors in the file if it is only one, otherwise float32."""
    types = {TORCH_DTYPES[tensor.stored.dtype] for one in factors for tensor in (one.a, one.b)}
    return types.pop() if len(types) == 1 else torch.float32


def _checked(tensor: FileTensor, scale: float) -> torch.Tensor:
    """Read a tensor in float32, with the factor applied. Raises ModelLoadError unless the values are finite."""
    values = tensor.read().float()
    if scale != 1.0:
        values = values * scale
    if not torch.isfinite(values).all():
        scaled = "" if scale == 1.0 else f" after multiplication by {scale:g}"
        raise ModelLoadError(f"{tensor.path}: tensor {shown(tensor.name)} has a value that is not finite{scaled}",
                             "expected finite numbers", "train the adapter again")
    return values
