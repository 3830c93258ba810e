"""Loads a checkpoint with the model class of its architecture."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ..config import DTYPES, LOAD_FORMATS, MODEL_IMPLEMENTATIONS
from ..contained_log import log
from ..errors import ConfigError, InsufficientMemoryError, ModelLoadError, UnsupportedModelError, printable
from ..layers.context import ONE_PROCESS, AdapterPort, LayerContext, Split
from ..layers.weight_form import quantised_bytes, types_kept
from ..triton_kernels.cpu.native.library import CannotCompileError, load_library
from ..weights.checkpoint import GENERATION_CONFIG_FILE, Checkpoint, StoredWeights, open_checkpoint
from ..weights.file_keys import unread
from ..weights.json_file import Fields, shown
from ..weights.quantisation_scheme import read_scheme
from ..weights.source import DummyWeights, Weights
from .class_check import refuse_wrong_spec
from .decoder import WHOLE, Decoder, Stage
from .end_ids import in_vocabulary, stated_end_ids
from .implementation import NATIVE, TRANSFORMERS, choose_implementation, load_transformers_class
from .registry import Model, causal_class_of, find_model, is_shipped, known_architectures, model_type_of
from .spec import ModelSpec
from .spec_reading import check_spec, refuse_code, refuse_unread_fields

PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISED_PRODUCTS = ("expected compiled steps on a CPU, or a GPU with triton, whose products alone read quantised "
                      "weights")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights on a device, ready to run.

    weight_bytes     total size of the weights and of the copies of weights that layers keep for speed
    end_ids          tokens of the vocabulary that end a sequence, from the checkpoint
    implementation   "native" or "transformers", as for `load_model`
    quantized_activations   as for `load_model`
    """

    spec: ModelSpec
    model: Model
    weight_bytes: int
    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    end_ids: tuple[int, ...] = ()
    implementation: str = NATIVE
    quantized_activations: str | None = None


def read_spec(path: str | os.PathLike, model_implementation: str = "auto") -> ModelSpec:
    """Read the spec of the checkpoint at `path` from its config.json or its GGUF metadata; no weights are loaded.

    model_implementation   as for `load_model`
    """
    return class_and_spec(open_checkpoint(path), model_implementation)[1]


