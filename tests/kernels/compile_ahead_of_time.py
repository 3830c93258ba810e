"""Compiles the kernels, through their wrappers, for GPUs that this machine does not have. test_ahead_of_time.py runs
this.

    python compile_ahead_of_time.py sm_90 gfx942            prints one JSON object per compiled kernel
    python compile_ahead_of_time.py --all sm_90 gfx942      the same, with all cases for each GPU

Without `--all`, GPUs other than sm_90 get the cases in ON_EACH_GPU.

A stand-in for triton's driver names the GPU, and compiling replaces launching. The wrappers get tensors without memory
(device "meta") and choose constants, warps and stages exactly as on that GPU. The process must not have
TRITON_INTERPRET set, and nothing else in it may use triton.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

# Their instructions are counted on sm_90.
DISASSEMBLED = {"_context_kernel", "_decode_kernel", "_deterministic_linear_kernel", "_fused_linear_kernel",
                "_lora_expand_add_kernel", "_lora_shrink_kernel", "_quantised_linear_kernel"}
FP8 = torch.float8_e4m3fn
INSTRUCTION_BYTES = 16
NVIDIA_BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# name -> target, shared memory per program in KiB, multiprocessors
GPUS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163, 108),
    "sm_90": (GPUTarget("cuda", 90, 32), 227, 132),
    "sm_100": (GPUTarget("cuda", 100, 32), 227, 148),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64, 304),
}


class AbsentGpu:
    """A triton driver for a GPU that is absent: only what the compiler and the wrappers' choice of settings need."""

    def __init__(self, target, shared_kib, multiprocessors, index):
        self.target, self.index = target, index
        self.properties = {"max_shared_mem": shared_kib * 1024, "multiprocessor_count": multiprocessors}
        self.utils = self

    def get_current_target(self):
        return self.target

    def get_current_device(self):
        return self.index

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return self.properties


compiled = []                           # kernels compiled since it was last cleared


def compile_instead_of_launch(kernel, grid):
    return lambda *args, **kwargs: compiled.append(kernel.run(*args, grid=grid, warmup=True, **kwargs))


JITFunction.__getitem__ = compile_instead_of_launch


