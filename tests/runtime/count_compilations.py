"""Counts the variants of Triton kernels that the native backend compiles in its warm-up and in the steps after it.

    python count_compilations.py [--every-pair] FOLDER [FOLDER ...]     each FOLDER has a config.json

The program prints a JSON object for each folder, and one with the memory that sampling and attention allocate. The
counts include variants of fused products. No kernel is compiled or launched: a replacement of Triton's driver pretends
that the machine has a GPU, and compilations are only counted. The outputs of kernels stay 0, and their `finite` flags
are true. The process must run without TRITON_INTERPRET, and nothing else in it may use triton.
test_no_compilation_while_serving.py runs this program.
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

from batch_manager.attention.interface import GenerationInputs, LayerAttention, PackedStep
from batch_manager.config import KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.handover import BlockTableUpdates, ContextWork, GenerationWork, ScheduledBatch, SlotSetup
from batch_manager.models import load_model
from batch_manager.runtime import packing
from batch_manager.runtime.build_backend import build_native_backend
from batch_manager.runtime.forms.fixed.fused import FusedBody, compared_tokens, record_launches
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels import dispatch
from batch_manager.triton_kernels.device_limits import device_limits

TOKENS_PER_BLOCK, MAX_BATCH, MAX_PAGES = 16, 256, 128
VOCAB, MAX_BEAM_WIDTH, NUM_SLOTS, CONTEXT = 50, 6, 40, 20
TABLES = torch.zeros((MAX_BATCH + 1, MAX_PAGES), dtype=torch.int32)

SAMPLED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.1}
# Options of sequences. Each is used with and without sampling.
WANTED = (
    {}, {"return_log_probs": True}, {"end_id": 3}, {"stop_words": ((5,), (6, 7))}, {"bad_words": ((8,), (9, 10))},
    {"embedding_bias": np.zeros(VOCAB, np.float32)}, {"return_generation_logits": True},
    {"return_context_logits": True},
    {"sampling": {"repetition_penalty": 1.2}}, {"sampling": {"presence_penalty": 0.5, "frequency_penalty": 0.1}},
    {"sampling": {"no_repeat_ngram_size": 2}}, {"sampling": {"min_length": 4}, "end_id": 3},
    {"sampling": {"top_p": 0.5, "top_p_decay": 0.9}},
)

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
    dispatch._decide = lambda device_type: "triton"
    torch.empty = lambda *size, dtype=None, **more: (torch.ones if dtype == torch.bool else torch.zeros)(
        *size, dtype=dtype, **more)
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
    """Yield PackedSteps of many shapes.

    For each batch size, these are generation steps of sequences of equal length, a generation step with one long and
    otherwise short sequences, and steps with contexts, alone and with generation.

    every_pair   True: every batch size gets every length in blocks. False: batch sizes up to 4, powers of two and their
                 neighbours get every length; other batch sizes get every 16th length, with varying offset
    """
    whole = TOKENS_PER_BLOCK * MAX_PAGES
    for batch in range(1, MAX_BATCH + 1):
        has_all = every_pair or batch <= 4 or any((batch + more).bit_count() == 1 for more in (-1, 0, 1))
        for pages in range(1, MAX_PAGES + 1) if has_all else range(1 + batch % 16, MAX_PAGES + 1, 16):
            yield packed_step([1] * batch, [pages * TOKENS_PER_BLOCK] * batch, 0)
        yield packed_step([1] * batch, [whole] + [1] * (batch - 1), 0)
        for context, cached in ((1, 0), (16, 0), (37, 100), (37, 1900)):
            generation = [min(11 * batch, whole)] * batch
            yield packed_step([context] + [1] * batch, [cached + context, *generation], 1)
            yield packed_step([context] * 3, [cached + context] * 3, 3)


def serve(backend):
    """Run steps in the backend with all options of WANTED, sampled and greedy, and with beams. Return their number."""
    num_steps = 0

    def step(**work):
        nonlocal num_steps
        num_steps += 1
        backend.start(ScheduledBatch(num_steps, max_beam_width=MAX_BEAM_WIDTH, **work)).finish()

    rows, pages = np.divmod(np.arange(NUM_SLOTS * MAX_BEAM_WIDTH * 4, dtype=np.int32), np.int32(4))
    step(context=(ContextWork(0, np.zeros(1, np.int32), 0, True, SlotSetup(prompt_length=1).continuing([0])),),
         block_table_updates=BlockTableUpdates(rows, pages, 0 * rows))

    def serve_sequences(setups, context=CONTEXT, width=1):
        prompt, slots = np.zeros(context, np.int32), np.arange(len(setups), dtype=np.int32)
        rows = np.arange(len(setups) * MAX_BEAM_WIDTH * 4, dtype=np.int32)
        tables = BlockTableUpdates(rows // 4, rows % 4, 0 * rows)
        step(context=tuple(ContextWork(slot, prompt, 0, True, setup.continuing(prompt))
                           for slot, setup in enumerate(setups)), block_table_updates=tables)
        for position in range(context, context + 2):
            step(generation=GenerationWork(slots, np.full(len(setups), position, np.int32), width))

    kinds = []
    for wanted in WANTED:
        for sampled in ({}, SAMPLED):
            sampling = SamplingConfig(**{**sampled, **wanted.get("sampling", {})})
            kinds.append(SlotSetup(**{**wanted, "sampling": sampling}, prompt_length=CONTEXT))
    for count in (1, 2, 16, 17):
        for kind in kinds:
            serve_sequences([kind] * count)
    serve_sequences(kinds)
    serve_sequences(kinds[::-1], context=1)
    for width in range(2, MAX_BEAM_WIDTH + 1):
        for kind in (kinds[0], kinds[2 * 8]):
            sampling = SamplingConfig(beam_width=width, repetition_penalty=kind.sampling.repetition_penalty)
            for count in (1, 3, 16):
                serve_sequences([SlotSetup(sampling, max_new_tokens=9, prompt_length=CONTEXT)] * count, width=width)
    return num_steps


def serve_attention(attention, spec, every_pair):
    """Run all shapes of `steps` in the backend's attention, without a model. Return the number of runs."""
    heads = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
    packed = torch.zeros(2 * MAX_BATCH, sum(heads), spec.head_size, dtype=attention.layer_pools[0].dtype)
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
    """Run attention for `step` with block tables at a fixed address. Return the number of runs.

    It is 1, or 0 for a step with contexts and for most batch sizes.
    """
    if step.num_contexts or len(step.slots) % 16 > 1:        # every batch size is served above
        return 0
    work = attention.plan_generation(step.kv_lengths)
    is_split = any(starts[-1] for _, starts in work.values())
    attention.bind(GenerationInputs(
        torch.from_numpy(step.kv_lengths), torch.from_numpy(step.slots), TABLES,
        {window: (torch.from_numpy(work_list), torch.from_numpy(starts) if is_split else None)
         for window, (work_list, starts) in work.items()}), None)
    attention.run(0, query, key, value, rotary)
    return 1


