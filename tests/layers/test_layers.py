"""Each kind of layer computes the right results, and adds them to a residual with `add_to`.

It asks the ports of its LayerContext when it is made.
"""

import json

import pytest
import torch
from torch.nn import functional

from batch_manager.errors import ConfigError
from batch_manager.layers.context import LayerContext
from batch_manager.layers.embedding import Embedding, Head
from batch_manager.layers.linear import Linear
from batch_manager.layers.mlp import ACTIVATIONS, GatedMlp, Mlp
from batch_manager.layers.norm import LayerNorm, RmsNorm
from batch_manager.layers.rotary import Rotary, RotaryParameters
from batch_manager.layers.weight_form import WeightForm
from batch_manager.models import load_model
from batch_manager.weights.source import DummyWeights

CPU = torch.device("cpu")
# float32 and bfloat16 are packed on a CPU that can, float16 never is.
FORMS = [(torch.float32, False), (torch.bfloat16, False), (torch.float16, False), (torch.float32, True),
         (torch.float16, True)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
FUNCTIONS = {"silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
             "gelu_new": lambda x: functional.gelu(x, approximate="tanh")}


class RandomWeights(DummyWeights):
    """Random weights, norms and biases, so that a test notices if one is left out. `given` has them by name."""

    def __init__(self, dtype):
        super().__init__(5, CPU, dtype)
        self.given = {}

    def _fill(self, name, rows):
        super()._fill(name, rows.view(-1, rows.shape[-1]) if rows.dim() == 1 else rows)
        rows.mul_(20)
        self.given[name] = rows.clone().double()


def made(kind, dtype, deterministic, *arguments, **options):
    """Make a layer with random weights. Returns (the layer, {name: tensor in float64})."""
    weights = RandomWeights(dtype)
    context = LayerContext(device=CPU, dtype=dtype, deterministic=deterministic)
    return kind(weights, context, *arguments, **options), weights.given


def rows(dtype, count, size, seed=0):
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got, expected, dtype):
    size = float(expected.abs().max())
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=TOLERANCE[dtype] * size)


