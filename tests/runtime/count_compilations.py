"""Which variants of its kernels Triton attention has compiled by an engine's warm-up, and which while it serves; the
same of fused products.

    python count_compilations.py [--every-pair] FOLDER [FOLDER ...]     a config.json in each; prints an object for each

No kernel is compiled or launched: a stand-in for Triton's driver names a GPU that is not here, and compiling is
replaced by counting. What attention returns is garbage, and nobody looks at it. Needs a process without
TRITON_INTERPRET, and one in which nothing else uses triton. Run by test_no_compilation_while_serving.py.
"""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton
from triton.runtime.jit import JITFunction

from batch_manager.attention.interface import GenerationInputs, PackedStep
from batch_manager.attention.triton_paged import TritonPagedAttention
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.models import load_model
from batch_manager.runtime import layouts
from batch_manager.runtime.fused_step import FusedStep
from batch_manager.runtime.native_backend import build_native_backend
from batch_manager.runtime.step_fusion import COMPARED_TOKENS, record_step
from batch_manager.triton_kernels import dispatch
from batch_manager.triton_kernels.device_limits import device_limits

TOKENS_PER_BLOCK, MAX_BATCH, MAX_PAGES = 16, 256, 128
TABLES = torch.zeros((MAX_BATCH + 1, MAX_PAGES), dtype=torch.int32)

compiled = Counter()


def count_instead_of_compiling(kernel, key, *_):
    compiled[kernel.__name__] += 1
    kernel.device_caches[triton.runtime.driver.active.get_current_device()][0][key] = object()


def find_key_instead_of_launching(kernel, grid):
    return lambda *args, **kwargs: kernel.run(*args, grid=grid, warmup=True, **kwargs)


def pretend_to_have_a_gpu():
    path = Path(__file__).parents[1] / "kernels" / "compile_ahead_of_time.py"
    spec = importlib.util.spec_from_file_location("compile_ahead_of_time", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    JITFunction._do_compile = count_instead_of_compiling
    JITFunction.__getitem__ = find_key_instead_of_launching
    return lambda index: triton.runtime.driver.set_active(module.AbsentGpu(*module.GPUS["sm_90"], index))


def packed_step(query_lengths, kv_lengths, num_contexts):
    starts = np.concatenate([[0], np.cumsum(query_lengths)]).astype(np.int32)
    num_tokens, pages = int(starts[-1]), -(-max(kv_lengths) // TOKENS_PER_BLOCK)
    return PackedStep(
        token_ids=np.zeros(num_tokens, np.int32), positions=np.zeros(num_tokens, np.int32),
        pool_slots=np.zeros(num_tokens, np.int64), slots=np.zeros(len(kv_lengths), np.int32), query_starts=starts,
        kv_lengths=np.array(kv_lengths, np.int32), block_tables=np.zeros((len(kv_lengths), pages), np.int32),
        num_contexts=num_contexts, logits_rows=starts[1:].astype(np.int64) - 1)


def steps(every_pair):
    """Generation of all batch sizes and lengths, one long sequence among short ones, contexts alone and beside it.

    every_pair   of a batch size and a length; otherwise all lengths with small batches and around multiples of 16,
                 and every eighth length, another eighth for the next size, with the others
    """
    whole = TOKENS_PER_BLOCK * MAX_PAGES
    for batch in range(1, MAX_BATCH + 1):
        has_all = every_pair or batch <= 16 or batch % 16 <= 1
        for pages in range(1, MAX_PAGES + 1) if has_all else range(1 + batch % 8, MAX_PAGES + 1, 8):
            yield packed_step([1] * batch, [pages * TOKENS_PER_BLOCK] * batch, 0)
        yield packed_step([1] * batch, [whole] + [1] * (batch - 1), 0)
        for context, cached in ((1, 0), (16, 0), (37, 100)):
            generation = [min(11 * batch, whole)] * batch
            yield packed_step([context] + [1] * batch, [cached + context, *generation], 1)
            yield packed_step([context] * 3, [cached + context] * 3, 3)


def serve(attention, spec, every_pair):
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    packed = torch.zeros(2 * MAX_BATCH, sum(heads), spec.head_size)
    tables = torch.zeros(TOKENS_PER_BLOCK * MAX_PAGES, spec.head_size // 2)
    rotary = SimpleNamespace(cos=tables, sin=tables.clone())
    count = 0
    for step in steps(every_pair):
        count += 1
        attention.receive([torch.from_numpy(array) for array in attention.plan(step)])
        for layer in range(spec.num_layers):
            attention.run(layer, *packed[: step.num_tokens].split(heads, 1), rotary)
        count += serve_bound(attention, step, *packed[: step.num_tokens].split(heads, 1), rotary)
    return count


def serve_bound(attention, step, query, key, value, rotary):
    """The same generation step over tables that stay where they are."""
    if step.num_contexts or len(step.slots) % 16 > 1:        # all numbers of rows are served above
        return 0
    work = attention.plan_generation(step.kv_lengths)
    attention.bind_generation(GenerationInputs(
        torch.from_numpy(step.kv_lengths), torch.from_numpy(step.slots), TABLES,
        {window: tuple(map(torch.from_numpy, arrays)) for window, arrays in work.items()},
        is_split=any(starts[-1] for _, starts in work.values())))
    attention.run(0, query, key, value, rotary)
    return 1


class PassedOn:
    """In place of attention, which is served above."""

    def run(self, layer, query, key, value, rotary):
        return query.flatten(1)


def count_fused(folder):
    """Variants that fused products compile in the first steps that they are compared in, and in steps after these."""
    decide, dispatch.use_triton = dispatch.use_triton, lambda device: True
    loaded = load_model(folder, device=torch.device("cpu"), dtype="bfloat16", load_format="dummy")
    recording, gives_logits = record_step(loaded, loaded.spec)
    fused = FusedStep(recording, loaded.device, device_limits(), gives_logits=gives_logits)
    counts = []
    for numbers_of_rows in (COMPARED_TOKENS, range(1, FusedStep.most_rows + 1)):
        compiled.clear()
        for rows in numbers_of_rows:
            fused.run(torch.zeros((rows, loaded.spec.hidden_size), dtype=torch.bfloat16),
                      torch.zeros(rows, dtype=torch.int64), PassedOn())
        counts.append(dict(compiled))
    dispatch.use_triton = decide
    return counts


def main(folders, every_pair):
    on_gpu = pretend_to_have_a_gpu()
    for index, folder in enumerate(folders):
        on_gpu(index)                                   # another device, whose cache of kernels is empty
        made = []

        def factory(spec, pool, made=made, **options):
            made.append((TritonPagedAttention(spec, pool, **options), spec))
            return made[0][0]

        params = TrtGptModelOptionalParams(
            device="cpu", load_format="dummy",
            kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, max_tokens=MAX_PAGES * TOKENS_PER_BLOCK))
        build_native_backend(folder, params, layout=layouts.fused, num_slots=4, attention_factory=factory)
        warm_up = dict(compiled)
        compiled.clear()
        num_steps = serve(*made[0], every_pair)
        serving, fused = dict(compiled), count_fused(folder)
        print(json.dumps({"steps": num_steps, "warm_up": warm_up, "serving": serving, "fused": fused}), flush=True)
        compiled.clear()


if __name__ == "__main__":
    with torch.inference_mode():
        main([folder for folder in sys.argv[1:] if folder != "--every-pair"], "--every-pair" in sys.argv)