def load_model(path: str | os.PathLike, *, device: torch.device | str, dtype: torch.dtype | str = "auto",
               load_format: str = "auto", seed: int = 0, deterministic: bool = False, compiled_step: bool = False,
               free_bytes: int | None = None, model_implementation: str = "auto", stage: Stage = WHOLE,
               split: Split = ONE_PROCESS, adapters: AdapterPort | None = None, quantization: str | None = None,
               quantized_activations: str | None = None) -> LoadedModel:
    """Load the model of the checkpoint at `path`, a stage of it, or the share of one process.

    dtype           a torch dtype or its name; "auto": on a GPU the checkpoint's dtype, or float32 if it
                    states none; on a CPU float32
    load_format     "auto": safetensors or GGUF; "dummy": random weights from `seed`, which need only config.json
    deterministic   make a row's bits depend on that row only; ConfigError if the model class does not support this
    compiled_step   on a CPU: store matrices in the layout of the compiled step, see triton_kernels/cpu/native
    free_bytes      free device memory; larger weights are refused before any allocation. None: no check
    model_implementation   "native": a class of this package, or a registered one; "transformers": transformers' own
                           class with the engine's attention; "auto": "native" if there is such a class for the
                           architecture and model type
    stage           the layers to load; ConfigError if the model class has no stages. `LoadedModel.spec` is that of the
                    stage
    split           the processes that share the model; ConfigError if it cannot be divided by their number. Each loads
                    its share, and `LoadedModel.spec` is that of the share
    adapters        the port that `Linear` layers ask for their adapters; None: no adapters
    quantization    "int8" or "int4": quantise the matrices of `Linear` layers, for compiled steps or Triton kernels;
                    ConfigError without them, or if the files are quantised. None: as they are stored
    quantized_activations   "int8": products with quantised matrices round their input to 8 bits; ConfigError without
                            `compiled_step`, or if no matrix is quantised. None: they do not
    Raises                 ConfigError for a wrong argument; ModelLoadError, which names file and field;
                           UnsupportedModelError; InsufficientMemoryError
    """
    device = torch.device(device)
    if model_implementation not in MODEL_IMPLEMENTATIONS:
        raise ConfigError(f"model_implementation is {model_implementation!r}",
                          f"expected one of {', '.join(MODEL_IMPLEMENTATIONS)}", "leave it out for auto")
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}", f"expected one of {', '.join(LOAD_FORMATS)}",
                          "leave it out to load the checkpoint's tensors")
    checkpoint = open_checkpoint(path)
    model_class, spec, implementation = class_and_spec(checkpoint, model_implementation)
    end_ids = _usable_end_ids(checkpoint, spec.vocab_size)
    dtype = resolve_dtype(dtype, spec, device)
    if split.size > 1 and not is_shipped(spec.architecture, model_class):
        raise ConfigError(f"the model is split over {split.size} processes, and its class is {model_class.__name__}",
                          "expected a model class of this package", "use one process")
    spec = spec.share(split)
    if deterministic and implementation == TRANSFORMERS:
        raise ConfigError(f"deterministic is True, but the transformers library computes {spec.architecture}",
                          "expected a model class of this package", "leave deterministic out")
    if deterministic and not getattr(model_class, "deterministic", False):
        raise ConfigError(f"deterministic is True, and the model class is {model_class.__name__}, which does not "
                          "support it",
                          "expected a class with deterministic = True, which computes only with layers of "
                          "batch_manager.layers, attention, and element-wise sums and products between them",
                          "set deterministic = True in the class if it computes only with these, or leave the option "
                          "out")
    if stage != WHOLE and not getattr(model_class, "has_stages", False):
        raise ConfigError(f"stage {stage.index} of {stage.count} is wanted, and the model class is "
                          f"{model_class.__name__}, which has no stages", "expected a class with has_stages = True",
                          "load the whole model")
    # `local.num_weights` is an upper bound: it has the tables of tokens and positions, also on stages without them.
    local = spec if stage == WHOLE else stage.part_of(spec, model_class.per_layer)

    def make(weights: Weights) -> Model:
        return model_class(spec, weights, context, *(() if stage == WHOLE else (stage,)))

    context = LayerContext(device=device, dtype=dtype, deterministic=deterministic, compiled_step=compiled_step,
                           quantization=quantization, quantized_activations=quantized_activations, split=split,
                           kv_copies=spec.kv_copies, adapters=adapters)
    # A class of someone else's may ask for tensors one by one, which are converted.
    is_own = implementation == NATIVE and is_shipped(spec.architecture, model_class)
    kept = types_kept(context) if is_own else ()
    refuse_to_quantise(context, checkpoint if load_format == "auto" else None, implementation, kept)
    try:
        with torch.inference_mode():
            if load_format == "dummy":
                refuse_too_many_weights(_most_bytes(local, dtype, quantization), checkpoint, device, dtype, free_bytes)
                weights = DummyWeights(seed, device, dtype)
                model = make(weights)
            else:
                weights = checkpoint.weights(device, dtype, kept)
                # A tensor is allocated only if the configuration and the files both have it, so the smaller number
                # bounds the memory. Differences between them are refused below, with the tensor's name.
                refuse_too_many_weights(min(_most_bytes(local, dtype, quantization), weights.loaded_bytes), checkpoint,
                                        device, dtype, free_bytes)
                model = make(weights)
                if is_own:
                    local = _with_cache_scales(local, weights, model_class, stage.layers_of(spec.num_layers))
                if stage == WHOLE:
                    weights.finish(model.harmless_tensors)
                else:                                  # the stage did not request the tensors of other stages
                    check_tensors(checkpoint, model_class, spec, dtype, split)
            return LoadedModel(local, model, weights.num_bytes, device, dtype, deterministic, end_ids, implementation,
                               quantized_activations)
    except CannotCompileError as error:                # of one type of blocks; the library of the step is there
        raise ModelLoadError(f"the products with quantised weights of {checkpoint.path} are not there: {error}",
                             "expected a C compiler, or its results in the cache",
                             "install one, or set cpu_compile=False and leave quantization and quantized_activations "
                             "out: then the weights are decoded") from error
    except (MemoryError, RuntimeError) as fault:
        if not isinstance(fault, MemoryError) and "allocate" not in str(fault):
            raise
        raise InsufficientMemoryError(
            f"the weights of {checkpoint.path} in {dtype} do not fit into the memory of {device}",
            "expected enough memory for all weights", "use a smaller dtype or a larger device") from fault


