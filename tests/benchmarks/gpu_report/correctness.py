"""Compare every kernel with its oracle, in the dtype of the engines, before anything is timed.

Inputs are random, outputs are filled with NaN, and the oracle computes on the same inputs, in float64 except for
sampling and beam search. For integers and flags, such as tokens, the error is the fraction of values that differ. For
all other results, it is the relative norm of the difference. Errors must stay within `Bench.allowed_error`.
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from batch_manager.triton_kernels.context_work_list import FIXED_PART_KEYS
from batch_manager.triton_kernels.dispatch import kernel

from .bench import Bench
from .pages import Heads, PagedSequences, relative_error
from .quantised_products import FORMATS as QUANTISED_FORMATS
from .quantised_products import random_matrix
from .records import FAILED, Record

CHECK_SECONDS = 0.8            # estimate for a kernel, including its compilation
KERNELS = "batch_manager.triton_kernels"


def run(bench: Bench) -> Iterator[Record]:
    for name, check in CHECKS.items():
        bench.require(CHECK_SECONDS)
        try:
            error = check(bench)
        except Exception as problem:
            yield Record("correctness", name, status=FAILED, note=f"{type(problem).__name__}: {problem}"[:300])
            _raise_if_lost(bench)
            continue
        if error > bench.allowed_error:
            yield Record("correctness", name, status=FAILED,
                         note=f"the result is wrong: error {error:.2g}, allowed {bench.allowed_error:.2g}")
        else:
            yield Record("correctness", name, error, bench.allowed_error)


def _raise_if_lost(bench: Bench) -> None:
    """Raise RuntimeError if the device is lost. Then each further kernel would seem to be wrong."""
    try:
        bench.clock.synchronize()
    except RuntimeError as error:
        raise RuntimeError(f"the device is lost; the kernels after this one were not compared: {error}") from error


# ---------------------------------------------------------------------- comparing


def error_of(bench: Bench, name: str, *args: Any, oracle_as_is: bool = False, **kwargs: Any) -> float:
    """Run the kernel `name` and its oracle on equal arguments, and return the largest error.

    The results are compared, and also the tensor arguments after the run, because a kernel may write to them.

    args, kwargs   arguments of the kernel; the oracle gets copies, with floats as float64 unless `oracle_as_is`
    oracle_as_is   whether the copies keep their dtypes, because the tokens that the kernel chooses depend on them
    """
    given = [*args, *kwargs.values()]
    copies = {id(value): _copy(value, wide=not oracle_as_is) for value in given if isinstance(value, torch.Tensor)}
    theirs = [copies.get(id(value), value) for value in given]
    oracle = getattr(importlib.import_module(f"{KERNELS}.reference.{name}"), name)
    expected = oracle(*theirs[: len(args)], **dict(zip(kwargs, theirs[len(args) :], strict=True)))
    result = kernel(name, bench.device)(*args, **kwargs)
    pairs = list(zip(_tensors(result), _tensors(expected), strict=True))
    pairs += [(mine, copies[id(mine)]) for mine in given if isinstance(mine, torch.Tensor)]
    return max(difference(mine, their) for mine, their in pairs)


def difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative norm of the difference or, for integers and flags, the fraction of values that differ.

    Returns infinity if infinite values differ.
    """
    if not mine.is_floating_point():
        return float((mine != theirs).double().mean())
    infinite = theirs.isinf()
    if not torch.equal(mine.isinf(), infinite) or not torch.equal(mine[infinite].double(), theirs[infinite].double()):
        return float("inf")
    return relative_error(mine.masked_fill(infinite, 0), theirs.masked_fill(infinite, 0))


def _copy(value: torch.Tensor, *, wide: bool) -> torch.Tensor:
    return value.to(torch.float64 if wide and value.is_floating_point() else value.dtype, copy=True)


def _tensors(result: Any) -> list[torch.Tensor]:
    return [one for one in (result if isinstance(result, tuple) else (result,)) if isinstance(one, torch.Tensor)]


# ---------------------------------------------------------------------- the kernels


