"""What the content of a KV cache block depends on besides its tokens, adapter and cache_salt."""

import platform
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from ..config import TrtGptModelOptionalParams
from ..models.loading import LoadedModel
from ..triton_kernels.cpu.native.library import loaded_library
from ..weights.digest import content_digest

VERSION = 1                      # of the layout of a block


def cache_fingerprint(files: Mapping[Path, tuple[int, ...]], params: TrtGptModelOptionalParams, loaded: LoadedModel,
                      windows: Sequence[int | None], num_threads: int | None, dispatch: str) -> Callable[[], bytes]:
    """Return a function that digests config.json, the weights and the options that change a block. It reads all, so it
    takes seconds. It holds no weights, because it lives as long as the backend.

    files      `identities` of the checkpoint from before it was loaded
    dispatch   what computes the steps, see BackendInfo

    With `deterministic`, also of machine, build of torch, threads, `dispatch` and compiled code, on which bits depend.
    The function raises OSError, also if a file is not the one that was loaded.
    """
    kv = params.kv_cache_config
    facts = [params.load_format, loaded.implementation, str(loaded.dtype), kv.tokens_per_block, tuple(windows)]
    if params.quantization is not None:
        facts.append(params.quantization)
    if params.quantized_activations is not None:
        facts.append(("activations", params.quantized_activations))
    if kv.kv_cache_dtype != "auto":
        facts += [kv.kv_cache_dtype, [(layer.key_scale, layer.value_scale) for layer in loaded.spec.attention]]
    if params.deterministic:
        facts += [loaded.device.type, platform.machine(), platform.processor(), torch.__version__, num_threads,
                  dispatch, torch.backends.cpu.get_cpu_capability()]
        if dispatch == "compiled" and (library := loaded_library()) is not None:
            facts.append(library.identity)

    def digest() -> bytes:
        content = content_digest(files, kv.disk_cache_path, may_write=not kv.disk_cache_read_only)
        return blake2b(repr([VERSION, content, *facts]).encode(), digest_size=32).digest()
    return digest
