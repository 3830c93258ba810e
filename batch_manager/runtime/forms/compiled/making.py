"""Decides whether a model's forward runs as compiled code on a CPU, and compares the compiled forward with torch."""

from collections.abc import Callable

import torch

from ....attention.interface import Attention
from ....config import TrtGptModelOptionalParams
from ....contained_log import log
from ....decoding.slots import share
from ....errors import ConfigError
from ....layers.recording import NotRecordableError, RecordedAttention, record, record_head
from ....loading_thread import check_interruption
from ....models.loading import LoadedModel
from ....models.spec import ModelSpec
from ....triton_kernels.cpu.native.library import TYPES, CannotCompileError, load_library
from ....triton_kernels.dispatch import use_triton
from ..comparison import difference_from_layers, first_step
from .forward import CompiledStep

LARGEST_HEAD, LARGEST_BLOCK, BLOCK_UNIT = 256, 256, 16
COMPARED_TOKENS = 5


def obstacle_to_compiling(params: TrtGptModelOptionalParams, device: torch.device,
                          attention_factory: Callable[..., Attention] | None) -> str:
    """Return why matrices are not packed for compiled code; "" if they are.

    Raises ConfigError if cpu_compile is True, but the forward cannot run as compiled code.
    """
    obstacle, is_avoidable = _choice(params, device, attention_factory), False
    if not obstacle:
        try:
            load_library(check_interruption)
        except CannotCompileError as error:
            obstacle, is_avoidable = str(error), True
    if obstacle and params.cpu_compile:
        raise ConfigError(f"cpu_compile is True, but {obstacle}", "compiled steps need a CPU, a C compiler, the "
                          "package's own attention and deterministic=False",
                          "leave cpu_compile unset to run steps in torch")
    if is_avoidable:
        log.warning("steps run in torch, and the engine is 2 to 27 times slower than with compiled steps: %s", obstacle)
    elif obstacle and device.type == "cpu" and params.cpu_compile is None:
        log.info("steps run in torch: %s", obstacle)
    return obstacle


def _choice(params: TrtGptModelOptionalParams, device: torch.device, attention_factory) -> str:
    """Return the setting that rules out compiled steps; "" if there is none."""
    if params.cpu_compile is False:
        return "cpu_compile is False"
    if device.type != "cpu":
        return f"the device is {device}"
    if use_triton(device):
        return "TRITON_INTERPRET is set"
    if params.deterministic:
        return "deterministic is set"
    if attention_factory is not None:
        return "Parts.attention is set"
    block = params.kv_cache_config.tokens_per_block
    if block % BLOCK_UNIT or block > LARGEST_BLOCK:
        return f"tokens_per_block is {block}, not a multiple of {BLOCK_UNIT} up to {LARGEST_BLOCK}"
    return ""


def obstacle_of_model(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why no model of this spec and data type runs as compiled code; "" if it may."""
    if dtype not in TYPES:
        return f"it computes in {dtype}, not in {' or '.join(map(str, TYPES))}"
    if spec.head_size > LARGEST_HEAD:
        return f"its head_size is {spec.head_size}, above {LARGEST_HEAD}"
    return ""


def compile_step(loaded: LoadedModel, spec: ModelSpec, attention: Attention, kv_pool: torch.Tensor,
                 sink: int, threads: int) -> CompiledStep:
    """Return the compiled form of a model's forward, after a check that its results on one step agree with torch's.

    spec      the model's spec with the effective windows
    threads   largest number of threads that the compiled code uses
    Mutates   block 0 of the KV cache pool, used for the comparison
    Raises    NotRecordableError, with the reason why the model runs in torch
    """
    if obstacle := obstacle_of_model(spec, loaded.dtype):
        raise NotRecordableError(obstacle)
    recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, sink)
    with torch.inference_mode():
        recording = record(loaded.model.forward, spec.hidden_size, loaded.dtype, recorded)
        head = record_head(loaded.model.logits, spec.hidden_size, loaded.dtype)
        compiled = CompiledStep(recording, kv_pool, spec.num_heads, head, threads)
        num_tokens = min(COMPARED_TOKENS, kv_pool.shape[4], spec.max_position_embeddings)
        step = first_step(num_tokens, spec.vocab_size, num_tokens)
        if difference := difference_from_layers(loaded, attention, share, step, lambda hidden, *_: compiled.run(
                hidden.to(loaded.dtype), step), gives_logits=False):
            raise NotRecordableError(difference)
    return compiled
