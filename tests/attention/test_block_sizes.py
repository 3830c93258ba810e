"""KV cache blocks with which attention cannot run on a GPU are refused by name, before memory is taken.

tests/kernels/test_ahead_of_time.py compiles attention for all other block sizes.
"""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from batch_manager.attention import block_sizes
from batch_manager.attention.interface import LayerAttention
from batch_manager.config import BLOCK_SIZES, KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.errors import ConfigError
from batch_manager.models.spec import ModelSpec
from batch_manager.runtime import build_backend, packing

pytest.importorskip("triton", reason="triton is not installed")
from batch_manager.triton_kernels import device_limits  # noqa: E402
from batch_manager.triton_kernels.device_limits import DeviceLimits  # noqa: E402
from batch_manager.triton_kernels.paged_attention_context import context_settings  # noqa: E402

H100 = DeviceLimits(227 * 1024, 132, operands_in_shared=True)
L40 = DeviceLimits(99 * 1024, 142, operands_in_shared=False)
MI300 = DeviceLimits(64 * 1024, 304, operands_in_shared=False, rows_pass_shared=False)
GPUS = {"H100": H100, "L40": L40, "MI300": MI300}


def spec_of(head_size, group=4):
    return ModelSpec(
        architecture="X", num_layers=1, num_heads=2 * group, num_kv_heads=2, head_size=head_size, hidden_size=32,
        intermediate_size=64, vocab_size=100, max_position_embeddings=512, norm_epsilon=1e-5, rotary=None,
        attention=(LayerAttention(scale=1.0),), tie_word_embeddings=False, activation="silu")


def accepted(monkeypatch, limits, head_size, dtype, group=4):
    """Return the block sizes that are accepted on a GPU with these limits."""
    monkeypatch.setattr(device_limits, "device_limits", lambda: limits)

    def is_accepted(size):
        try:
            block_sizes.refuse_large_blocks(spec_of(head_size, group), size, dtype, "cuda:0 (H100)")
        except ConfigError:
            return False
        return True

    return [size for size in block_sizes.gpu_block_sizes() if is_accepted(size)]


def test_every_size_but_the_smallest_is_for_gpus():
    assert block_sizes.gpu_block_sizes() == BLOCK_SIZES[1:] == (16, 32, 64, 128, 256)


@pytest.mark.parametrize("gpu, head_size, group, dtype, largest", [
    ("H100", 128, 4, torch.float32, 256), ("H100", 256, 4, torch.bfloat16, 256), ("H100", 256, 4, torch.float32, 128),
    ("H100", 64, 71, torch.bfloat16, 256), ("H100", 64, 71, torch.float32, 128), ("H100", 512, 4, torch.float32, 64),
    ("L40", 128, 4, torch.bfloat16, 256), ("L40", 256, 4, torch.bfloat16, 128), ("L40", 256, 4, torch.float32, 64),
    ("MI300", 256, 4, torch.bfloat16, 128), ("MI300", 256, 4, torch.float32, 64), ("MI300", 64, 4, torch.float32, 256),
])
def test_blocks_are_accepted_up_to_the_size_that_fits_into_shared_memory(monkeypatch, gpu, head_size, group, dtype,
                                                                         largest):
    sizes = accepted(monkeypatch, GPUS[gpu], head_size, dtype, group)
    assert sizes == [size for size in block_sizes.gpu_block_sizes() if size <= largest]


@pytest.mark.parametrize("limits", [H100, L40, MI300])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_tiles_of_context_attention_fit_with_every_block_size(limits, element_bytes):
    for head_size in (16, 32, 64, 128, 256):
        for size in block_sizes.gpu_block_sizes():
            settings = context_settings(head_size, element_bytes, size, limits)
            tile = settings.keys * head_size * element_bytes
            rows = settings.rows * (head_size + settings.keys) * element_bytes if limits.rows_pass_shared else 0
            assert max(1, 2 * (settings.num_stages - 1)) * tile + rows <= limits.shared_bytes, (head_size, size)


@pytest.fixture
def build(monkeypatch):
    """build(size, **options) builds a backend with blocks of `size` tokens on a pretended H100.

    The model, in float32, has heads of 256 entries. Its weights are not loaded: where the backend would go on after the
    checks, it raises AssertionError.
    """
    loaded = []

    def plan(*given, **options):
        raise AssertionError("the checks are over")

    monkeypatch.setattr(build_backend, "resolve_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(build_backend, "device_name", lambda device: "cuda:0 (NVIDIA H100)")
    monkeypatch.setattr(build_backend, "use_triton", lambda device: True)
    monkeypatch.setattr(build_backend, "free_memory", lambda device: 2**36)
    monkeypatch.setattr(build_backend, "on_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(build_backend, "divide_memory", plan)
    monkeypatch.setattr(device_limits, "device_limits", lambda: H100)
    monkeypatch.setattr(build_backend, "load_model", lambda *given, **options: loaded.append(1) or SimpleNamespace(
        spec=spec_of(256), dtype=torch.float32, device=torch.device("cuda", 0)))

    def made(size, attention_factory=None, **options):
        loaded.clear()
        build_backend.build_native_backend(
            "folder", TrtGptModelOptionalParams(
                cuda_graphs=False, kv_cache_config=KvCacheConfig(tokens_per_block=size), **options),
            layout=packing.packed, num_slots=1, attention_factory=attention_factory)

    made.loaded = loaded
    return made


def test_blocks_of_eight_tokens_are_refused_on_a_gpu_before_the_model_is_loaded(build):
    with pytest.raises(ConfigError, match=re.escape(
            "KvCacheConfig.tokens_per_block is 8 and the device is cuda:0 (NVIDIA H100); on a GPU, attention needs "
            "blocks of at least 16 tokens; set tokens_per_block to one of 16, 32, 64, 128, 256; 64 is the default")):
        build(8)
    assert build.loaded == []


def test_blocks_that_do_not_fit_into_shared_memory_are_refused_by_their_size(build):
    with pytest.raises(ConfigError, match=re.escape(
            "KvCacheConfig.tokens_per_block is 256: with 4 query heads per kv head, a head size of 256 and float32, "
            "a thread block of the attention kernel takes 295,168 bytes of shared memory; cuda:0 (NVIDIA H100) has "
            "232,448 bytes for a thread block; lower tokens_per_block to at most 128, or use a dtype of two bytes")):
        build(256)
    for options in ({}, {"deterministic": True}):
        with pytest.raises(AssertionError, match="the checks are over"):
            build(128 if not options else 256, **options)          # `deterministic` does not use decode attention


def test_another_attention_and_torch_on_a_gpu_have_blocks_of_any_size(build, monkeypatch):
    for size in (8, 256):
        with pytest.raises(AssertionError, match="the checks are over"):
            build(size, attention_factory=lambda spec, pool: None)
    monkeypatch.setattr(build_backend, "use_triton", lambda device: False)
    for size in (8, 256):
        with pytest.raises(AssertionError, match="the checks are over"):
            build(size)
