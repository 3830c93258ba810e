"""Reads the tensors `lora_weights` and `lora_config` of an adapter, and makes its content of them.

`copied_adapter` copies the two tensors. `checked_adapter` checks the values of the copy and digests them, which takes
longer and is done beside the worker. A row i of lora_config is (module id, layer, D), and row i of lora_weights is A
[D, inputs] flattened, B [outputs, D] flattened, and any padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from ..adapter_values import MODULE_NAMES, SEPARATE_ATTENTION, AdapterContent, AdapterModules, AdapterPart
from ..errors import InvalidRequestError, counted
from ..sampling_config import BITS_64, Range
from .inference_request import TENSORS
from .tensor_values import Bound, GivenTensor, integers, read_tensor, scalar

TENSORS_OF_AN_ADAPTER = ("lora_weights", "lora_config")
_INT64 = Range(-(2**63), 2**63 - 1, whole=True)
_EXPONENT = 0x7F80      # of bfloat16: all ones in an infinity and in a NaN


@dataclass(frozen=True, slots=True, eq=False)
class GivenAdapter:
    """Copies of the two tensors, with unchecked values.

    weights   [rows, w] float32 or float16, or uint16 with the bits of bfloat16
    config    [rows, 3 or 4] int64
    """

    weights: np.ndarray
    config: np.ndarray


def read_adapter(tensors: Mapping[str, Any], max_bytes: int, largest: tuple[int, int] | None = None) -> GivenAdapter:
    """Copy the two tensors in `tensors`, which are of the types that a request may have.

    largest   most rows of an adapter, and most elements of a row; what follows them in a row is not copied. None: all
              of both tensors is copied

    Raises InvalidRequestError for other or missing names, for wrong types and shapes, and for more than `max_bytes`.
    """
    if set(tensors) != set(TENSORS_OF_AN_ADAPTER):
        raise InvalidRequestError(f"the tensors of an adapter are {', '.join(map(str, tensors)) or 'none'}",
                                  f"expected {' and '.join(TENSORS_OF_AN_ADAPTER)}", "pass these two")
    given: dict[str, GivenTensor] = {}
    left = max_bytes
    for name in TENSORS_OF_AN_ADAPTER:
        given[name] = read_tensor(TENSORS[name], tensors[name],
                                  Bound(max_bytes, f"max_request_bytes is {max_bytes:,}", left))
        left -= given[name].num_bytes
    return copied_adapter(given["lora_weights"], given["lora_config"], largest)


def checked_task_id(task_id: Any) -> int:
    """Return a task id as a plain int. A negative int64 counts as its bits.

    Raises InvalidRequestError for a value that is no integer or out of range.
    """
    number = scalar(TENSORS["lora_task_id"], task_id)
    BITS_64.check("lora_task_id", number)
    return int(number) % 2**64


def copied_adapter(weights: GivenTensor, config: GivenTensor, largest: tuple[int, int] | None = None) -> GivenAdapter:
    """Copy two tensors that have passed `read_tensor`. `largest` as in `read_adapter`.

    Raises InvalidRequestError if their shapes do not fit together.
    """
    rows, columns = config.shape
    if columns not in (3, 4):
        raise InvalidRequestError(f"the number of columns of lora_config is {columns:,}",
                                  "it must be 3 (module id, layer and adapter size)", "reshape lora_config")
    if weights.shape[0] != rows:
        raise InvalidRequestError(f"the number of rows of lora_weights is {weights.shape[0]:,}",
                                  f"it must be {rows:,} (the number of rows of lora_config)",
                                  "send tensors of matching sizes")
    source = weights.source
    if largest is not None:
        if rows > largest[0]:
            raise InvalidRequestError(f"the number of rows of lora_config is {rows:,}",
                                      f"the model has {counted(largest[0], 'projection')} and a row for each at most",
                                      "use an adapter of this model")
        if isinstance(source, np.ndarray):
            source = source[:, : largest[1]]
    if isinstance(source, np.ndarray) and source.dtype.kind in "iu" and not weights.is_bfloat16:
        raise InvalidRequestError(f"lora_weights is of type {source.dtype}",
                                  "it must be float32, float16 or bfloat16, or numbers that are rounded to float32: "
                                  "float64, or lists", "send the numbers that the adapter was trained with")
    copy: np.ndarray
    if isinstance(source, np.ndarray) and weights.is_bfloat16:
        copy = np.array(source).view(np.uint16)
    elif isinstance(source, np.ndarray) and source.dtype in (np.float16, np.float32):
        copy = np.array(source, source.dtype.newbyteorder("="))
    else:
        try:
            with np.errstate(all="ignore"):
                copy = np.array(source, np.float32).reshape(weights.shape)
        except OverflowError:
            copy = np.full(weights.shape, np.inf, np.float32)
    return GivenAdapter(np.ascontiguousarray(copy), integers(config, _INT64))


def checked_adapter(given: GivenAdapter, modules: AdapterModules, max_adapter_size: int) -> AdapterContent:
    """Check the values, copy the parts without their padding, and digest them.

    modules   the modules that the engine adapts

    Raises InvalidRequestError, which names tensor, row, value and range.
    """
    rows = _checked_rows(given, modules, max_adapter_size)
    weights, kept = given.weights, np.empty(sum(size for *_, size in rows), given.weights.dtype)
    dtype = "bfloat16" if weights.dtype == np.uint16 else str(weights.dtype)
    parts, start = [], 0
    digest = blake2b(dtype.encode(), digest_size=32, person=b"adapter")
    for layer, module_id, row, rank, num_elements in sorted(rows):
        stored = kept[start:start + num_elements]
        stored[:] = weights[row, :num_elements]
        is_finite = (stored & _EXPONENT) != _EXPONENT if dtype == "bfloat16" else np.isfinite(stored)
        if not is_finite.all():
            raise InvalidRequestError(f"row {row} of lora_weights is not finite at position {is_finite.argmin()}",
                                      "every weight must be finite")
        name = MODULE_NAMES[module_id]
        inputs, outputs = modules.sizes[name][layer] or (0, 0)
        parts.append(AdapterPart(name, layer, stored[:rank * inputs].reshape(rank, inputs),
                                 stored[rank * inputs:].reshape(outputs, rank)))
        digest.update(f";{module_id},{layer},{rank},{inputs},{outputs}".encode())
        start += num_elements
    digest.update(kept.data)
    kept.flags.writeable = False
    return AdapterContent(digest.digest(), dtype, tuple(parts), kept.nbytes,
                          max(part.size for part in parts))


def _checked_rows(given: GivenAdapter, modules: AdapterModules, max_adapter_size: int
                  ) -> list[tuple[int, int, int, int, int]]:
    """Return (layer, module id, row, D, number of elements without padding) of each row of lora_config."""
    rows: list[tuple[int, int, int, int, int]] = []
    seen: dict[tuple[str, int], int] = {}
    if not len(given.config):
        raise InvalidRequestError("lora_config has no rows", "an adapter adapts at least one module",
                                  "leave out lora_task_id and its tensors for the base model")
    for row, (module_id, layer, rank, *more) in enumerate(given.config.tolist()):
        where = f"row {row} of lora_config"
        if any(more):
            raise InvalidRequestError(f"{where} has {more[0]} in its fourth column, which asks for DoRA",
                                      "it must be 0, because DoRA is not supported", "train a LoRA adapter without it")
        name = MODULE_NAMES[module_id] if 0 <= module_id < len(MODULE_NAMES) else ""
        if name not in modules.sizes:
            raise InvalidRequestError(f"{where} has module id {module_id}{_in_words(module_id)}",
                                      "this engine adapts " + ", ".join(
                                          f"{MODULE_NAMES.index(known)} ({known})" for known in modules.sizes),
                                      "leave the module out of the adapter")
        layers = modules.sizes[name]
        size = layers[layer] if 0 <= layer < len(layers) else None
        if size is None:
            raise InvalidRequestError(f"{where} has layer {layer} for {name}", "the model has this module in " + (
                f"the layers 0..{len(layers) - 1}" if None not in layers else "the layers " + ", ".join(
                    str(known) for known, has in enumerate(layers) if has)), "use an adapter of this model")
        if not 1 <= rank <= max_adapter_size:
            raise InvalidRequestError(f"{where} has adapter size {rank}", f"it must be in 1..{max_adapter_size} "
                                      "(max_adapter_size)", "raise PeftCacheConfig.max_adapter_size" if rank > 0 else
                                      "leave the module out of the adapter")
        for other in {name, *(SEPARATE_ATTENTION if name == "attn_qkv" else ()),
                      *(("attn_qkv",) if name in SEPARATE_ATTENTION else ())}:
            if (other, layer) in seen:
                raise InvalidRequestError(
                    f"{where} has {name} of layer {layer}, and row {seen[other, layer]} has {other} of this layer",
                    "a module occurs once in a layer, and attn_qkv is attn_q, attn_k and attn_v",
                    "leave out one of them")
        seen[name, layer] = row
        num_elements, width = rank * sum(size), given.weights.shape[1]
        if num_elements > width:
            raise InvalidRequestError(
                f"row {row} of lora_weights has {counted(width, 'element')}",
                f"it must have at least {num_elements:,}: adapter size {rank}, {size[0]:,} inputs and {size[1]:,} "
                f"outputs of {name}", "use an adapter of this model")
        rows.append((layer, module_id, row, rank, num_elements))
    return rows


def _in_words(module_id: int) -> str:
    """What the id means where it is known, in brackets."""
    if 0 <= module_id < len(MODULE_NAMES):
        return f" ({MODULE_NAMES[module_id]})"
    if 8 <= module_id <= 21:
        return " (cross attention)" if module_id <= 12 else " (experts, a router, or a fused gate)"
    return ""