def _rms_norm(bench: Bench) -> float:
    rows, size = bench.pick((64, 4096), (2, 24))
    return error_of(bench, "rms_norm", bench.normal(rows, size), bench.normal(size), 1e-5,
                    residual=bench.normal(rows, size), out=bench.poisoned(rows, size))


def _layer_norm(bench: Bench) -> float:
    rows, size = bench.pick((64, 4096), (2, 24))
    return error_of(bench, "layer_norm", bench.normal(rows, size), bench.normal(size), bench.normal(size), 1e-5,
                    residual=bench.normal(rows, size), out=bench.poisoned(rows, size))


def _activation(bench: Bench) -> float:
    rows, size = bench.pick((64, 3072), (2, 24))
    return error_of(bench, "activation", bench.normal(rows, size), "gelu_new", out=bench.poisoned(rows, size))


def _gated_activation(bench: Bench) -> float:
    rows, size = bench.pick((64, 14336), (2, 24))
    return error_of(bench, "gated_activation", bench.normal(rows, 2 * size), "silu", out=bench.poisoned(rows, size))


def _rope_kv_append(bench: Bench) -> float:
    tokens, heads, block = bench.pick((64, Heads(8, 4, 128), 64), (2, Heads(1, 2, 16), 4))
    query, key, value = bench.normal(tokens, heads.query + 2 * heads.kv, heads.size).split(
        [heads.query, heads.kv, heads.kv], 1)
    pool = bench.normal(2 * tokens // block + 1, 2, heads.kv, block, heads.size)
    slots = bench.tensor(np.random.default_rng(0).permutation(pool.shape[0] * block)[:tokens], torch.int64)
    angles = bench.normal(4096, heads.size // 2, dtype=torch.float32)
    return error_of(bench, "rope_kv_append", query, key, value, pool, slots, bench.integers(0, 4096, tokens),
                    angles.cos(), angles.sin(), query_out=bench.poisoned(tokens, heads.query, heads.size))


def _deterministic_linear(bench: Bench) -> float:
    rows, size, columns = bench.pick((33, 4096, 6144), (3, 20, 17))
    return error_of(bench, "deterministic_linear", bench.normal(rows, size), bench.normal(columns, size),
                    bench.normal(columns), out=bench.poisoned(rows, columns))


def _moe_grouped_gemm(bench: Bench) -> float:
    """Both products of a layer with experts, with few rows and with many."""
    errors = []
    for count, rows, hidden, size in bench.pick(((8, 16, 4096, 14336), (64, 1000, 2048, 1024)), ((3, 2, 20, 17),)):
        order = np.random.default_rng(0).permutation(2 * rows)
        ends = bench.tensor(np.sort(np.random.default_rng(1).integers(0, 2 * rows, count - 1)).tolist() + [2 * rows],
                            torch.int32)
        place, factors = bench.tensor(order, torch.int64), bench.normal(2 * rows, dtype=torch.float32)
        errors.append(error_of(bench, "moe_grouped_gemm", bench.normal(rows, hidden),
                               bench.normal(count, 2 * size, hidden), ends, place // 2))
        errors.append(error_of(bench, "moe_grouped_gemm", bench.normal(2 * rows, size),
                               bench.normal(count, hidden, size), ends, None, place, factors))
    return max(errors)


def _fused_linear(bench: Bench) -> float:
    cases = bench.pick(((1, 4096, 14336), (16, 4096, 14336), (100, 576, 1536), (256, 2048, 8192)), ((3, 20, 18),))
    errors = []
    for rows, size, intermediate in cases:
        weight = bench.normal(2 * intermediate, size) / size**0.5
        errors.append(error_of(
            bench, "fused_linear", bench.normal(rows, size), weight, None, bench.normal(size), None, 1e-5,
            activation="silu", gated=True, out=bench.poisoned(rows, intermediate)))
        errors.append(error_of(
            bench, "fused_linear", bench.normal(rows, size), weight, bench.normal(2 * intermediate), bench.normal(size),
            bench.normal(size), 1e-5, residual=bench.normal(rows, 2 * intermediate)))
    return max(errors)


def _decode(bench: Bench) -> float:
    lengths = bench.pick(np.random.default_rng(2).integers(1, 3000, 128), np.array([5, 17]))
    sequences = PagedSequences(bench, bench.pick(Heads(8, 4, 128), Heads(1, 2, 16)), lengths,
                               tokens_per_block=bench.pick(64, 16))
    return sequences.decode_error(sequences.decode())


def _with_fp8_cache(bench: Bench) -> float:
    sequences = PagedSequences(bench, bench.pick(Heads(8, 4, 128), Heads(1, 2, 16)),
                               bench.pick(np.array([30000, 700, 20]), np.array([40, 3])),
                               tokens_per_block=bench.pick(64, 16), cached=torch.float8_e4m3fn)
    return max(sequences.decode_error(sequences.decode()), sequences.context_error(sequences.context()))


def _decode_in_parts(bench: Bench) -> float:
    lengths = bench.pick(np.array([30000, 700, 1]), np.array([16 * 6, 3]))
    sequences = PagedSequences(bench, bench.pick(Heads(3, 3, 64), Heads(1, 2, 16)), lengths,
                               tokens_per_block=bench.pick(64, 16))
    return sequences.decode_error(sequences.decode())


def _context(bench: Bench) -> float:
    lengths = bench.pick(np.array([1500, 200, 4000]), np.array([9, 20]))
    sequences = PagedSequences(bench, bench.pick(Heads(8, 4, 128), Heads(1, 2, 16)), lengths,
                               new_tokens=bench.pick(200, 9), tokens_per_block=bench.pick(64, 16))
    return sequences.context_error(sequences.context())


def _context_in_parts(bench: Bench) -> float:
    lengths = bench.pick(np.array([16000, 300]), np.array([40, 9]))
    sequences = PagedSequences(bench, bench.pick(Heads(8, 4, 128), Heads(1, 2, 16)), lengths,
                               new_tokens=bench.pick(64, 5), tokens_per_block=bench.pick(64, 16))
    return sequences.context_error(sequences.context(num_parts=bench.pick(None, 2)))


def _context_in_fixed_parts(bench: Bench) -> float:
    """Also return infinity if the number of programs that share the keys of a tile shows in the bits."""
    lengths = bench.pick(np.array([16000, 300, 4000]), np.array([40, 9]))
    sequences = PagedSequences(bench, bench.pick(Heads(8, 4, 128), Heads(1, 2, 16)), lengths,
                               new_tokens=bench.pick(40, 5), tokens_per_block=bench.pick(64, 16))
    launches = [sequences.context(num_parts=programs, part_keys=bench.pick(FIXED_PART_KEYS, 16))
                for programs in (1, bench.pick(None, 2), 3)]
    whole, *split = (launch(0).clone() for launch in launches)
    is_alike = all(torch.equal(one, whole) for one in split)
    return max(map(sequences.context_error, launches)) if is_alike else float("inf")


def _merge(bench: Bench) -> float:
    heads, size = bench.pick((32, 128), (2, 16))
    starts = bench.tensor(np.array([0, 3, 20, 22]), torch.int32)
    return error_of(bench, "paged_attention_merge", bench.normal(22, heads, size, dtype=torch.float32),
                    bench.normal(22, heads, dtype=torch.float32), starts, bench.poisoned(3, heads, size))


def _sample_token(bench: Bench) -> float:
    rows, vocabulary = bench.pick((256, 32000), (4, 50))
    number = np.arange(rows)
    settings = ((np.where(number % 4, 0.8, 0.0), torch.float32), (np.where(number % 4 == 1, 20, 0), torch.int32),
                (np.where(number % 4 == 2, 0.9, 0.0) + (number % 4 == 3), torch.float32))
    return error_of(bench, "sample_token", 3 * bench.normal(rows, vocabulary),
                    *(bench.tensor(values, dtype) for values, dtype in settings),
                    bench.integers(0, 2**31, rows, dtype=torch.int64), bench.integers(0, 4096, rows), oracle_as_is=True)


def _prepare_step(bench: Bench) -> float:
    slots, blocks, rows, num_inputs = bench.pick((257, 2048, 256, 512), (5, 8, 3, 4))
    entries = bench.tensor(np.arange(0, slots * blocks, 5)[: 2 * rows], torch.int64)
    return error_of(bench, "prepare_step", bench.integers(0, 1000, slots, blocks), entries,
                    bench.integers(0, 1000, len(entries)), bench.integers(0, 500, slots, 4, dtype=torch.int64),
                    bench.integers(0, slots, rows, dtype=torch.int64), bench.integers(0, 4096, rows, dtype=torch.int64),
                    bench.integers(0, 500, num_inputs, dtype=torch.int64),
                    embedding=bench.normal(500, bench.pick(4096, 24)), cleared=bench.integers(1, 9, rows, 2048))


def _philox(bench: Bench) -> float:
    rows = bench.pick(1000, 5)
    return error_of(bench, "philox", bench.integers(0, 2**32, rows, 2, dtype=torch.int64),
                    bench.integers(0, 2**32, rows, 4, dtype=torch.int64))


def _histories(bench: Bench) -> tuple[int, torch.Tensor, list[torch.Tensor]]:
    """Return random inputs of the kernels that read token histories.

    The inputs are (number of rows, logits [rows, vocabulary] float32, [token histories, index of the history of each
    row of logits, length of the history of each row of logits]).
    """
    rows, vocabulary, longest = bench.pick((8, 32000, 2048), (2, 40, 24))
    history = bench.integers(0, min(vocabulary, 200), rows + 2, longest)
    order = bench.tensor(np.arange(rows)[::-1].copy() + 2, torch.int64)
    lengths = bench.integers(longest // 2, longest + 1, rows, dtype=torch.int64)
    return rows, bench.normal(rows, vocabulary, dtype=torch.float32), [history, order, lengths]


def _word_lists(bench: Bench, rows: int) -> list[torch.Tensor]:
    """Return the word arguments of a kernel: [word lists, start of each row's list, number of words of each row].

    All rows share one list of two words. The first word has two tokens, and the second has one. A list has the end
    position of each word, followed by the tokens of all words.
    """
    lists = np.array([2, 3, 5, 7, 11], np.int32)
    return [bench.tensor(lists, torch.int32), bench.tensor(np.zeros(rows), torch.int32),
            bench.tensor(np.full(rows, 2), torch.int32)]


def _token_penalties(bench: Bench) -> float:
    rows, logits, history = _histories(bench)
    factors = [bench.tensor(np.linspace(low, high, rows), torch.float32)
               for low, high in ((0.8, 1.5), (0.0, 1.0), (0.0, 0.5))]
    return error_of(bench, "token_penalties", logits, *history, *factors,
                    bench.tensor(np.arange(rows), torch.int32))


def _ban_ngrams(bench: Bench) -> float:
    rows, logits, history = _histories(bench)
    return error_of(bench, "ban_ngrams", logits, *history, bench.tensor(1 + np.arange(rows) % 3, torch.int32))


def _ban_words(bench: Bench) -> float:
    rows, logits, history = _histories(bench)
    return error_of(bench, "ban_words", logits, *history, *_word_lists(bench, rows), 2)


def _match_stop_words(bench: Bench) -> float:
    rows, _, history = _histories(bench)
    tokens = bench.tensor(np.where(np.arange(rows) % 2, 11, 7), torch.int32)
    return error_of(bench, "match_stop_words", tokens, *history, *_word_lists(bench, rows))


def _token_bitmask(bench: Bench) -> float:
    rows, vocabulary = bench.pick((8, 128256), (2, 40))
    return error_of(bench, "token_bitmask", bench.normal(rows, vocabulary),
                    bench.integers(-(2**31), 2**31, rows, -(-vocabulary // 32)))


def _quantised_linear(bits: int, group: int, has_zeros: bool, rows: int, bench: Bench) -> float:
    matrix = random_matrix(bench, *bench.pick((1000, 4096), (20, 40)), bits, group, has_zeros)
    rows, size = bench.pick(rows, 2), bench.pick(4096, 40)
    return error_of(bench, "quantised_linear", bench.normal(rows, size), *matrix, bench.normal(len(matrix[1])))


def _beam_topk(bench: Bench) -> float:
    width, vocabulary = bench.pick((4, 32000), (2, 40))
    rows = 2 * width
    numbers = [bench.normal(rows, dtype=torch.float32).abs() + 0.5, -bench.normal(rows, dtype=torch.float32).abs(),
               bench.tensor(np.array([0.0, 0.3]), torch.float32)]
    starts = bench.tensor(np.array([0, width, rows]), torch.int32)
    return error_of(bench, "beam_topk", bench.normal(rows, vocabulary), *numbers, starts, 2 * width, width,
                    oracle_as_is=True)


def _adapters(bench: Bench) -> dict[str, Any]:
    """Return the arguments of both products of adapters for three projections of a layer, and their sizes."""
    rows, size, outputs, all_ranks = bench.pick((70, 4096, (4096, 1024, 1024), ((64, 16, 8), (5, 0, 64), (16, 16, 16))),
                                                (5, 70, (33, 8, 5), ((3, 0, 17), (1, 1, 1), (0, 2, 0))))
    starts = np.cumsum([0, *(-(-entries // 32) for pair in ((size, one) for one in outputs) for entries in pair)])
    projections = [(k, starts[2 * k], starts[2 * k + 1], sum(outputs[:k]), one) for k, one in enumerate(outputs)]
    most = -(-max(map(max, all_ranks)) // 16) * 16
    bounds = np.linspace(0, rows - 1, len(all_ranks) + 1, dtype=int)          # the last row has no adapter
    tiles = [(first, min(first + 16, end), adapter) for adapter, (begin, end) in enumerate(zip(bounds, bounds[1:]))
             for first in range(begin, end, 16)]
    table = np.random.default_rng(0).permutation(len(all_ranks) * most).reshape(len(all_ranks), most)
    indices = (tiles, table, all_ranks, projections)
    return {"rows": rows, "size": size, "outputs": outputs, "most": most,
            "pages": bench.normal(len(all_ranks) * most, int(starts[-1]) * 32) / size**0.5,
            "indices": [bench.tensor(np.array(values), torch.int32) for values in indices]}


def _lora_shrink(bench: Bench) -> float:
    given = _adapters(bench)
    out = bench.normal(-(-given["size"] // 1024), 3, given["rows"], given["most"], dtype=torch.float32)
    return error_of(bench, "lora_shrink", bench.normal(given["rows"], given["size"]), given["pages"], *given["indices"],
                    out)


def _lora_expand_add(bench: Bench) -> float:
    given = _adapters(bench)
    shrunk = bench.normal(2, 3, given["rows"], given["most"], dtype=torch.float32)
    outputs = given["outputs"]
    return error_of(bench, "lora_expand_add", bench.normal(given["rows"], sum(outputs)), shrunk, given["pages"],
                    *given["indices"], max(outputs), all(size % 32 == 0 for size in outputs))


CHECKS: dict[str, Callable[[Bench], float]] = {
    "rms_norm": _rms_norm, "layer_norm": _layer_norm, "activation": _activation, "gated_activation": _gated_activation,
    "rope_kv_append": _rope_kv_append, "deterministic_linear": _deterministic_linear,
    "moe_grouped_gemm": _moe_grouped_gemm,
    "fused_linear": _fused_linear, **{f"quantised_linear of {rows} rows, {name}": partial(_quantised_linear, *how, rows)
       for (name, how), rows in zip(QUANTISED_FORMATS.items(), (7, 60, 200, 16), strict=True)},
    "lora_shrink": _lora_shrink, "lora_expand_add": _lora_expand_add,
    "paged_attention_decode": _decode, "paged_attention_decode in parts": _decode_in_parts,
    "paged_attention_decode and context over e4m3": _with_fp8_cache,
    "paged_attention_merge": _merge, "paged_attention_context": _context,
    "paged_attention_context in parts": _context_in_parts,
    "paged_attention_context in fixed parts": _context_in_fixed_parts, "sample_token": _sample_token,
    "prepare_step": _prepare_step,
    "philox": _philox, "token_penalties": _token_penalties, "ban_ngrams": _ban_ngrams, "ban_words": _ban_words,
    "match_stop_words": _match_stop_words, "token_bitmask": _token_bitmask, "beam_topk": _beam_topk,
}