def _with_cache_scales(spec: ModelSpec, weights: StoredWeights, model_class: type[Decoder], layers: Sequence[int]
                       ) -> ModelSpec:
    """Return the spec of these layers with the scales of keys and values in FP8 that the files have."""
    scales = [weights.cache_scales(f"{model_class.names.layers}.{number}.self_attn") for number in layers]
    return replace(spec, attention=tuple(replace(layer, key_scale=key, value_scale=value)
                                         for layer, (key, value) in zip(spec.attention, scales, strict=True)))


def refuse_to_quantise(context: LayerContext, checkpoint: Checkpoint | None, implementation: str,
                       kept: Collection[str]) -> None:
    """Raise ConfigError if matrices, or what they are multiplied with, cannot be quantised as `context` says.

    checkpoint   None for random weights
    kept         types of quantised blocks that the model keeps
    """
    name = "quantization"                              # kernels never round what they multiply
    if context.quantization is None or context.quantized_activations is not None and not context.compiled_step:
        name = "quantized_activations"
    fact, reason, way_out = f"{name} is {getattr(context, name)!r}", "", f"leave {name} out"
    if getattr(context, name) is None:
        return
    if not types_kept(context) or name == "quantized_activations" and not context.compiled_step:
        reason = f"steps are not compiled, on {context.device} in {context.dtype}".replace("torch.", "")
    elif context.quantization is not None and (lacks := _without_compiled_code()):
        reason = f"compiled code chooses the levels, and {lacks}"
    elif implementation == TRANSFORMERS:
        reason = "the transformers library computes the model"
    if reason:
        raise ConfigError(f"{fact}, but {reason}", QUANTISED_PRODUCTS, way_out)
    found: list[str] = []
    if checkpoint is not None:
        source = checkpoint.weights(torch.device("meta"), context.dtype)
        found = [kind for kind in source.stored_types if kind not in PLAIN_TYPES]
        with suppress(ModelLoadError):                 # closes the files; it raises because no tensor was requested
            source.finish()
        if found and context.quantization is not None:
            raise ConfigError(f"{fact}, and {checkpoint.path} has tensors of type {', '.join(map(shown, found))}",
                              f"expected weights in {', '.join(PLAIN_TYPES[:-1])} and {PLAIN_TYPES[-1]}", way_out)
    if context.quantization is None and not any(kind in kept for kind in found):
        of = "of random numbers" if checkpoint is None else f"of {checkpoint.path}"
        raise ConfigError(f"{fact}, and no weights {of} are kept quantised",
                          "expected quantised weights, whose products alone round what they multiply",
                          f"set quantization, or {way_out}")


def _without_compiled_code() -> str:
    """Return why there is no compiled code; "": there is."""
    try:
        load_library()
    except CannotCompileError as error:
        return str(error)
    return ""


def _most_bytes(spec: ModelSpec, dtype: torch.dtype, quantization: str | None) -> int:
    """Return about the largest size that the weights take."""
    if quantization is None:
        return spec.num_weights * dtype.itemsize
    tables = min(spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2), spec.num_weights)
    return tables * dtype.itemsize + quantised_bytes(quantization, spec.num_weights - tables)


def _usable_end_ids(checkpoint: Checkpoint, vocab_size: int) -> tuple[int, ...]:
    """Return the checkpoint's end ids that are in the vocabulary. Logs a warning if there are others.

    Also logs the keys of generation_config.json that are not read, such as temperature.
    """
    generation = checkpoint.generation_config()
    if generation is not None and (keys := unread(GENERATION_CONFIG_FILE, generation.values)):
        log.info("%s: these keys of %s are not applied; expected sampling parameters in each request: %s",
                 checkpoint.path, GENERATION_CONFIG_FILE, printable(", ".join(keys)))
    stated = stated_end_ids(checkpoint)
    usable = in_vocabulary(stated, vocab_size)
    dropped = [token for token in stated if token not in usable]
    if dropped:
        log.warning("%s: eos_token_id has %s, outside the vocabulary of %s; expected ids in 0..%s; the engine leaves "
                    "them out", checkpoint.path, shown(dropped), f"{vocab_size:,}", f"{vocab_size - 1:,}")
    return usable