@pytest.mark.parametrize("dtype, deterministic", FORMS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 5])
def test_a_linear_map_of_stacked_projections(dtype, deterministic, bias, count):
    layer, given = made(Linear, dtype, deterministic, ["q", "k"], 24, [20, 12], bias=bias)
    x, residual = rows(dtype, count, 24), rows(dtype, count, 32, 1)
    expected = x.double() @ torch.cat([given["q.weight"], given["k.weight"]]).T
    if bias:
        expected += torch.cat([given["q.bias"], given["k.bias"]])
    before = x.clone()
    assert_close(layer(x), expected, dtype)
    assert_close(layer.add_to(residual.clone(), x), expected + residual.double(), dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("transposed", [False, True])
def test_projections_that_the_checkpoint_stores_as_one_tensor(transposed):
    layer, given = made(Linear, torch.float32, False, ["qkv"], 24, [20, 6, 6], bias=True, transposed=transposed)
    weight = given["qkv.weight"].T if transposed else given["qkv.weight"]
    assert weight.shape == (32, 24) and set(given) == {"qkv.weight", "qkv.bias"}
    x = rows(torch.float32, 3, 24)
    assert_close(layer(x), x.double() @ weight.T + given["qkv.bias"], torch.float32)


@pytest.mark.parametrize("dtype, deterministic", FORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_feed_forward_networks_alone_and_added(dtype, deterministic, activation):
    x, residual, f = rows(dtype, 4, 24), rows(dtype, 4, 24, 1), FUNCTIONS[activation]
    gated, given = made(GatedMlp, dtype, deterministic, "mlp", 24, 40, activation, bias=True)
    gate, up = (x.double() @ given[f"mlp.{part}_proj.weight"].T + given[f"mlp.{part}_proj.bias"]
                for part in ("gate", "up"))
    expected = f(gate) * up @ given["mlp.down_proj.weight"].T + given["mlp.down_proj.bias"]
    assert_close(gated(x), expected, dtype)
    assert_close(gated.add_to(residual.clone(), x), expected + residual.double(), dtype)

    plain, given = made(Mlp, dtype, deterministic, "a", "b", 24, 40, activation)
    expected = f(x.double() @ given["a.weight"].T + given["a.bias"]) @ given["b.weight"].T + given["b.bias"]
    assert_close(plain(x), expected, dtype)
    assert_close(plain.add_to(residual.clone(), x), expected + residual.double(), dtype)


@pytest.mark.parametrize("dtype, deterministic", FORMS)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(4, 40), (3, 2, 40)])
def test_norms(dtype, deterministic, offset, shape):
    x = rows(dtype, 6, 40)[: shape[0] * (shape[1] if len(shape) > 2 else 1)].view(shape)
    before, wide = x.clone(), x.double()
    norm, given = made(RmsNorm, dtype, deterministic, "n", 40, 1e-5, weight_offset=offset)
    length = (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(norm(x), wide / length * (offset + given["n.weight"]), dtype)
    norm, given = made(LayerNorm, dtype, deterministic, "n", 40, 1e-5)
    expected = functional.layer_norm(wide, (40,), given["n.weight"], given["n.bias"], 1e-5)
    assert_close(norm(x), expected, dtype)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embeddings_scale_is_rounded_to_the_dtype_first(dtype):
    embedding, _ = made(Embedding, dtype, False, "e", 9, 40, scale=40**0.5)
    ids = torch.tensor([3, 0, 8, 3])
    expected = (embedding.weight[ids].double() * torch.tensor(40**0.5, dtype=dtype).double()).to(dtype)
    assert torch.equal(embedding(ids), expected)
    assert torch.equal(embedding(ids), embedding(ids))               # the table itself is left as it is


@pytest.mark.parametrize("dtype, deterministic", FORMS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_heads_logits(dtype, deterministic, tied, softcap):
    weights = RandomWeights(dtype)
    context = LayerContext(device=CPU, dtype=dtype, deterministic=deterministic)
    embedding = Embedding(weights, context, "e", 33, 24)
    bytes_before = weights.num_bytes
    head = Head(weights, context, "h", 33, 24, tied_to=embedding if tied else None, softcap=softcap)
    added = weights.num_bytes - bytes_before
    assert added == embedding.weight.nbytes or tied and added == 0
    hidden = rows(dtype, 4, 24)
    expected = hidden.double() @ weights.given["e" if tied else "h"].T
    if softcap is not None:
        expected = softcap * (expected / softcap).tanh()
    assert head(hidden).dtype == (dtype if softcap is None else torch.float32)
    assert_close(head(hidden), expected, dtype)


def test_a_rotary_table_of_a_part_of_a_head():
    rotary = Rotary(LayerContext(device=CPU, dtype=torch.bfloat16), RotaryParameters(theta=100.0), 6, 11)
    angles = torch.outer(torch.arange(11.0), 100.0 ** (-torch.arange(0, 6, 2) / 6))
    torch.testing.assert_close((rotary.cos, rotary.sin), (angles.cos(), angles.sin()), rtol=0, atol=1e-6)


class OfOneLayer:
    """An AdapterPort with one module, for the layer "a.b", which adds the sums of its inputs. It notes who asked."""

    def __init__(self):
        self.asked = []

    def of(self, names, in_size, sizes, *, row_order, scale, share):
        assert row_order is None and scale is None and share.of is None
        self.asked.append((names, in_size, sizes))
        return self if names == ("a.b",) else None

    def add(self, y, x):
        y.add_(x.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype, deterministic", FORMS)
def test_an_adapter_of_a_layer_is_added_to_its_product(dtype, deterministic):
    port, x, residual = OfOneLayer(), rows(dtype, 6, 8), rows(dtype, 6, 8)
    context = LayerContext(device=CPU, dtype=dtype, deterministic=deterministic, adapters=port)
    for name in ("a.b", "a.c"):
        weights = RandomWeights(dtype)
        layer = Linear(weights, context, [name], 8, [8])
        expected = x.double() @ weights.given[f"{name}.weight"].T + (x.double().sum(-1, True) if name == "a.b" else 0)
        assert_close(layer(x), expected, dtype)
        assert_close(layer.add_to(residual.clone(), x), residual + expected, dtype)
    assert port.asked == [(("a.b",), 8, [8]), (("a.c",), 8, [8])]      # once, when the layer is made


def test_a_weight_form_of_ones_own_is_asked_for_every_matrix():
    asked = []

    def times_two(stored, context):
        asked.append((tuple(stored.weight.shape), stored.bias))
        return None if stored.weight.shape[0] == 9 else WeightForm(lambda x: 2 * x, (), None, (), shares_weight=False)

    context = LayerContext(device=CPU, dtype=torch.float32, weight_form=times_two)
    weights, x = DummyWeights(3, CPU, torch.float32), rows(torch.float32, 4, 8)
    assert torch.equal(Linear(weights, context, ["a.b"], 8, [8])(x), 2 * x)
    embedding = Embedding(weights, context, "h", 9, 8)
    assert_close(Head(weights, context, "h", 9, 8)(x), x.double() @ embedding.weight.double().T, torch.float32)
    assert asked == [((8, 8), None), ((9, 8), None)]


def test_a_split_that_there_is_not_is_refused():
    with pytest.raises(ConfigError, match="Linear a.b has split='lanes'; expected 'columns', 'heads', 'rows' or None"):
        made(Linear, torch.float32, False, ["a.b"], 8, [8], split="lanes")


@pytest.mark.parametrize("architecture, fields", [
    *((f"{name}ForCausalLM", {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "vocab_size": 50,
                              "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64})
      for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")),
    ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 64})])
def test_every_family_says_how_its_maps_divide(architecture, fields, tmp_path):
    """Attention is split by heads. Projections into the MLP are split by columns, those out of both by rows."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], **fields}))
    model = load_model(tmp_path, device="cpu", load_format="dummy").model
    (layer,) = model.layers
    inner, outer = layer.mlp.expand, layer.mlp.project
    assert [part.split for part in (layer.qkv, layer.out, inner, outer)] == ["heads", "rows", "columns", "rows"]
