"""With a deterministic LayerContext, a layer gives a row the same bits alone and in any batch, for various shapes."""

import random

import pytest
import torch

from batch_manager.errors import ConfigError
from batch_manager.layers.context import LayerContext
from batch_manager.layers.embedding import Head
from batch_manager.layers.linear import Linear
from batch_manager.layers.mlp import GatedMlp, Mlp
from batch_manager.layers.norm import LayerNorm, RmsNorm
from batch_manager.triton_kernels.cpu import deterministic_linear
from batch_manager.weights.source import DummyWeights

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDS = 40


def parts(dtype, deterministic=True):
    """Return random weights and a LayerContext: the first two arguments of a layer's constructor."""
    return DummyWeights(3, CPU, dtype), LayerContext(device=CPU, dtype=dtype, deterministic=deterministic)


def same_in_any_company(layer, size, dtype, seed, most=70):
    """Assert that `layer` gives each of 100 random rows the same bits alone and in batches of up to `most` rows.

    size   number of elements of a row
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pool = (torch.randn(100, size, generator=generator) * 2).to(dtype)
    alone = torch.cat([layer(pool[row : row + 1]) for row in range(len(pool))])
    for _ in range(ROUNDS):
        members = [draw.randrange(len(pool)) for _ in range(draw.randint(1, most))]
        assert torch.equal(layer(pool[members]), alone[members])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "out"), [(33, 77), (64, 112), (576, 96), (1604, 60), (2048, 40)])
def test_linear(dtype, size, out):
    same_in_any_company(Linear(*parts(dtype), ["a"], size, [out], bias=True), size, dtype, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_to_the_residual(dtype):
    layer = Linear(*parts(dtype), ["a"], 1604, [60])

    def add(rows):
        return layer.add_to(rows[:, :60].clone(), rows)

    same_in_any_company(add, 1604, dtype, 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_head(dtype):
    same_in_any_company(Head(*parts(dtype), "head", 1003, 96), 96, dtype, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [33, 96, 576, 4099])
@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_norms(dtype, size, kind):
    same_in_any_company(kind(*parts(dtype), "norm", size, 1e-5), size, dtype, 4)


@pytest.mark.parametrize("kind", [RmsNorm, LayerNorm])
def test_norms_leave_their_rows_alone_and_agree_with_the_normal_mode(kind):
    rows = torch.randn(5, 3, 40)[:, 1] if kind is LayerNorm else torch.randn(5, 3, 40)
    before = rows.clone()
    normal = kind(*parts(torch.float32, deterministic=False), "norm", 40, 1e-5)
    torch.testing.assert_close(kind(*parts(torch.float32), "norm", 40, 1e-5)(rows), normal(rows), rtol=1e-5, atol=1e-6)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_new", "relu"])
def test_feed_forward_networks(dtype, activation):
    gated = GatedMlp(*parts(dtype), "gated", 40, 101, activation)
    plain = Mlp(*parts(dtype), "expand", "project", 40, 101, activation)

    def both(rows):
        return plain.add_to(gated.add_to(rows.clone(), rows), rows)

    same_in_any_company(both, 40, dtype, 5)


def test_a_machine_whose_products_depend_on_a_rows_place_is_refused(monkeypatch):
    monkeypatch.setattr(deterministic_linear, "agreeing_sizes", lambda *operands, sizes: ())
    with pytest.raises(ConfigError, match="deterministic is set, but on this machine the product of 64 rows"):
        Linear(*parts(torch.float32), ["a"], 41, [43])(torch.zeros(1, 41))