def check_tensors(checkpoint: Checkpoint, model_class: type[Model], spec: ModelSpec, dtype: torch.dtype,
                  split: Split = ONE_PROCESS, quantization: str | None = None) -> int:
    """Check the names and shapes of a checkpoint's tensors against the model, without reading the tensors. Return the
    size of the weights in bytes.

    spec, split    the spec of the share, and the processes that share the model
    quantization   count the matrices of layers as if they were quantised, all of them

    Raises the ModelLoadError that `load_model` would raise. Tied tensors are not compared. `model_class` must be a
    class of this package, because the constructors of other classes may need the values of tensors.
    """
    device = torch.device("meta")
    context = LayerContext(device=device, dtype=dtype, split=split, kv_copies=spec.kv_copies, quantization=quantization)
    with torch.inference_mode():
        weights = checkpoint.weights(device, dtype)
        model = model_class(spec, weights, context)
        _with_cache_scales(spec, weights, model_class, range(spec.num_layers))
        weights.finish(model.harmless_tensors)
    return weights.num_bytes


def refuse_too_many_weights(num_bytes: int, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype,
                           free_bytes: int | None) -> None:
    """Raise InsufficientMemoryError if weights of `num_bytes` bytes take more than `free_bytes`.

    free_bytes   free memory of `device`; None: no check

    The operating system provides the pages of a large allocation only when they are written. An allocation that is too
    large can therefore succeed, and the system would kill the process later, during loading.
    """
    if free_bytes is not None and num_bytes > free_bytes:
        raise InsufficientMemoryError(
            f"the weights of {checkpoint.path} in {dtype} do not fit into the memory of {device}: they take "
            f"{num_bytes:,} bytes", f"expected at most {free_bytes:,} bytes, which are free",
            "use a smaller dtype or a larger device")


def class_and_spec(checkpoint: Checkpoint, model_implementation: str = "auto") -> tuple[type[Model], ModelSpec, str]:
    """Return (model class of the checkpoint, spec, "native" or "transformers"). Raises the errors of `load_model`."""
    config = checkpoint.config()
    names = config.texts("architectures", [None])
    name = causal_class_of(names[0], config.text("model_type", "")) if len(names) == 1 else None
    if name is None:
        config.texts("architectures")                  # raises if the field is missing
        raise config.fault("architectures", "a list with one name")
    implementation = choose_implementation(config, name, model_implementation)
    if implementation == NATIVE:
        return *_read_native_spec(config, name), implementation
    model_class = load_transformers_class()
    spec = model_class.read_spec(config, name)
    refuse_wrong_spec(model_class, spec)
    check_spec(config, spec, model_class.__name__, is_shipped=True)
    return model_class, spec, implementation


def _read_native_spec(config: Fields, name: str) -> tuple[type[Model], ModelSpec]:
    _refuse_composite(config, name)
    model_class = find_model(name, named_by=f"{config.where}: architectures: ")
    expected = model_type_of(name)
    if expected is not None and config.text("model_type", expected) != expected:
        raise config.fault("model_type", f"{expected!r}, because architectures is {shown([name])}",
                           "correct whichever of the two is wrong")
    shipped = is_shipped(name, model_class)
    refuse_code(config, is_shipped=shipped)
    spec = model_class.read_spec(config, name)
    refuse_wrong_spec(model_class, spec)
    if shipped:
        read_scheme(config)                            # of any other class, the field is refused as unread
    named = {*getattr(model_class, "understands", ()), *getattr(model_class, "ignores", ())}
    refuse_unread_fields(config, named, is_shipped=shipped)
    check_spec(config, spec, model_class.__name__, is_shipped=shipped)
    return model_class, spec


def _refuse_composite(config: Fields, architecture: str) -> None:
    """Raise UnsupportedModelError for a model that combines text with other inputs, such as images."""
    text = config.values.get("text_config")
    if architecture in known_architectures() or not isinstance(text, dict) or not text:
        return
    kind = text.get("model_type")
    raise UnsupportedModelError(
        f"{config.where}: the architecture {shown(architecture)} combines a text model"
        + (f" of type {shown(kind)}" if isinstance(kind, str) else "") + " with another model",
        f"expected a text model: {', '.join(known_architectures())}",
        "save the text model as a separate checkpoint, with AutoModelForCausalLM of transformers")


def resolve_dtype(dtype: torch.dtype | str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the dtype in which `load_model` loads the weights. Raises ConfigError."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype is {dtype!r}", f"expected one of {', '.join(DTYPES)}", "leave it out for auto")
    if name == "auto":
        name = "float32" if device.type == "cpu" else spec.dtype or "float32"
    return getattr(torch, name)