class PassedOn:
    """Replaces attention: it returns the queries, because `serve_attention` runs the attention."""

    def run(self, layer, query, key, value, rotary):
        return query.flatten(1)


def count_fused(folder):
    """Count the kernel variants that fused steps compile: [{kernel: number}, {kernel: number}].

    The first entry counts the steps at load, which compare fused with separate products, the second all later steps.
    """
    decide, dispatch.use_triton = dispatch.use_triton, lambda device: True
    loaded = load_model(folder, device=torch.device("cpu"), dtype="bfloat16", load_format="dummy")
    recording, gives_logits = record_launches(loaded, loaded.spec)
    fused = FusedBody(recording, loaded.device, device_limits(), gives_logits=gives_logits)
    counts = []
    for numbers_of_rows in (compared_tokens(fused, MAX_BATCH), range(1, fused.most_rows + 1)):
        compiled.clear()
        for rows in numbers_of_rows:
            fused.run(torch.zeros((rows, loaded.spec.hidden_size), dtype=torch.bfloat16),
                      torch.zeros(rows, dtype=torch.int64), PassedOn())
        counts.append(dict(compiled))
    dispatch.use_triton = decide
    return counts


def scratch():
    """Return [(bytes that `sample_token` allocates besides its results, planned bytes)] for some shapes."""
    from batch_manager.triton_kernels.sample_scratch import scratch_bytes
    from batch_manager.triton_kernels.sample_token import sample_token

    found, zeros = [], torch.zeros
    for dtype in (torch.bfloat16, torch.float32):
        for rows, vocabulary in ((1, 50), (3, 9000)):
            numbers, integers, longs = (zeros(rows, dtype=kind) for kind in (torch.float32, torch.int32, torch.int64))
            logits, taken = zeros(rows, vocabulary, dtype=dtype), []
            torch.zeros = lambda *size, taken=taken, **more: taken.append(zeros(*size, **more)) or taken[-1]
            sample_token(logits, numbers, integers, numbers, longs, integers, tokens=integers, log_probs=numbers,
                         finite=integers, min_p=numbers)
            torch.zeros = zeros
            found.append((sum(tensor.nbytes for tensor in taken), scratch_bytes(rows, vocabulary, dtype.itemsize)))
    return found


