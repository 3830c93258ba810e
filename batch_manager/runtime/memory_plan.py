"""Divides the free memory: the numbers of KV cache blocks, of host blocks, and of pages of adapters.

    The number of KV cache blocks:

    If max_tokens is set, the number is ceil(max_tokens / tokens_per_block). If max_tokens is None, the number is
    the smallest of these limits:
        the share               blocks that fit into free_gpu_memory_fraction of the memory that is free after the
                                weights and one step's buffers. At most half of the free memory is subtracted for
                                these buffers, because few steps are of the largest size
        2 GiB on a CPU          blocks that fit into 2 GiB, so that the engine does not take most of a machine's
                                memory by default; no limit on a GPU. The ranks on a machine share the 2 GiB, and the
                                free memory
        the largest use         blocks for max_num_sequences sequences of max_seq_len tokens; no limit if
                                max_num_sequences is None

    The number is at least 1. Blocks that do not fit into the share are an error.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..config import KvCacheConfig, PeftCacheConfig, TrtGptModelOptionalParams
from ..errors import ConfigError, InsufficientMemoryError, counted
from ..models.spec import ModelSpec
from ..triton_kernels.attention_scratch import attention_scratch_bytes
from ..triton_kernels.cpu.native.library import routing_words
from ..triton_kernels.dispatch import use_triton
from ..triton_kernels.sample_scratch import scratch_bytes
from .device.devices import num_multiprocessors
from .device.memory import free_memory
from .forms.fixed.shapes import MOST_CONTEXTS, graph_rows
from .kv_pool import block_bytes, pool_dtype

if TYPE_CHECKING:
    from ..models.loading import LoadedModel
    from .adapters.port import LoraPort
    from .ranks.part import RankPart

DEFAULT_CPU_POOL_BYTES = 2 << 30
HOST_BLOCKS_OF_A_STORE = 64         # without host_cache_size
FLOAT32_BYTES = 4
SLOT_BYTES = 64                    # lower bound of a slot's state on the host, without its block table


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The size of the KV cache pool: num_blocks blocks of block_bytes bytes.

    reason            explains the size in the log
    set_aside_bytes   bytes that are left for the buffers of one step
    """

    num_blocks: int
    block_bytes: int
    reason: str
    set_aside_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes of an engine's steps and of its state.

    step_tokens   tokens of the largest step. max_num_tokens does not limit padded calls, and a step that does not fit
                  into memory all the same is bisected
    graphs        sizes of the captured steps with contexts
    has_graphs    whether steps may be captured
    """

    num_slots: int
    max_beam_width: int
    max_seq_len: int
    max_draft_tokens: int
    step_tokens: int
    graphs: frozenset[tuple[int, int]]
    has_graphs: bool


@dataclass(frozen=True, slots=True)
class DividedMemory:
    """What the memory that the weights leave is used for, and the reasons for the log."""

    num_blocks: int
    host_blocks: int
    adapter_pages: int
    adapter_entries: int
    reason: str


def plan_host_blocks(host_cache_size: int, *, block_bytes: int, free_bytes: int) -> int:
    """Return the number of host blocks that `host_cache_size` bytes hold; 0 if host_cache_size is 0.

    free_bytes   free host memory
    Raises InsufficientMemoryError; ConfigError if host_cache_size is less than one block.
    """
    if host_cache_size > free_bytes:
        raise InsufficientMemoryError(f"host_cache_size is {counted(host_cache_size, 'byte')}",
                                      f"{free_bytes:,} bytes of host memory are free",
                                      "lower KvCacheConfig.host_cache_size, or free memory")
    if 0 < host_cache_size < block_bytes:
        raise ConfigError(f"host_cache_size is {counted(host_cache_size, 'byte')}",
                          f"one KV cache block takes {block_bytes:,}",
                          "raise KvCacheConfig.host_cache_size, or set it to 0")
    return host_cache_size // block_bytes


def plan_adapter_pages(config: PeftCacheConfig, *, page_bytes: int, num_projections: int, free_bytes: int
                       ) -> tuple[int, str]:
    """Return (number of pages for adapters on the device, the reason for the log).

    page_bytes        bytes of a page, one rank of all projections
    num_projections   projections that adapters may change, over all layers
    free_bytes        bytes that are free after the weights were loaded
    Raises InsufficientMemoryError if not even one page fits.
    """
    if config.num_device_module_layer:
        number, reason = config.num_device_module_layer // num_projections, (
            f"num_device_module_layer {config.num_device_module_layer:,}")
    else:
        number = int(free_bytes * config.device_cache_percent) // page_bytes
        reason = f"{config.device_cache_percent:g} of {_mib(free_bytes)} free memory"
    if not number or number * page_bytes > free_bytes:
        raise InsufficientMemoryError(
            f"the adapters of peft_cache_config get {counted(number, 'page')} on the device: {reason}",
            f"a page, one rank of {num_projections:,} projections, takes {counted(page_bytes, 'byte')}, and "
            f"{free_bytes:,} bytes are free",
            ("lower" if number else "raise") + " PeftCacheConfig.device_cache_percent or num_device_module_layer")
    return number, f"adapters of {counted(number, 'page')}, {_mib(number * page_bytes)}: {reason}"


def plan_memory(config: KvCacheConfig, *, block_bytes: int, free_bytes: int, step_bytes: int, on_gpu: bool,
                max_seq_len: int, max_num_sequences: int | None, num_ranks: int = 1) -> MemoryPlan:
    """Return the number and size of the blocks of the KV cache pool, with the reason for the number.

    block_bytes         bytes of one block over all layers
    free_bytes          bytes that are free after the weights were loaded
    step_bytes          bytes of the buffers of one step
    max_num_sequences   largest number of sequences that hold blocks at the same time; None: unbounded
    num_ranks           processes of this engine that share the memory of a CPU
    Raises InsufficientMemoryError.
    """
    size, fraction = config.tokens_per_block, config.free_gpu_memory_fraction
    free_bytes //= num_ranks
    after_weights = free_bytes
    set_aside = min(step_bytes, free_bytes // 2)
    free_bytes -= set_aside
    share_bytes = int(free_bytes * fraction)
    kind = "GPU" if on_gpu else "host"
    share = f"{fraction:g} of {_mib(free_bytes)} free {kind} memory"

    if config.max_tokens is not None:
        wanted, reason = -(-config.max_tokens // size), f"max_tokens {config.max_tokens:,}"
    else:
        candidates = [(share_bytes // block_bytes, share)]
        if not on_gpu:
            candidates.append((DEFAULT_CPU_POOL_BYTES // num_ranks // block_bytes,
                               f"at most {_mib(DEFAULT_CPU_POOL_BYTES // num_ranks)} on a CPU unless max_tokens is "
                               "set"))
        if max_num_sequences is not None:
            candidates.append((max_num_sequences * -(-max_seq_len // size),
                               f"{counted(max_num_sequences, 'sequence')} of {counted(max_seq_len, 'token')}"))
        wanted, reason = min(candidates, key=lambda candidate: candidate[0])
        wanted = max(wanted, 1)

    if wanted * block_bytes > share_bytes:
        # Advice that cannot help is left out.
        ways = ["lower KvCacheConfig.max_tokens"] if wanted > 1 else []
        if wanted * block_bytes <= free_bytes:
            ways.append("raise KvCacheConfig.free_gpu_memory_fraction")
        if wanted * block_bytes <= int(after_weights * fraction):
            ways.append("lower max_num_tokens or max_batch_size")
        raise InsufficientMemoryError(
            f"the KV cache needs {counted(wanted, 'block')} of {counted(size, 'token')}, "
            f"{counted(wanted * block_bytes, 'byte')}",
            f"it may use {fraction:g} of the {kind} memory that is free besides the weights and the buffers of one "
            f"step: {fraction:g} * {free_bytes:,} = {counted(share_bytes, 'byte')}",
            ", ".join([*ways, "or free memory"]) if ways else "free memory, or use a smaller model or dtype")
    return MemoryPlan(wanted, block_bytes, (
        f"KV cache of {counted(wanted, 'block')} of {counted(size, 'token')}, {counted(wanted * size, 'token')}, "
        f"{_mib(wanted * block_bytes)}: {reason}"), set_aside)


def step_bytes(spec: ModelSpec, dtype: torch.dtype, max_num_tokens: int, max_rows: int, processors: int,
               deterministic_keys: int = 0) -> int:
    """Return an upper estimate of the bytes that a step allocates.

    A step allocates the hidden states, the intermediate results of one layer, and the float32 logits twice.

    max_rows     largest number of rows of logits in a step: one for each sequence, or for each of its beams
    processors   number of multiprocessors of a GPU that runs Triton kernels; 0: no Triton kernels. The kernel
                 that samples needs scratch memory for float32 logits. The kernels of attention need scratch memory for
                 the parts of long sequences
    deterministic_keys   keys of the longest sequence in a deterministic engine; 0: another engine
    """
    experts = [layer for layer in spec.experts if layer is not None]
    widest = max([spec.intermediate_size, *(size for layer in experts for size in (layer.size, layer.shared_size))])
    # In torch, an expert's rows and their output, and in float32 the output and the sum over experts. In a compiled
    # step, rows and results once for each expert of a row, and the routing.
    mixed = max((max(6 * spec.hidden_size, layer.chosen * (2 * spec.hidden_size + 3 * layer.size) + 2 * routing_words(
        layer.count, layer.chosen)) for layer in experts), default=0)
    per_token = 6 * spec.hidden_size + 3 * widest + 4 * sum(spec.qkv_sizes) + mixed
    rows, scratch = min(max_rows, max_num_tokens), 0
    if processors:
        scratch = scratch_bytes(rows, spec.vocab_size, FLOAT32_BYTES) + attention_scratch_bytes(
            rows, spec.num_heads, spec.num_kv_heads, spec.head_size, dtype.itemsize, processors,
            deterministic_keys)
    return per_token * dtype.itemsize * max_num_tokens + 2 * FLOAT32_BYTES * spec.vocab_size * rows + scratch


def divide_memory(params: TrtGptModelOptionalParams, loaded: "LoadedModel", sizes: EngineSizes, sink: int,
                   port: "LoraPort | None", part: "RankPart | None") -> DividedMemory:
    """Divide the free memory among host blocks, pages of adapters, the buffers of steps, and blocks of the KV cache."""
    spec, device, dtype, kv = loaded.spec, loaded.device, loaded.dtype, params.kv_cache_config
    cached = pool_dtype(kv.kv_cache_dtype, dtype)
    one_block, on_gpu = block_bytes(spec, kv.tokens_per_block, cached), device.type != "cpu"
    # Sink tokens exclude block reuse, so there is nothing to evict to the host.
    has_store = kv.disk_cache_path is not None or params.kv_transfer_config is not None
    host_bytes = kv.host_cache_size or (HOST_BLOCKS_OF_A_STORE * one_block if has_store else 0)
    host_blocks = plan_host_blocks(0 if sink else host_bytes, block_bytes=one_block,
                                   free_bytes=free_memory(torch.device("cpu")))
    local_ranks = 1 if part is None else part.place.local_size
    if part is not None:                                  # each sees the memory that all weights of a machine leave
        part.agree("weights", None)
    adapter_bytes, pages, entries, reasons = 0, 0, 0, []
    if port is not None:
        entries = max(port.entries, 1)                    # a stage may have no projection
        pages, reason = plan_adapter_pages(
            params.peft_cache_config, page_bytes=entries * dtype.itemsize,
            free_bytes=free_memory(device) // (1 if on_gpu else local_ranks),
            num_projections=port.modules.num_module_layers)
        reasons.append(reason)
        if part is not None:
            pages, = part.least("adapter pages", pages)
        adapter_bytes = pages * entries * dtype.itemsize + port.scratch_bytes(sizes.step_tokens)
    processors = num_multiprocessors(device) if use_triton(device) else 0
    rows_per_sequence = max(sizes.max_beam_width, 1 + sizes.max_draft_tokens)
    for_kernels = processors, sizes.max_seq_len if params.deterministic else 0
    set_aside = step_bytes(spec, dtype, sizes.step_tokens, params.max_batch_size * rows_per_sequence, *for_kernels)
    if sizes.has_graphs:                                  # graphs keep the memory of their steps
        most_rows = graph_rows(sizes.num_slots)[-1]
        set_aside += step_bytes(spec, dtype, max([most_rows, *map(sum, sizes.graphs)]), most_rows + MOST_CONTEXTS,
                                *for_kernels)
    plan = plan_memory(
        kv, block_bytes=one_block,
        free_bytes=max(free_memory(device) - adapter_bytes - (0 if on_gpu else host_blocks * one_block), 0),
        step_bytes=set_aside, on_gpu=on_gpu, max_seq_len=sizes.max_seq_len,
        max_num_sequences=None if params.max_num_sequences == -1 else sizes.num_slots * sizes.max_beam_width,
        num_ranks=1 if on_gpu else local_ranks)
    num_blocks = plan.num_blocks
    if part is not None:
        num_blocks, host_blocks = part.least("KV cache blocks", num_blocks, host_blocks)
    return DividedMemory(num_blocks, host_blocks, pages, entries, "; ".join([plan.reason, *reasons]))


def refuse_too_many_slots(num_slots: int, free_bytes: int) -> None:
    """Raise InsufficientMemoryError if the state of `num_slots` sequences alone does not fit into free host memory."""
    if num_slots * SLOT_BYTES > free_bytes:
        raise InsufficientMemoryError(
            f"the state of {counted(num_slots, 'sequence')} takes {counted(num_slots * SLOT_BYTES, 'byte')}",
            f"{free_bytes:,} bytes of host memory are free",
            "lower max_num_sequences, or max_batch_size if max_num_sequences is unset")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
