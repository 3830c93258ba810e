"""Compare launch settings of the attention kernels and of `fused_linear`, for the shapes in the goals of goals.py.

The report has a Record for each tried setting. It ends with the fastest settings, as code for the settings functions of
`triton_kernels`; see settings_code.py. Settings whose results are wrong, or that do not compile, are not
timed.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from batch_manager.triton_kernels.device_limits import device_limits
from batch_manager.triton_kernels.fused_linear_settings import settings_of_few_rows
from batch_manager.triton_kernels.paged_attention_context import context_settings
from batch_manager.triton_kernels.paged_attention_decode import decode_settings

from .bench import Bench, OutOfTimeError
from .correctness import KERNELS
from .engines import joined
from .fused_products import Product, fused_launch, products_of, separate_launch, weights_of
from .pages import Heads, PagedSequences, relative_error
from .records import NOT_REACHED, Record
from .settings_candidates import context_candidates, decode_candidates, fused_candidates
from .settings_code import Trial, text_of
from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, TINY

TRIAL_SECONDS = 1.5             # estimate, including the compilation of the kernel
WIDE, NARROW, SMALL = Heads(8, 4, 128), Heads(3, 3, 64), Heads(2, 2, 16)
FUSED_ROWS = (1, 16)
Launch = Callable[[int], torch.Tensor]


def run(bench: Bench) -> Iterator[Record]:
    trials: list[Trial] = []
    for trial in _trials(bench):
        trials.append(trial)
        bench.add_text("settings", _text(bench, trials))
        yield _record(trial, next(one for one in trials if one.is_like(trial) and one.is_present))


def _text(bench: Bench, trials: list[Trial]) -> str:
    return text_of(trials, bench.clock.name, device_limits().multiprocessors)


def _record(trial: Trial, present: Trial) -> Record:
    case = f"{trial.case}: {trial.text}"
    if trial.timing is None:
        return Record("settings", case, status=NOT_REACHED, note=trial.problem)
    predicted = f"predicted {trial.predicted}" if trial.predicted and trial.is_present else ""
    return Record("settings", case, present.microseconds or trial.microseconds, trial.microseconds, "us",
                  trial.timing.spread, figures=joined(trial.rate, predicted))


def _trials(bench: Bench) -> Iterator[Trial]:
    """Yield the trials, those of the most important kernels first."""
    yield from _decode_trials(bench)
    yield from _context_trials(bench)
    yield from _fused_trials(bench)


# ---------------------------------------------------------------------- attention


def _decode_trials(bench: Bench) -> Iterator[Trial]:
    random, limits = np.random.default_rng(1), device_limits()
    shapes: tuple[tuple[Heads, tuple[tuple[str, np.ndarray, str], ...]], ...] = (
        (WIDE, (("64 sequences of 4,096", np.full(64, 4096), "255 to 275 us"),
                ("64 sequences of 1 to 8,192", random.integers(1, 8193, 64), "280 us"),
                ("one sequence of 16,384", np.array([16384]), ""))),
        (NARROW, (("256 sequences of 512", np.full(256, 512), "29 us"),)))
    for heads, cases in bench.pick(shapes, ((SMALL, (("2 sequences", np.array([200, 33]), ""),)),)):
        block = bench.pick(64, 16)
        key = (heads.size, block, bench.dtype.itemsize)
        present = decode_settings(*key, limits)
        for text, lengths, predicted in cases:
            case = f"decode, heads of {heads.size}, {text}"
            sequences = PagedSequences(bench, heads, lengths, tokens_per_block=block)
            for settings in decode_candidates(present, *key, limits)[: bench.pick(None, 2)]:
                bench.require(TRIAL_SECONDS)
                with _replaced("paged_attention_decode", "decode_settings", settings):
                    timing, problem = _timed(bench, partial(sequences.decode, settings.resident_programs),
                                             sequences.decode_error)
                yield Trial("decode_settings", key, case, settings, settings == present, timing,
                            _bandwidth(bench, sequences, timing), predicted, problem)


def _bandwidth(bench: Bench, sequences: PagedSequences, timing: Any) -> str:
    if timing is None or bench.is_dry:
        return ""
    rate = sequences.kv_bytes / timing.median
    return f"{rate / 1e9:,.0f} GB/s, {rate / bench.copy_bytes_s:.2f} of copying"


def _context_trials(bench: Bench) -> Iterator[Trial]:
    limits = device_limits()
    shapes = ((WIDE, "380 to 440 TFLOP/s"), (Heads(8, 4, 64), ""))
    for heads, predicted in bench.pick(shapes, ((SMALL, ""),)):
        block = bench.pick(64, 16)
        key = (heads.size, bench.dtype.itemsize, block, None)
        present = context_settings(*key[:3], limits)
        cases = (("one sequence of 16,384", 1, 16384, predicted), ("8 sequences of 1,024", 8, 1024, ""))
        for text, count, length, expected in bench.pick(cases, (("one sequence", 1, 20, ""),)):
            sequences = PagedSequences(bench, heads, np.full(count, length), length, tokens_per_block=block)
            for settings in context_candidates(present, block)[: bench.pick(None, 2)]:
                bench.require(TRIAL_SECONDS)
                with _replaced("paged_attention_context", "context_settings", settings):
                    timing, problem = _timed(bench, partial(sequences.context, settings.rows),
                                             sequences.context_error, launches=4, repeats=10)
                rate = "" if timing is None or bench.is_dry else (
                    f"{sequences.causal_operations / timing.median / 1e12:,.0f} TFLOP/s")
                yield Trial("context_settings", key, f"context, heads of {heads.size}, {text}", settings,
                            settings == present, timing, rate, expected, problem)


# ---------------------------------------------------------------------- fused products


def _fused_trials(bench: Bench) -> Iterator[Trial]:
    for shape in bench.pick((LLAMA_135M, LLAMA_1B, LLAMA_8B), (TINY,)):
        for product in products_of(shape):
            yield from _of_product(bench, f"{shape.name}, {product.name}", product)
            bench.clock.forget()


def _of_product(bench: Bench, name: str, product: Product) -> Iterator[Trial]:
    limits, weights = device_limits(), weights_of(bench, product)
    out_size = product.weight_rows // (2 if product.is_gated else 1)
    key = (product.in_size, out_size, product.is_gated, bench.dtype.itemsize)
    present = settings_of_few_rows(*key, limits)
    predicted = "" if bench.is_dry else f"{weights[0].nbytes / bench.copy_bytes_s * 1e6:.1f} us at copy bandwidth"
    for rows in FUSED_ROWS[: bench.pick(None, 1)]:
        launch, error_of = _launch_of(bench, product, weights, rows)
        for settings in fused_candidates(present, *key, limits)[: bench.pick(None, 2)]:
            bench.require(TRIAL_SECONDS / len(FUSED_ROWS))
            with _replaced("fused_linear", "fused_linear_settings", settings):
                timing, problem = _timed(bench, lambda made=launch: made, error_of)
            rate = "" if timing is None or bench.is_dry else f"{weights[0].nbytes / timing.median / 1e9:,.0f} GB/s"
            yield Trial("settings_of_few_rows", key, f"fused, {name}, {rows} rows", settings, settings == present,
                        timing, rate, predicted, problem)


def _launch_of(bench: Bench, product: Product, weights: list[torch.Tensor],
               rows: int) -> tuple[Launch, Callable[[Launch], float]]:
    """Return two functions. The first launches the fused product.

    The second takes a launch, and returns the relative error of the fused product on fixed operands.
    """
    x, norm_weight = bench.normal(rows, product.in_size), bench.normal(product.in_size)
    residual, sums = bench.normal(rows, product.weight_rows), bench.normal(rows, product.weight_rows)
    fused = fused_launch(bench, product, norm_weight)
    expected = separate_launch(bench, product, norm_weight)(x, weights[0], residual.clone())
    return (lambda number: fused(x, weights[number % len(weights)], sums),
            lambda _: relative_error(fused(x, weights[0], residual.clone()), expected))


# ---------------------------------------------------------------------- measuring


@contextlib.contextmanager
def _replaced(module: str, function: str, settings: Any) -> Iterator[None]:
    """Context manager: within the context, the function `function` of the kernel module `module` returns `settings`."""
    found = importlib.import_module(f"{KERNELS}.{module}")
    original = getattr(found, function)
    setattr(found, function, lambda *_: settings)
    try:
        yield
    finally:
        setattr(found, function, original)


def _timed(bench: Bench, make: Callable[[], Launch], error_of: Callable[[Launch], float],
           **options: int) -> tuple[Any, str]:
    """Return (timing of the launch that `make` returns, ""), or (None, why the launch is not timed).

    error_of   (launch) -> relative error of its result
    """
    try:
        launch = make()
        error = error_of(launch)
        if error > bench.allowed_error:
            return None, f"the result is wrong: relative error {error:.2g}"
        return bench.clock.time(launch, **options), ""
    except OutOfTimeError:
        raise
    except Exception as error:                   # settings may exceed what the device or the compiler supports
        lines = str(error).strip().splitlines()
        return None, f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