def attention_scratch():
    """Return [(bytes of partial results that a step with split contexts and rows allocates, planned bytes)], for an
    engine without and with `deterministic`."""
    from batch_manager.attention.triton_paged import TritonPagedAttention
    from batch_manager.triton_kernels.attention_scratch import attention_scratch_bytes

    heads, size, length, taken, zeros = [8, 2, 2], 128, 9000, [], torch.zeros
    spec = SimpleNamespace(num_heads=8, num_kv_heads=2, head_size=size, num_layers=1,
                           attention=(LayerAttention(scale=0.1),))
    found, step = [], packed_step([64, 1, 1, 1], [length] * 4, 1)
    most_keys = 64 * step.block_tables.shape[1]
    for deterministic in (False, True):
        attention = TritonPagedAttention(spec, zeros((2, 1, 2, 2, 64, size), dtype=torch.bfloat16),
                                         deterministic=deterministic)
        attention.receive([torch.from_numpy(array) for array in attention.plan(step)])
        packed = zeros(step.num_tokens, sum(heads), size, dtype=torch.bfloat16)
        torch.zeros = lambda *size, **more: taken.append(zeros(*size, **more)) or taken[-1]
        attention.run(0, *packed.split(heads, 1), None)
        torch.zeros = zeros
        partial = [tensor.nbytes for tensor in taken if tensor.dtype == torch.float32 and len(tensor)]
        assert len(partial) == (2 if deterministic else 4)       # one launch computes contexts and rows
        found.append((sum(partial), attention_scratch_bytes(3, 8, 2, size, 2, 132, most_keys * deterministic)))
        taken.clear()
    return found


def main(folders, every_pair):
    on_gpu = pretend_to_have_a_gpu()
    for index, folder in enumerate(folders):
        on_gpu(index)                                   # another device, with an empty kernel cache
        params = TrtGptModelOptionalParams(
            device="cpu", load_format="dummy", dtype="bfloat16", num_threads=1,
            kv_cache_config=KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, max_tokens=MAX_PAGES * TOKENS_PER_BLOCK))
        backend = build_native_backend(folder, params, layout=packing.packed, num_slots=NUM_SLOTS,
                                       max_beam_width=MAX_BEAM_WIDTH)
        warm_up = dict(compiled)
        compiled.clear()
        num_steps, attention = serve(backend), backend._parts.attention
        spec = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=16, num_layers=1)
        num_attention_steps = serve_attention(attention, spec, every_pair)
        serving = dict(compiled)
        on_gpu(len(folders) + index)                    # for the other device, the backend has compiled fused products
        fused = count_fused(folder)
        print(json.dumps({"steps": num_steps, "attention_steps": num_attention_steps, "warm_up": warm_up,
                          "serving": serving, "fused": fused}), flush=True)
        compiled.clear()
    print(json.dumps({"scratch": scratch(), "attention_scratch": attention_scratch()}))


if __name__ == "__main__":
    with torch.inference_mode():
        main([folder for folder in sys.argv[1:] if folder != "--every-pair"], "--every-pair" in sys.argv)
