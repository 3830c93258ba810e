"""G3-fused: time each matrix product of a layer, fused with its neighbours in one launch, and in separate launches.

The neighbours are a norm before the product, and an activation or a sum after it. The decisions of
`triton_kernels/fused_linear_settings.py` rest on estimates, which the measured ratios are meant to replace.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from batch_manager.triton_kernels.dispatch import kernel
from batch_manager.triton_kernels.fused_linear_settings import FEW_ROWS, ROW_COUNTS

from .bench import Bench
from .pages import relative_error
from .records import FAILED, Record
from .shapes import LLAMA_1B, LLAMA_8B, LLAMA_135M, TINY, Shape

ROWS = (1, 8, FEW_ROWS, *ROW_COUNTS[1:])
MOST_INPUTS_OF_MANY_ROWS = 4096    # with more inputs, fused products of more than FEW_ROWS rows cannot pay
WEIGHTS_BYTES = 200 << 20          # least size of the matrices in use, more than the cache holds
MOST_WEIGHTS = 20


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a layer, with the operations fused into it."""

    name: str
    in_size: int
    weight_rows: int
    is_normed: bool
    is_gated: bool
    adds: bool


def products_of(shape: Shape) -> tuple[Product, ...]:
    query, key = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    return (Product("norm, qkv", shape.hidden, query + 2 * key, True, False, False),
            Product("out, residual", query, shape.hidden, False, False, True),
            Product("norm, gate and up, activation", shape.hidden, 2 * shape.intermediate, True, True, False),
            Product("down, residual", shape.intermediate, shape.hidden, False, False, True))


def run(bench: Bench) -> Iterator[Record]:
    for shape in bench.pick((LLAMA_135M, LLAMA_1B, LLAMA_8B), (TINY,)):
        for product in products_of(shape):
            weights = weights_of(bench, product)
            for rows in ROWS[: bench.pick(None, 1)]:
                if rows > FEW_ROWS and product.in_size > MOST_INPUTS_OF_MANY_ROWS:
                    break
                bench.require(1)
                yield _measured(bench, f"{shape.name}, {product.name}, {rows} rows", product, weights, rows)
            del weights
            bench.clock.forget()


def weights_of(bench: Bench, product: Product) -> list[torch.Tensor]:
    num_bytes = product.weight_rows * product.in_size * bench.dtype.itemsize
    count = bench.pick(max(2, min(MOST_WEIGHTS, -(-WEIGHTS_BYTES // num_bytes))), 2)
    return [bench.normal(product.weight_rows, product.in_size) / product.in_size**0.5 for _ in range(count)]


def _measured(bench: Bench, case: str, product: Product, weights: list[torch.Tensor], rows: int) -> Record:
    x, norm_weight = bench.normal(rows, product.in_size), bench.normal(product.in_size)
    residual = bench.normal(rows, product.weight_rows)
    separate, fused = separate_launch(bench, product, norm_weight), fused_launch(bench, product, norm_weight)
    error = relative_error(fused(x, weights[0], residual.clone()), separate(x, weights[0], residual.clone()))
    if error > bench.allowed_error:
        return Record("G3-fused", case, status=FAILED, note=f"the two differ: relative error {error:.2g}")
    theirs, ours = (bench.clock.time(lambda number, launch=launch: launch(x, weights[number % len(weights)], residual))
                    for launch in (separate, fused))
    return Record("G3-fused", case, theirs.median * 1e6, ours.median * 1e6, "us", ours.spread,
                  figures=f"{weights[0].nbytes / ours.median / 1e9:.0f} GB/s of weights in one launch")


Launch = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]       # (x, weight, residual) -> result


def separate_launch(bench: Bench, product: Product, norm_weight: torch.Tensor) -> Launch:
    norm, activate = kernel("rms_norm", bench.device), kernel("gated_activation", bench.device)

    def launch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if product.adds:
            return residual.addmm_(x, weight.t())
        result = functional.linear(norm(x, norm_weight, 1e-5) if product.is_normed else x, weight)
        return activate(result) if product.is_gated else result
    return launch


def fused_launch(bench: Bench, product: Product, norm_weight: torch.Tensor) -> Launch:
    linear = kernel("fused_linear", bench.device)

    def launch(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, norm_weight=norm_weight if product.is_normed else None, epsilon=1e-5,
                      activation="silu" if product.is_gated else None, gated=product.is_gated,
                      residual=residual if product.adds else None)
    return launch