def tensor(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def integers(*shape):
    return tensor(*shape, dtype=torch.int32)


def pool(num_kv_heads, head_size, tokens_per_block=64, dtype=torch.bfloat16):
    return tensor(1000, 4, 2, num_kv_heads, tokens_per_block, head_size, dtype=dtype)[:, 1]


def tables(head_size, rotary_size=None):
    """Return cosines and sines for heads whose first `rotary_size` entries are rotated; None: all entries."""
    half = (head_size if rotary_size is None else rotary_size) // 2
    return {name: tensor(4096, half, dtype=torch.float32) for name in ("cos_table", "sin_table")}


def packed_heads(num_tokens, group, num_kv_heads, head_size, dtype=torch.bfloat16):
    """Return queries, keys and values as a projection returns them."""
    packed = tensor(num_tokens, (group + 2) * num_kv_heads, head_size, dtype=dtype)
    return packed.split([group * num_kv_heads, num_kv_heads, num_kv_heads], dim=1)


def of_heads(heads, slopes, sink_logits):
    """Return the arguments of attention that have a value per head.

    slopes   "float32" or "bfloat16": the dtype in which ALiBi slopes are multiplied; None: no slopes
    """
    given = {}
    if slopes is not None:
        given = {"alibi_slopes": tensor(heads, dtype=torch.float32),
                 "alibi_bfloat16_factor": 0.125 if slopes == "bfloat16" else None}
    return {**given, "sink_logits": tensor(heads, dtype=torch.float32)} if sink_logits else given


def norms_of_heads(head_size):
    return {"query_norm": tensor(head_size), "key_norm": tensor(head_size), "epsilon": 1e-6}


def decode(head_size, group, num_kv_heads=8, window=None, tokens_per_block=64, sink=0, softcap=None, rotation=None,
           slopes=None, sink_logits=False, dtype=torch.bfloat16, has_norms=False, merges=False, cached=None):
    from batch_manager.triton_kernels.paged_attention_decode import paged_attention_decode

    paged_attention_decode(
        *packed_heads(32, group, num_kv_heads, head_size, dtype),
        pool(num_kv_heads, head_size, tokens_per_block, cached or dtype),
        integers(256, 64), integers(32), integers(100, 4), integers(33), 0.1, window=window, slots=integers(32),
        sink=sink, softcap=softcap, **(tables(head_size) if rotation is None else rotation),
        **of_heads(group * num_kv_heads, slopes, sink_logits), **(norms_of_heads(head_size) if has_norms else {}),
        counters=integers(32, num_kv_heads) if merges else None,
    )


def context(head_size, group, num_kv_heads=8, window=None, tokens_per_block=64, sink=0, part_keys=None,
            softcap=None, slopes=None, sink_logits=False, is_split=False, cached=torch.bfloat16):
    from batch_manager.triton_kernels.paged_attention_context import paged_attention_context

    parts = {"part_starts": integers(65), "merged_rows": integers(64), "num_partials": 528} if is_split else {}
    paged_attention_context(
        tensor(4096, group * num_kv_heads, head_size), pool(num_kv_heads, head_size, tokens_per_block, cached),
        integers(256, 64), integers(5), integers(4), integers(32, 5), 0.1, window=window, slots=integers(4),
        sink=sink, part_keys=part_keys, softcap=softcap, **of_heads(group * num_kv_heads, slopes, sink_logits),
        **parts,
    )


def adapters(rows, begin=0):
    """Launch both products of adapters for some rows. The index tensors begin at this entry."""
    from batch_manager.triton_kernels.lora_expand_add import lora_expand_add
    from batch_manager.triton_kernels.lora_shrink import lora_shrink

    def sliced(*shape):
        return torch.empty(shape[0] + begin, *shape[1:], dtype=torch.int32)[begin:]         # real memory

    given = tensor(500, 32 * 40), sliced(rows, 3), sliced(1 + begin, 16 * (begin + 1)), sliced(3, 7), sliced(2, 5)
    lora_expand_add(tensor(rows, 128), lora_shrink(tensor(rows, 576), *given), *given, 64, True)


def linear(size, columns, dtype=torch.bfloat16):
    from batch_manager.triton_kernels.deterministic_linear import deterministic_linear

    weight = tensor(columns, size, dtype=dtype)
    deterministic_linear(tensor(64, size, dtype=dtype), weight, tensor(columns, dtype=dtype))


def quantised(size, columns, bits, group, *, rows=16, has_zeros=False):
    """Launch `quantised_linear` for a matrix with a scale, and a zero point, for each `group` inputs."""
    from batch_manager.triton_kernels.quantised_linear import quantised_linear

    groups = size // group if group else 1
    zeros = tensor(columns, groups, dtype=torch.int16) if has_zeros else 2 ** (bits - 1)
    quantised_linear(tensor(rows, size), tensor(-(-size * bits // 256), columns, 32, dtype=torch.uint8),
                     tensor(columns, groups, dtype=torch.float16), zeros, bits, group, residual=tensor(rows, columns))


def experts(count, rows, hidden_size, size):
    """Launch both products of a layer whose router chooses two of `count` experts for each of `rows` rows."""
    from batch_manager.triton_kernels.moe_grouped_gemm import moe_grouped_gemm

    place = tensor(2 * rows, dtype=torch.int64)
    moe_grouped_gemm(tensor(rows, hidden_size), tensor(count, 2 * size, hidden_size), integers(count), place)
    moe_grouped_gemm(tensor(2 * rows, size), tensor(count, hidden_size, size), integers(count), None, place,
                     tensor(2 * rows, dtype=torch.float32))


def lora(size, outputs, dtype=torch.bfloat16):
    """Launch both products of adapters for projections of `size` inputs and these numbers of outputs."""
    from batch_manager.triton_kernels.lora_expand_add import lora_expand_add
    from batch_manager.triton_kernels.lora_shrink import lora_shrink

    given = tensor(500, 32 * 4000, dtype=dtype), integers(40, 3), integers(8, 64), integers(8, 224), integers(
        len(outputs), 5)
    shrunk = lora_shrink(tensor(64, size, dtype=dtype), *given)
    lora_expand_add(tensor(64, sum(outputs), dtype=dtype), shrunk, *given, max(outputs),
                    all(size % 32 == 0 for size in outputs))


def fused(size, columns, *, rows=16, norm="rms", dtype=torch.bfloat16, **options):
    """Launch `fused_linear`.

    size      number of input columns
    columns   number of output columns; with a gate, the weight has twice as many rows
    """
    from batch_manager.triton_kernels.fused_linear import fused_linear

    norms = {"none": (None, None), "rms": (tensor(size, dtype=dtype), None),
             "layer": (tensor(size, dtype=dtype), tensor(size, dtype=dtype))}[norm]
    bias = tensor(columns, dtype=dtype) if options.pop("bias", False) else None
    residual = tensor(rows, columns, dtype=dtype) if options.pop("adds", False) else None
    weight = tensor(columns * (1 + options.get("gated", False)), size, dtype=dtype)
    fused_linear(tensor(rows, size, dtype=dtype), weight, bias, *norms, 1e-5, residual=residual, **options)


def rope(head_size, group, num_kv_heads=8, has_norms=False, cached=torch.bfloat16):
    from batch_manager.triton_kernels.rope_kv_append import rope_kv_append

    rope_kv_append(
        *packed_heads(64, group, num_kv_heads, head_size), pool(num_kv_heads, head_size, dtype=cached),
        tensor(64, dtype=torch.int64), integers(64), **tables(head_size),
        **(norms_of_heads(head_size) if has_norms else {}),
    )


def norms(size):
    from batch_manager.triton_kernels.layer_norm import layer_norm
    from batch_manager.triton_kernels.rms_norm import rms_norm

    rms_norm(tensor(64, size), tensor(size), 1e-5, residual=tensor(64, size))
    layer_norm(tensor(64, size), tensor(size), tensor(size), 1e-5, residual=tensor(64, size))


def activations():
    from batch_manager.triton_kernels.activation import activation
    from batch_manager.triton_kernels.gated_activation import gated_activation

    activation(tensor(64, 3072), "gelu_new")
    gated_activation(tensor(64, 2 * 8192), "silu")


def bitmask():
    from batch_manager.triton_kernels.token_bitmask import token_bitmask

    token_bitmask(tensor(8, 128256, dtype=torch.float32), integers(8, 4008))


def sampling():
    from batch_manager.triton_kernels.philox import philox
    from batch_manager.triton_kernels.sample_token import sample_token

    philox(tensor(8, 2, dtype=torch.int64), tensor(8, 4, dtype=torch.int64))
    logits, numbers = tensor(8, 128256, dtype=torch.float32), tensor(8, dtype=torch.float32)
    sample_token(logits, numbers, integers(8), numbers, tensor(8, dtype=torch.int64), integers(8))


def fixed_step():
    """Launch the kernels that a step at fixed addresses launches before and after its layers; see fixed/launches.py.

    The launches are first those of a step with random sampling, and then those of a greedy step.
    """
    from batch_manager.triton_kernels.prepare_step import prepare_step
    from batch_manager.triton_kernels.sample_token import sample_token

    rows, logits = 8, tensor(8, 128256)
    longs, numbers = tensor(rows, dtype=torch.int64), tensor(300, dtype=torch.float32)
    last_tokens, results = tensor(300, 4, dtype=torch.int64), integers(4, rows)
    for counts in (integers(rows, 2048), None):
        given = integers(300, 64), tensor(40, dtype=torch.int64), integers(40), last_tokens, longs, longs, longs[:0]
        for embedding in (tensor(128256, 4096), None):
            prepare_step(*given, embedding=embedding, cleared=counts)
        sample_token(
            logits, numbers, integers(300), numbers, tensor(300, dtype=torch.int64), integers(rows), tokens=results[0],
            log_probs=tensor(rows, dtype=torch.float32), finite=results[2], min_p=numbers, only_greedy=counts is None,
            slots=longs, end_id=integers(300), finish=results[1], last_tokens=last_tokens, counts=counts,
        )


def histories():
    from batch_manager.triton_kernels.ban_ngrams import ban_ngrams
    from batch_manager.triton_kernels.ban_words import ban_words
    from batch_manager.triton_kernels.match_stop_words import match_stop_words
    from batch_manager.triton_kernels.token_penalties import token_penalties

    logits, numbers = tensor(8, 128256, dtype=torch.float32), tensor(8, dtype=torch.float32)
    of_rows = integers(32, 4096), tensor(8, dtype=torch.int64), tensor(8, dtype=torch.int64)
    word_lists = integers(5000), integers(8), integers(8)
    token_penalties(logits, *of_rows, numbers, numbers, numbers, integers(8))
    ban_ngrams(logits, *of_rows, integers(8))
    ban_words(logits, *of_rows, *word_lists, 100)
    match_stop_words(integers(8), *of_rows, *word_lists)


def beams(width):
    from batch_manager.triton_kernels.beam_topk import beam_topk

    numbers = tensor(4 * width, dtype=torch.float32)
    beam_topk(tensor(4 * width, 128256, dtype=torch.float32), numbers, numbers, tensor(4, dtype=torch.float32),
              integers(5), 2 * width, width)


CASES = {
    "decode D128 G4": lambda: decode(128, 4),
    "decode D64 G3": lambda: decode(64, 3, num_kv_heads=3),
    "decode D128 without rotation": lambda: decode(128, 4, rotation={}),
    "decode D80 a quarter rotates": lambda: decode(80, 1, rotation=tables(80, 20)),
    "decode D128 G2 norms": lambda: decode(128, 2, has_norms=True),
    "decode D256 G2 norms window": lambda: decode(256, 2, num_kv_heads=4, window=512, has_norms=True),
    "decode D128 G4 merges": lambda: decode(128, 4, merges=True),
    "decode D64 G3 merges": lambda: decode(64, 3, num_kv_heads=3, merges=True),
    "decode D128 window sinks": lambda: decode(128, 4, window=4096, sink=4),
    "decode D64 window sinks": lambda: decode(64, 4, window=4096, sink=4),
    "decode D128 softcap": lambda: decode(128, 2, softcap=50.0),
    "decode D256 softcap window": lambda: decode(256, 2, num_kv_heads=4, window=4096, softcap=50.0),
    "decode D128 slopes": lambda: decode(128, 1, rotation={}, slopes="float32"),
    "decode D64 slopes of bfloat16": lambda: decode(64, 71, num_kv_heads=1, rotation={}, slopes="bfloat16"),
    "decode D64 sink logits window": lambda: decode(64, 8, window=128, sink_logits=True),
    "context D128": lambda: context(128, 4),
    "context D128 split": lambda: context(128, 4, is_split=True),
    "context D64": lambda: context(64, 3, num_kv_heads=3),
    "context D128 window sinks": lambda: context(128, 4, window=4096, sink=4),
    "context D64 window sinks": lambda: context(64, 4, window=4096, sink=4),
    "context D128 fixed parts": lambda: context(128, 4, part_keys=512),
    "context D64 G3 fixed parts": lambda: context(64, 3, num_kv_heads=3, part_keys=512, is_split=True),
    "context D256 fixed parts": lambda: context(256, 2, num_kv_heads=4, part_keys=512),
    "context D64 window sinks fixed parts": lambda: context(64, 4, window=4096, sink=4, part_keys=512),
    "context D128 softcap": lambda: context(128, 2, softcap=50.0),
    "context D128 softcap window": lambda: context(128, 2, window=4096, softcap=50.0),
    "context D64 softcap fixed parts": lambda: context(64, 4, softcap=50.0, part_keys=512),
    "context D128 slopes": lambda: context(128, 1, slopes="float32"),
    "context D64 slopes of bfloat16": lambda: context(64, 71, num_kv_heads=1, slopes="bfloat16"),
    "context D64 sink logits window": lambda: context(64, 8, window=128, sink_logits=True),
    "context D128 slopes sink logits fixed parts": lambda: context(128, 4, slopes="float32", sink_logits=True,
                                                                   part_keys=512),
    "decode D128 G4 fp8": lambda: decode(128, 4, cached=FP8),
    "context D128 fp8": lambda: context(128, 4, cached=FP8),
    "linear 4096": lambda: linear(4096, 14336),
    "linear 100": lambda: linear(100, 70),
    "linear 4096 float32": lambda: linear(4096, 14336, torch.float32),
    "lora qkv 8B": lambda: lora(4096, [4096, 1024, 1024]),
    "lora down 135M": lambda: lora(1536, [576]),
    "lora 100": lambda: lora(100, [70]),
    "lora qkv 135M float16": lambda: lora(576, [576, 192, 192], torch.float16),
    "lora qkv 135M float32": lambda: lora(576, [576, 192, 192], torch.float32),
    "experts of Mixtral": lambda: experts(8, 16, 4096, 14336),
    "fused qkv 8B": lambda: fused(4096, 6144),
    "fused gate up 8B": lambda: fused(4096, 14336, activation="silu", gated=True),
    "fused qkv 135M": lambda: fused(576, 960),
    "fused gate up 135M": lambda: fused(576, 1536, activation="silu", gated=True),
    "fused head 8B": lambda: fused(4096, 128256),
    "fused down GPT-2": lambda: fused(3072, 768, norm="none", bias=True, adds=True),
    "fused expand GPT-2": lambda: fused(768, 3072, norm="layer", bias=True, activation="gelu_new"),
    "fused 100": lambda: fused(100, 70, norm="layer", bias=True, activation="gelu"),
    "fused qkv 135M 256 rows": lambda: fused(576, 960, rows=256),
    "fused gate up 135M 256 rows": lambda: fused(576, 1536, rows=256, activation="silu", gated=True),
    "fused qkv 0.6B 256 rows": lambda: fused(1024, 4096, rows=256),
    "fused gate up 0.6B 256 rows": lambda: fused(1024, 3072, rows=256, activation="silu", gated=True),
    "fused qkv 8B 64 rows": lambda: fused(4096, 6144, rows=64),
    "fused gate up 1B 64 rows": lambda: fused(2048, 8192, rows=64, activation="silu", gated=True),
    "fused expand GPT-2 256 rows": lambda: fused(768, 3072, rows=256, norm="layer", bias=True, activation="gelu_new"),
    "fused down GPT-2 256 rows": lambda: fused(3072, 768, rows=256, norm="none", bias=True, adds=True),
    "fused 100, 17 rows": lambda: fused(100, 70, rows=17, norm="layer", bias=True, activation="gelu", gated=True),
    "fused qkv 8B float16": lambda: fused(4096, 6144, dtype=torch.float16),
    "fused qkv 135M float16 256 rows": lambda: fused(576, 960, rows=256, dtype=torch.float16),
    "fused qkv 8B float32": lambda: fused(4096, 6144, dtype=torch.float32),
    "quantised Q4_0 gate up 8B": lambda: quantised(4096, 28672, 4, 32),
    "quantised AWQ qkv 135M": lambda: quantised(576, 960, 4, 64, has_zeros=True),
    "quantised Q8_0 out 8B": lambda: quantised(4096, 4096, 8, 32),
    "quantised Q4_0 64 rows": lambda: quantised(4096, 4096, 4, 32, rows=64),
    "quantised Q4_0 256 rows": lambda: quantised(4096, 4096, 4, 32, rows=256),
    "quantised AWQ 256 rows": lambda: quantised(4096, 4096, 4, 128, rows=256, has_zeros=True),
    "quantised int8 256 rows": lambda: quantised(4096, 4096, 8, 0, rows=256),
    "rope D128 norms": lambda: rope(128, 2, has_norms=True),
    "rope D128 fp8": lambda: rope(128, 4, cached=FP8),
    "norms 4096": lambda: norms(4096),
    "activations": activations,
    "sampling": sampling,
    "fixed step": fixed_step,
    "bitmask": bitmask,
    "histories": histories,
    "beams 8": lambda: beams(8),
}

# Each kernel, and each feature of attention, once. The compiler for gfx942 takes over a minute for all cases.
ON_EACH_GPU = (
    "decode D128 G4 merges", "decode D64 window sinks", "decode D128 G4 fp8", "decode D256 softcap window",
    "decode D256 G2 norms window", "context D128 fp8", "context D128 softcap window",
    "context D128 slopes sink logits fixed parts", "linear 4096", "lora qkv 8B", "experts of Mixtral",
    "fused gate up 8B", "fused down GPT-2", "fused gate up 1B 64 rows", "quantised Q4_0 gate up 8B", "rope D128 fp8",
    "norms 4096", "activations", "sampling", "fixed step", "bitmask", "histories", "beams 8",
)


def variants_by_alignment():
    """Return {kernel: number of variants that triton compiled} after calls with differently aligned index tensors.

    The index tensors are slices that begin at the first or at the second entry. Numbers of rows vary too.
    """
    from batch_manager.triton_kernels.ban_ngrams import ban_ngrams
    from batch_manager.triton_kernels.ban_words import ban_words
    from batch_manager.triton_kernels.beam_topk import beam_topk
    from batch_manager.triton_kernels.deterministic_linear import deterministic_linear
    from batch_manager.triton_kernels.fused_linear import fused_linear
    from batch_manager.triton_kernels.match_stop_words import match_stop_words
    from batch_manager.triton_kernels.paged_attention_context import paged_attention_context
    from batch_manager.triton_kernels.paged_attention_decode import paged_attention_decode
    from batch_manager.triton_kernels.prepare_step import prepare_step
    from batch_manager.triton_kernels.rope_kv_append import rope_kv_append
    from batch_manager.triton_kernels.sample_token import sample_token
    from batch_manager.triton_kernels.token_penalties import token_penalties

    def sliced(begin, *shape, dtype=torch.int32):
        return torch.empty(shape[0] + begin, *shape[1:], dtype=dtype)[begin:]       # real memory: it has an address

    compiled.clear()
    for begin in (0, 1):
        query, lengths, slots = tensor(4, 8, 64), sliced(begin, 4), sliced(begin, 4)
        for part_starts in (None, sliced(begin, 5)):
            paged_attention_decode(query, tensor(4, 2, 64), tensor(4, 2, 64), pool(2, 64), sliced(begin, 4, 9), lengths,
                                   sliced(begin, 6, 4), part_starts, 0.1, slots=slots, **tables(64))
        for parts in ({}, {"part_starts": sliced(begin, 9), "merged_rows": sliced(begin, 8), "num_partials": 40}):
            paged_attention_context(query, pool(2, 64), sliced(begin, 4, 9), sliced(begin, 5), lengths,
                                    sliced(begin, 7, 5), 0.1, slots=slots, **parts)
        rope_kv_append(
            query, tensor(4, 2, 64), tensor(4, 2, 64), pool(2, 64), sliced(begin, 4, dtype=torch.int64),
            sliced(begin, 4), **tables(64),
        )
        numbers, longs = sliced(begin, 4, dtype=torch.float32), sliced(begin, 4, dtype=torch.int64)
        sample_token(
            tensor(4, 500), numbers, lengths, numbers, longs, lengths,
            tokens=lengths, log_probs=numbers, finite=lengths, min_p=numbers, slots=longs, end_id=lengths,
            finish=lengths, last_tokens=tensor(9, 4, dtype=torch.int64), counts=sliced(begin, 4, 2048),
        )
        for num_fed in (0, 1, 16 + begin):
            prepare_step(sliced(begin, 9, 7), longs, lengths, tensor(9, 4, dtype=torch.int64), longs, longs,
                         sliced(begin, num_fed, dtype=torch.int64), tensor(500, 64), sliced(begin, 4, 2048))
        logits, rows = tensor(4, 500, dtype=torch.float32), sliced(begin, 4, dtype=torch.int64)
        of_rows, word_lists = (integers(8, 64 * (begin + 1)), rows, rows), (integers(99), lengths, lengths)
        token_penalties(logits, *of_rows, numbers, numbers, numbers, lengths)
        ban_ngrams(logits, *of_rows, lengths)
        ban_words(logits, *of_rows, *word_lists, 7)
        match_stop_words(lengths, *of_rows, *word_lists)
    for rows in (1, 16, 17, 64, 65, 250):                  # a step may have any number of rows
        adapters(rows, rows % 2)
        deterministic_linear(tensor(rows, 64), tensor(96, 64))
        fused_linear(tensor(rows, 64), tensor(96, 64), None, tensor(64))
        quantised(64 * (1 + rows % 3), 96 * (1 + rows % 2), 8, 0, rows=rows)
        for num_candidates in (7, 8):
            beam_topk(tensor(4, 500), numbers, numbers, numbers, sliced(begin, 5), num_candidates, 1)
    names = [kernel.metadata.name for kernel in {id(kernel): kernel for kernel in compiled}.values()]
    return {name: names.count(name) for name in names}


def shared_memory_of_blocks():
    """Yield (label, computed bytes of shared memory, bytes that the compiled kernel takes) of attention kernels.

    The kernels are those of decode and context attention with each block size that a GPU accepts, except 64 tokens,
    which CASES has. The last two kernels have float32 blocks: the largest that fit into shared memory, and blocks of
    twice the size. For context attention, the computed number is the GPU's limit.
    """
    from batch_manager.attention.block_sizes import gpu_block_sizes
    from batch_manager.triton_kernels.device_limits import device_limits
    from batch_manager.triton_kernels.paged_attention_decode import decode_shared_bytes

    limits = device_limits()
    cases = [(attend, 128, size, torch.bfloat16) for attend in (decode, context) for size in gpu_block_sizes()
             if size != 64]
    cases += [(decode, 256, size, torch.float32) for size in (128, 256)]
    for attend, head_size, size, dtype in cases:
        compiled.clear()
        attend(head_size, 4, tokens_per_block=size, **({"dtype": dtype} if attend is decode else {}))
        computed = (decode_shared_bytes(head_size, 4, size, dtype.itemsize, limits) if attend is decode
                    else limits.shared_bytes)
        yield f"{attend.__name__} D{head_size} {size} {dtype}", computed, compiled[0].metadata.shared


def refusals_of_an_unknown_kind():
    """Return {wrapper: error message} of the wrappers that are called with an unknown activation."""
    from batch_manager.triton_kernels.activation import activation
    from batch_manager.triton_kernels.fused_linear import fused_linear
    from batch_manager.triton_kernels.gated_activation import gated_activation

    texts = {}
    for launch, arguments in ((activation, ("swish",)), (gated_activation, ("swish",)),
                              (fused_linear, (tensor(4, 8), None, None, None, 0.0, 0.0, "swish"))):
        try:
            launch(tensor(1, 8), *arguments)
        except Exception as error:
            texts[launch.__name__] = str(error)
    return texts


def nvidia_figures(kernel):
    """Return registers, stack and spills of a cubin, which the disassembler in triton's wheel reports."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = output_of("cuobjdump", "-res-usage", file.name)
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),
        "spills": int(re.search(r"LOCAL:(\d+)", usage)[1]),
    }


def output_of(program, *arguments):
    """Return what one of the NVIDIA programs in triton's wheel prints."""
    return subprocess.run([NVIDIA_BINARIES / program, *arguments], check=True, capture_output=True, text=True,
                          timeout=300).stdout


def disassembled(kernels):
    """Return the lines of instructions of each kernel, for sm_90. Addresses count from the first kernel's begin.

    All kernels are disassembled at once, as one block of code, because a start of the disassembler takes half a second.
    """
    codes = [machine_code(kernel.asm["cubin"]) for kernel in kernels]
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        lines = re.findall(r"/\*[0-9a-f]{4,}\*/ +[^;]*;", output_of("nvdisasm", "-ndf", "-b", "SM90", file.name))
    assert len(lines) * INSTRUCTION_BYTES == sum(map(len, codes)), "not every instruction has a line"
    lines = iter(lines)
    return ["\n".join(islice(lines, len(code) // INSTRUCTION_BYTES)) for code in codes]


def machine_code(cubin):
    """Return the instructions of the one function of a cubin, which is an ELF file of 64 bits (elf(5))."""
    sections_at, = struct.unpack_from("<Q", cubin, 40)
    size, count, of_names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQ", cubin, sections_at + size * index) for index in range(count)]
    names_at = sections[of_names][4]
    (code,) = (cubin[begin : begin + length] for name, _, _, _, begin, length in sections
               if cubin.startswith(b".text.", names_at + name))
    return code


def instruction_figures(sass, ptx):
    """Return counts of instructions of a kernel, from its disassembly and from its PTX."""
    copies = re.findall(r"\bLDGSTS\S*", sass)                                  # asynchronous loads to shared memory
    wide = sum(copy.endswith(".128") for copy in copies)
    return {
        "LDG.narrow": len(re.findall(r"\bLDG\.E\.[US](?:8|16)\b", sass)),       # of an entry or less
        "LDGSTS.128": wide,
        "LDGSTS.narrower": len(copies) - wide,
        "counted after a barrier": counted_after_a_barrier(ptx),
        "e4m3x2": ptx.count("e4m3x2"),                                         # conversions of numbers of e4m3
        "HMMA": len(re.findall(r"\bHMMA\b", sass)),
        "HGMMA": len(re.findall(r"\bHGMMA\b", sass)),
        "FMUL in loops": multiplications_in_loops(sass),
    }


def counted_after_a_barrier(ptx):
    """Return whether each atomic operation on global memory releases and acquires at the scope of the GPU, and has a
    barrier of the program between it and the accesses to global memory before it, and after it.

    Returns None without an atomic operation.
    """
    found = re.findall(r"\bbar\.sync|\bst\.global|\bld\.global|\bcp\.async\.c|\batom\.[\w.]*", ptx)
    at = [index for index, what in enumerate(found) if what.startswith("atom.")]
    return all(found[index].startswith("atom.global.gpu.acq_rel") and found[index - 1] == found[index + 1] == "bar.sync"
               for index in at) if at else None


def multiplications_in_loops(sass):
    """Return the number of FMUL instructions in each loop that has matrix instructions, from a disassembly.

    A loop is what lies between a branch to an earlier instruction and its target. Loops around such loops do not count.
    """
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/ +([^;]*);", sass)
    at_address = {int(address, 16): index for index, (address, _) in enumerate(instructions)}
    counts, last_begin = [], -1
    for index, (_, text) in enumerate(instructions):
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        begin = at_address.get(int(target[1], 16), index) if target else index
        body = [text for _, text in instructions[begin:index]]
        if begin > last_begin and any(re.search(r"\bHG?MMA\b", text) for text in body):
            last_begin = begin
            counts.append(sum(bool(re.search(r"\bFMUL\b", text)) for text in body))
    return counts


def amd_figures(kernel):
    """Return registers and spills from the assembler's own summary, and the number of v_mfma instructions."""
    text = kernel.asm["amdgcn"]

    def number(name):
        return int(re.search(rf"\.{name}:\s*(\d+)", text)[1])

    return {
        "registers": number("vgpr_count"),
        "stack_bytes": number("private_segment_fixed_size"),
        "spills": number("vgpr_spill_count"),
        "MFMA": text.count("v_mfma"),
    }


def main(gpu_names, *, has_all):
    for index, name in enumerate(gpu_names):
        target, shared_kib, multiprocessors = GPUS[name]
        triton.runtime.driver.set_active(AbsentGpu(target, shared_kib, multiprocessors, index))
        counted = []                                        # (record, kernel) of what is disassembled
        for label in CASES if has_all or name == "sm_90" else ON_EACH_GPU:
            compiled.clear()
            began = time.perf_counter()
            CASES[label]()
            seconds = time.perf_counter() - began
            for kernel in {id(kernel): kernel for kernel in compiled}.values():
                record = {
                    "gpu": name, "case": label, "kernel": kernel.metadata.name, "warps": kernel.metadata.num_warps,
                    "stages": kernel.metadata.num_stages, "shared_bytes": kernel.metadata.shared,
                    "shared_limit_bytes": shared_kib * 1024, "seconds": round(seconds, 2),
                    **(nvidia_figures(kernel) if target.backend == "cuda" else amd_figures(kernel)),
                }
                if name == "sm_90" and kernel.metadata.name in DISASSEMBLED:
                    counted.append((record, kernel))
                else:
                    print(json.dumps(record), flush=True)
        for (record, kernel), sass in zip(counted, disassembled([kernel for _, kernel in counted]) if counted else ()):
            print(json.dumps({**record, **instruction_figures(sass, kernel.asm["ptx"])}), flush=True)
        if name == "sm_90":
            print(json.dumps({"gpu": "variants", **variants_by_alignment()}), flush=True)
            print(json.dumps({"gpu": "refusals", **refusals_of_an_unknown_kind()}), flush=True)
            print(json.dumps({"gpu": "blocks", "found": list(shared_memory_of_blocks())}), flush=True)


if __name__ == "__main__":
    names = [name for name in sys.argv[1:] if name != "--all"]
    main(names or list(GPUS), has_all="--all" in sys.argv)
