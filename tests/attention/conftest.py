"""Fixtures: packed steps over a pool of random numbers, and the results that the oracles compute for them."""

import importlib.util
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_manager.attention.interface import LayerAttention, PackedStep
from batch_manager.attention.torch_fixed_tiles import FixedTileAttention
from batch_manager.attention.torch_paged import TorchPagedAttention
from batch_manager.triton_kernels.reference.paged_attention_context import paged_attention_context
from batch_manager.triton_kernels.reference.paged_attention_decode import paged_attention_decode
from batch_manager.triton_kernels.reference.rope_kv_append import rope_kv_append

# The folder is neither a package nor on sys.path.
_file = importlib.util.spec_from_file_location("compiled_attention", Path(__file__).with_name("compiled_attention.py"))
_module = importlib.util.module_from_spec(_file)
_file.loader.exec_module(_module)
CompiledAttention = _module.CompiledAttention


@lru_cache(maxsize=2)
def normal_numbers(count, seed):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Layout:
    num_heads: int
    num_kv_heads: int
    head_size: int
    windows: tuple
    dtype: torch.dtype = torch.float32
    tokens_per_block: int = 16
    sink: int = 0
    scale: float | None = None            # None: head_size ** -0.5
    softcaps: tuple | None = None         # None: no layer has one
    slopes: tuple | None = None           # of all heads, equal in every layer
    slope_factor: float | None = None
    sink_logits: tuple | None = None      # of all heads, equal in every layer

    @property
    def num_layers(self):
        return len(self.windows)

    @property
    def attention(self):
        scale = self.head_size**-0.5 if self.scale is None else self.scale
        softcaps = (None,) * self.num_layers if self.softcaps is None else self.softcaps
        return tuple(LayerAttention(scale=scale, window=window, softcap=softcap, alibi_slopes=self.slopes,
                                    alibi_bfloat16_factor=self.slope_factor,
                                    has_sink_logits=self.sink_logits is not None)
                     for window, softcap in zip(self.windows, softcaps, strict=True))

    @property
    def more(self):
        """The optional keyword arguments of an attention's `run`: `sink_logits`, if this layout has them."""
        return {} if self.sink_logits is None else {"sink_logits": torch.tensor(self.sink_logits)}

    def pool(self, num_blocks, seed=0):
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.tokens_per_block, self.head_size)
        count = math.prod(shape)
        return normal_numbers(1 << (count - 1).bit_length(), seed)[:count].view(shape).to(self.dtype, copy=True)

    def rotary(self, positions=512, size=None):
        """Return rotary tables for the first `size` entries of each head; None rotates all entries."""
        size = self.head_size if size is None else size
        angles = torch.outer(torch.arange(positions).float(), 0.3 ** torch.arange(size // 2).float())
        return SimpleNamespace(cos=angles.cos(), sin=angles.sin())

    def packed_qkv(self, num_tokens, seed=1):
        heads = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        packed = torch.randn((num_tokens, sum(heads), self.head_size),
                             generator=torch.Generator().manual_seed(seed)).to(self.dtype)
        return packed.split(heads, 1)


def make_step(contexts, generation, num_blocks, tokens_per_block, consecutive=False):
    """Return a packed step whose block tables use the blocks of the pool in random or consecutive order.

    contexts     (cached tokens, new tokens) of each context sequence
    generation   cached tokens of each generation sequence, which has one new token
    """
    work = [*contexts, *((cached, 1) for cached in generation)]
    order = np.arange(num_blocks) if consecutive else np.random.default_rng(0).permutation(num_blocks)
    needed = [-(-(cached + new) // tokens_per_block) for cached, new in work]
    assert sum(needed) <= num_blocks
    tables = np.full((len(work), max(needed)), order[-1], np.int32)        # stale entries hold a valid id
    taken, positions, pool_slots = 0, [], []
    for row, ((cached, new), count) in enumerate(zip(work, needed)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        place = np.arange(cached, cached + new)
        positions.append(place)
        pool_slots.append(tables[row, place // tokens_per_block].astype(np.int64) * tokens_per_block
                          + place % tokens_per_block)
    starts = np.cumsum([0, *(new for _, new in work)])
    return PackedStep(
        token_ids=np.zeros(starts[-1], np.int32), positions=np.concatenate(positions).astype(np.int32),
        pool_slots=np.concatenate(pool_slots), slots=np.arange(len(work), dtype=np.int32),
        query_starts=starts.astype(np.int32), kv_lengths=np.array([sum(lengths) for lengths in work], np.int32),
        block_tables=tables, num_contexts=len(contexts), logits_rows=(starts[1:] - 1).astype(np.int64))


def give_back(layout, step, pools, stale=-1):
    """Write NaN to the blocks of the step that no layer can see, in all pools. Return the number of these blocks.

    A layer sees the blocks of its window and of the sink tokens. The block-table entries of the invisible blocks, and
    the entries after the last block of each sequence, are set to `stale`. If `stale` is None, they stay unchanged.
    """
    size, given_back = layout.tokens_per_block, 0
    for row, (begin, length) in enumerate(zip(step.query_starts, step.kv_lengths)):
        first_position = length - (step.query_starts[row + 1] - begin)
        for index in range(-(-layout.sink // size), max(first_position - max(layout.windows) + 1, 0) // size):
            for pool in pools:
                pool[step.block_tables[row, index]] = torch.nan
            if stale is not None:
                step.block_tables[row, index] = stale
            given_back += 1
        if stale is not None:
            step.block_tables[row, -(-length // size) :] = stale               # entries past the sequence's own
    return given_back


def oracle(layout, pool, layer, step, query, key, value, rotary):
    """Return the attention results of `layer` for the step, computed by the oracles of the kernels.

    Writes the keys and values of the step's tokens to `pool`.
    """
    view, attention = pool[:, layer], layout.attention[layer]
    more = {**layout.more, "softcap": attention.softcap, "alibi_bfloat16_factor": attention.alibi_bfloat16_factor,
            "alibi_slopes": None if layout.slopes is None else torch.tensor(layout.slopes)}
    scale, window = attention.scale, attention.window
    cos, sin = (None, None) if rotary is None else (rotary.cos, rotary.sin)
    tables, lengths = torch.from_numpy(step.block_tables), torch.from_numpy(step.kv_lengths)
    split, contexts = step.num_context_tokens, step.num_contexts
    result = torch.empty_like(query)
    rotated = rope_kv_append(query[:split].clone(), key[:split], value[:split], view,
                             torch.from_numpy(step.pool_slots[:split]), torch.from_numpy(step.positions[:split]), cos,
                             sin)
    paged_attention_context(rotated, view, tables[:contexts], torch.from_numpy(step.query_starts[: contexts + 1]),
                            lengths[:contexts], None, scale, window, out=result, sink=layout.sink, **more)
    paged_attention_decode(query[split:], key[split:], value[split:], view, tables[contexts:], lengths[contexts:], None,
                           None, scale, window, out=result[split:], sink=layout.sink, cos_table=cos, sin_table=sin,
                           **more)
    return result.flatten(1)


@pytest.fixture(params=[TorchPagedAttention, FixedTileAttention, CompiledAttention],
                ids=["torch", "fixed tiles", "compiled"])
def implementation(request):
    """Run a test once with each attention class that runs on a CPU."""
    return request.param


@pytest.fixture(params=[TorchPagedAttention, CompiledAttention], ids=["torch", "compiled"])
def attention_class(request):
    return request.param


@pytest.fixture
def layout():
    return Layout


@pytest.fixture
def step_of():
    return make_step


@pytest.fixture
def without_what_left():
    return give_back


@pytest.fixture
def by_oracle():
    return oracle
