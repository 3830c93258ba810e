"""Matrix products are fused with the right norms, activations and sums, and the fused step gives the same logits.

The tests use recordings of operations made by hand, and models of each family.
"""

import contextlib
import copy
import dataclasses
import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from batch_manager.attention.registry import make_attention
from batch_manager.config import TrtGptModelOptionalParams
from batch_manager.layers import weight_form
from batch_manager.layers.context import LayerContext
from batch_manager.layers.recording import LookedUp, NotRecordableError
from batch_manager.models.loading import LoadedModel
from batch_manager.models.registry import find_model
from batch_manager.runtime.device.running import Uploads
from batch_manager.runtime.forms import comparison
from batch_manager.runtime.forms.comparison import Tolerance, difference_from_layers, first_step
from batch_manager.runtime.forms.fixed.fused import FusedBody, compared_tokens, make_fused_body, record_launches
from batch_manager.runtime.forms.fixed.fusion import FusedProduct, fuse
from batch_manager.runtime.forms.fixed.recording import Activation, LaunchRecording, Norm, Product, Sum
from batch_manager.runtime.forms.form import NoForm
from batch_manager.runtime.forms.table import attempt
from batch_manager.runtime.kv_pool import make_kv_pool
from batch_manager.triton_kernels import dispatch
from batch_manager.triton_kernels.device_limits import DeviceLimits
from batch_manager.triton_kernels.reference.rms_norm import rms_norm
from batch_manager.weights.json_file import Fields
from batch_manager.weights.matrices import Dense
from tests.deterministic import differential
from tests.deterministic.differential import DECODER, _RecordedWeights

CONFIGS = copy.deepcopy(differential.CONFIGS)          # other tests change the sizes in the original
CPU = torch.device("cpu")
LIMITS = DeviceLimits(shared_bytes=227 * 1024, multiprocessors=132, operands_in_shared=True)
OWN_MODELS = Path(__file__).parents[3] / "own_models"
OWN = {"gemma2": ("Gemma2", {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh",
                             "sliding_window": 20, "query_pre_attn_scalar": 7, "head_dim": 24}),
       "stablelm": ("StableLm", {"architectures": ["StableLmForCausalLM"], "use_qkv_bias": True,
                                 "layer_norm_eps": 1e-5})}
BLOCK_TOKENS = 32


# ---------------------------------------------------------------------- recordings made by hand


def matrix(outputs, inputs, bias=False):
    draw = torch.Generator().manual_seed(outputs * 1000 + inputs)
    return Dense(torch.randn(outputs, inputs, generator=draw) / inputs**0.5,
                       torch.randn(outputs, generator=draw) if bias else None)


def ones(size):
    return torch.linspace(0.5, 1.5, size)


def recorded(operate, width=12):
    recording = LaunchRecording(torch.float32)
    recording.result = operate(recording.incoming(width)).register
    return recording


def kinds(steps):
    """Return the kind of each launch: "attend", "norm", "product", "activation", "sum" or a fused product.

    A fused product is "P", with "n" before it for a norm, and "a" and "+" after it for an activation and a sum.
    """
    def kind(step):
        if isinstance(step, FusedProduct):
            adds = "+" if step.product.adds else ""
            return ("n" if step.norm else "") + "P" + ("a" if step.activation else "") + adds
        return {Norm: "norm", Product: "product", Activation: "activation", Sum: "sum"}.get(type(step), "attend")
    return [kind(step) for step in steps]


def block(x):
    """A norm and a gated feed-forward network, whose result is added to x."""
    gate_up = x.normed(ones(12), None, 1e-5).multiplied(matrix(20, 12), 20)
    return gate_up.activated("silu", gated=True).multiplied(matrix(12, 10, bias=True), 12, adds_to=x)


def norm_for_two_products(x):
    normed = x.normed(ones(12), ones(12), 1e-5)
    return normed.multiplied(matrix(12, 12), 12) + normed.multiplied(matrix(12, 12, True), 12)


def norm_of_what_is_overwritten(x):
    """Two products read one norm of x. The first product is added to x, before the second reads the norm.

    The norm is not fused, because the second product would compute it from the overwritten x.
    """
    normed = x.normed(ones(12), None, 1e-5)
    x = normed.multiplied(matrix(12, 12), 12, adds_to=x)
    return normed.multiplied(matrix(5, 12), 5).activated("relu", gated=False).multiplied(matrix(12, 5), 12, adds_to=x)


def norm_that_others_read(x):
    normed = x.normed(ones(12), None, 1e-5)
    return normed + normed.multiplied(matrix(12, 12), 12)


def product_that_others_read(x):
    product = x.multiplied(matrix(12, 12), 12)
    return product.activated("gelu", gated=False) + product


def norm_of_heads(x):
    return x.multiplied(matrix(24, 12), 24).view(len(x), -1, 6).normed(ones(6), None, 1e-5).view(len(x), -1)


def norm_at_the_end(x):
    return block(x).normed(ones(12), None, 1e-5)


def some_columns(x):
    left, right = x.multiplied(matrix(24, 12), 24).split_with_sizes([10, 14], 1)
    return right.normed(ones(14), None, 1e-5).multiplied(matrix(10, 14), 10) + left.activated("relu", gated=False)


def added_to_some_columns(x):
    """The product of a norm is added to one half of the columns of a wider tensor.

    Neither the sum nor the norm is fused, because a fused product adds to all columns of a tensor.
    """
    wide = x.multiplied(matrix(24, 12), 24)
    left, right = wide.split_with_sizes([12, 12], 1)
    return x.normed(ones(12), None, 1e-5).multiplied(matrix(12, 12, bias=True), 12, adds_to=right) + left


def learned_positions(x):
    return block(x + LookedUp(torch.arange(60.0).view(5, 12) / 60))


ALL_FUSED = [
    (block, ["nPa", "P+"]), (norm_for_two_products, ["nP", "nP", "sum"]),
    (norm_of_what_is_overwritten, ["norm", "product", "Pa", "product"]),
    (norm_that_others_read, ["norm", "product", "sum"]),
    (product_that_others_read, ["product", "activation", "sum"]),
    (norm_of_heads, ["product", "norm"]), (norm_at_the_end, ["nPa", "P+", "norm"]),
    (some_columns, ["product", "norm", "product", "activation", "sum"]),
    (added_to_some_columns, ["product", "norm", "product", "sum"]),
    (learned_positions, ["sum", "nPa", "P+"])]


@pytest.mark.parametrize("operate, expected", ALL_FUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_shares_a_launch_gives_what_separate_launches_give(operate, expected, monkeypatch):
    recording = recorded(operate)
    assert kinds(fuse(recording, lambda *sizes: True)) == expected
    separate = fuse(recording, lambda *sizes: False)
    assert separate == recording.operations
    results = []
    for pays in (True, False):
        monkeypatch.setattr("batch_manager.runtime.forms.fixed.fused.is_fused", lambda *sizes, pays=pays: pays)
        hidden = torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
        step = FusedBody(recording, CPU, LIMITS, gives_logits=False)
        results.append(step.run(hidden, torch.tensor([4, 0, 2]), None))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


LLAMA_135M = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


@torch.inference_mode()
@pytest.mark.parametrize("dtype, most_rows", [(torch.bfloat16, 256), (torch.float32, 16)])
def test_up_to_how_many_rows_a_layer_of_a_small_llama_takes_five_launches(monkeypatch, dtype, most_rows):
    monkeypatch.setitem(CONFIGS, "llama", {**CONFIGS["llama"], **LLAMA_135M})
    loaded = load("llama", monkeypatch, dtype)
    recording, gives_logits = record_launches(loaded, loaded.spec)
    fused = FusedBody(recording, CPU, LIMITS, gives_logits=gives_logits)
    assert fused.most_rows == most_rows
    for rows in (1, 16, most_rows):
        assert kinds(fused._steps(rows))[:-1] == 2 * LLAMA_LAYER
    assert kinds(fused._steps(most_rows + 1)) == [
        *2 * ["norm", "product", "attend", "product", "norm", "product", "activation", "product"], "norm", "product"]
    # Each number of row tiles has its own settings, so a step of it is compared, and compiles its kernels.
    tiled = [64, 128, 192, 256] if most_rows == 256 else []
    assert compared_tokens(fused, 256) == [1, 5, *tiled]
    assert compared_tokens(fused, 65) == [1, 5, *tiled[:2]] and compared_tokens(fused, 16) == [1, 5]


def test_what_is_asked_of_each_product():
    asked = []
    fuse(recorded(block), lambda *sizes: asked.append(sizes) or True)
    assert set(asked) == {(12, 10, True, "rms", 2), (10, 12, False, "none", 1)}
    # If one product cannot take the norm, the norm stays a launch for all of them.
    steps = fuse(recorded(norm_for_two_products), lambda *sizes: len(asked.append(sizes) or asked) % 2 == 1)
    assert kinds(steps) == ["norm", "product", "product", "sum"]


def test_a_product_is_not_added_to_the_rows_that_it_multiplies():
    with pytest.raises(NotRecordableError, match="it adds a product to the rows that it multiplies"):
        recorded(lambda x: x.multiplied(matrix(12, 12), 12, adds_to=x))
    with pytest.raises(NotRecordableError, match="it multiplies by a matrix that is not stored as a plain tensor"):
        recorded(lambda x: x.multiplied(None, 12))


# ---------------------------------------------------------------------- models


def load(family, monkeypatch, dtype=torch.float32):
    """Return a small model of the family with random weights, which are stored as on a GPU (not packed for a CPU)."""
    monkeypatch.setattr(weight_form, "_packed", lambda weight: weight)
    if family in OWN:
        name, fields = OWN[family]
        config = {**DECODER, **CONFIGS["llama"], **fields, "hidden_size": 96}
        spec = importlib.util.spec_from_file_location(f"own_{family}", OWN_MODELS / f"{family}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        made = getattr(module, name)
    else:
        config = CONFIGS[family] if family == "gpt2" else {**DECODER, **CONFIGS[family]}
        made = find_model(config["architectures"][0])
    spec = made.read_spec(Fields(config, "config.json"), config["architectures"][0])
    torch.manual_seed(0)
    weights = _RecordedWeights()
    weights.dtype = dtype
    model = made(spec, weights, LayerContext(device=CPU, dtype=dtype))
    return LoadedModel(spec, model, 0, CPU, dtype)


def pool_of(loaded):
    return make_kv_pool(loaded.spec, 2, BLOCK_TOKENS, loaded.dtype, CPU)


def attention_of(loaded):
    return make_attention(loaded.spec, pool_of(loaded))


LLAMA_LAYER, GPT2_LAYER = ["nP", "attend", "product", "nPa", "product"], ["nP", "attend", "P+", "nPa", "P+"]
QWEN3_LAYER = ["nP", "norm", "norm", "attend", "product", "nPa", "product"]
GEMMA2_LAYER = ["nP", "attend", "product", "norm", "sum", "nPa", "product", "norm", "sum"]
MODELS = {"llama": 2 * LLAMA_LAYER + ["nP"], "mistral": 2 * LLAMA_LAYER + ["nP"], "qwen2": 2 * LLAMA_LAYER + ["nP"],
          "qwen3": 2 * QWEN3_LAYER + ["nP"], "gpt2": ["sum", *2 * GPT2_LAYER, "nP"],
          "stablelm": 2 * LLAMA_LAYER + ["nP"], "gemma2": 2 * GEMMA2_LAYER + ["norm"]}


def parts_of(loaded):
    return SimpleNamespace(attention=attention_of(loaded), uploads=Uploads(CPU), tokens_per_block=BLOCK_TOKENS)


def difference(fused, loaded, attention, step):
    return difference_from_layers(loaded, attention, Uploads(CPU).send, step, fused.run,
                                  gives_logits=fused.gives_logits)


@torch.inference_mode()
@pytest.mark.parametrize("family", MODELS)
def test_models_in_fewer_launches_give_their_own_logits(family, monkeypatch):
    loaded = load(family, monkeypatch)
    recording, gives_logits = record_launches(loaded, loaded.spec)
    assert gives_logits == (family != "gemma2")                     # gemma2 caps its logits
    assert kinds(fuse(recording, lambda *sizes: True)) == MODELS[family]
    fused = FusedBody(recording, CPU, LIMITS, gives_logits=gives_logits)
    monkeypatch.setitem(comparison.TOLERANCES, torch.float32, Tolerance(1e-5, 0))
    for count in (1, 3, 16, 100):
        step = first_step(count, loaded.spec.vocab_size, BLOCK_TOKENS)
        assert difference(fused, loaded, attention_of(loaded), step) == ""


class NormsHeads:
    """Wraps attention, and applies the norms of queries and keys to them, as the Triton kernels do."""

    norms_heads = True

    def __init__(self, attention):
        self.plan, self._run = attention.plan, attention.run

    def run(self, layer, query, key, value, rotary, norms=None):
        if norms is not None:
            query, key = (rms_norm(rows, weight, norms.epsilon, weight_offset=norms.weight_offset)
                          for rows, weight in ((query, norms.query_weight), (key, norms.key_weight)))
        return self._run(layer, query, key, value, rotary)


@torch.inference_mode()
@pytest.mark.parametrize("family, launches", [("qwen3", LLAMA_LAYER), ("gemma3", GEMMA2_LAYER),
                                              ("llama", LLAMA_LAYER)])
def test_norms_of_heads_are_part_of_an_attention_that_applies_them(family, launches, monkeypatch):
    loaded = load(family, monkeypatch)
    attention = NormsHeads(attention_of(loaded))
    recording, gives_logits = record_launches(loaded, loaded.spec, norms_heads=True)
    assert kinds(fuse(recording, lambda *sizes: True))[: 2 * len(launches)] == 2 * launches
    step = first_step(3, loaded.spec.vocab_size, BLOCK_TOKENS)
    fused = FusedBody(recording, CPU, LIMITS, gives_logits=gives_logits)
    monkeypatch.setitem(comparison.TOLERANCES, torch.float32, Tolerance(1e-5, 0))
    assert difference(fused, loaded, attention, step) == ""
    # The model itself gives what it gives if the layers launch the norms.
    hidden, positions = loaded.model.embed(torch.arange(3)), torch.arange(3)
    found = []
    for given in (attention, attention_of(loaded)):
        given.plan(step)
        found.append(loaded.model.forward(hidden.clone(), positions, given))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


QWEN3_600M = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
              "head_dim": 128}


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 32, 256])
def test_a_step_of_qwen3_has_two_launches_a_layer_fewer_with_norms_in_attention(rows, monkeypatch):
    monkeypatch.setitem(CONFIGS, "qwen3", {**CONFIGS["qwen3"], **QWEN3_600M})
    loaded = load("qwen3", monkeypatch, torch.bfloat16)
    counts = []
    for norms_heads in (False, True):
        fused = FusedBody(record_launches(loaded, loaded.spec, norms_heads)[0], CPU, LIMITS, gives_logits=True)
        launches = kinds(fused._steps(rows))
        counts.append(launches.index("attend", launches.index("attend") + 1) - launches.index("attend"))
    print(f"launches of the 28 layers of Qwen3-0.6B, {rows} rows: {28 * counts[0]} before, {28 * counts[1]} now")
    assert counts[1] == counts[0] - 2


class WithSinkLogits:
    """Wraps attention, and passes sink logits to it, as the layers of a model with sink logits do."""

    def __init__(self, attention):
        self.attention = attention

    def run(self, layer, query, key, value, rotary):
        return self.attention.run(layer, query, key, value, rotary, sink_logits=torch.linspace(-1, 2, 6) + layer)


@torch.inference_mode()
def test_slopes_are_the_attentions_and_sink_logits_reach_it(monkeypatch):
    loaded = load("llama", monkeypatch)
    expected = record_launches(loaded, loaded.spec)[0]
    layers = tuple(dataclasses.replace(layer, alibi_slopes=(0.5, 0.2, 0.1, 0.0, 0.3, 1.0), has_sink_logits=True)
                   for layer in loaded.spec.attention)
    spec, forward = dataclasses.replace(loaded.spec, attention=layers), type(loaded.model).forward
    monkeypatch.setattr(type(loaded.model), "forward", lambda self, hidden, positions, attention: forward(
        self, hidden, positions, WithSinkLogits(attention)))
    recording, gives_logits = record_launches(loaded, spec)
    assert kinds(recording.operations) == kinds(expected.operations)
    fused = FusedBody(recording, CPU, LIMITS, gives_logits=gives_logits)
    monkeypatch.setitem(comparison.TOLERANCES, torch.float32, Tolerance(1e-5, 0))
    attention = make_attention(spec, pool_of(loaded))
    assert difference(fused, loaded, attention, first_step(3, spec.vocab_size, BLOCK_TOKENS)) == ""


@torch.inference_mode()
def test_in_bfloat16_the_two_agree_to_within_rounding(monkeypatch):
    loaded = load("llama", monkeypatch, torch.bfloat16)
    monkeypatch.setitem(comparison.TOLERANCES, torch.bfloat16, Tolerance(0.02, 0))
    monkeypatch.setattr("batch_manager.triton_kernels.device_limits.device_limits", lambda: LIMITS)
    assert make_fused_body(parts_of(loaded), loaded, loaded.spec, 256).gives_logits


@torch.inference_mode()
def test_a_tile_of_rows_in_the_place_of_another_is_refused(monkeypatch):
    monkeypatch.setitem(CONFIGS, "llama", {**CONFIGS["llama"], **LLAMA_135M})
    loaded = load("llama", monkeypatch, torch.bfloat16)
    monkeypatch.setattr("batch_manager.triton_kernels.device_limits.device_limits", lambda: LIMITS)
    made = (parts_of(loaded), loaded, loaded.spec, 256)
    assert make_fused_body(*made).most_rows == 256
    linear = dispatch.kernel("fused_linear", CPU)
    monkeypatch.setattr(dispatch, "kernel", lambda name, device: lambda x, weight, residual=None, **options: linear(
        x[torch.arange(len(x)) % 64], weight, residual=residual, **options))
    with pytest.raises(NoForm, match="differs from the layers: by .* in a first step of 128 tokens"):
        make_fused_body(*made)


@torch.inference_mode()
def test_a_recording_that_gives_something_else_is_refused(monkeypatch):
    loaded = load("llama", monkeypatch)
    forward = type(loaded.model).forward

    def with_more_for_tensors(self, hidden, positions, attention):
        if isinstance(hidden, torch.Tensor):
            hidden = hidden * 1.5
        return forward(self, hidden, positions, attention)

    monkeypatch.setattr("batch_manager.triton_kernels.device_limits.device_limits", lambda: LIMITS)
    made = (parts_of(loaded), loaded, loaded.spec, 256)
    assert isinstance(make_fused_body(*made), FusedBody)
    monkeypatch.setattr(type(loaded.model.layers[0].mlp), "add_to", lambda self, residual, x: residual)
    monkeypatch.setattr(type(loaded.model), "forward", with_more_for_tensors)
    with pytest.raises(NoForm, match="differs from the layers: by .* in a first step of 1 token"):
        make_fused_body(*made)


def test_registers_are_given_back_behind_their_last_use(monkeypatch):
    monkeypatch.setattr("batch_manager.runtime.forms.fixed.fused.is_fused", lambda *sizes: False)
    recording, held = recorded(norm_at_the_end), []
    step = FusedBody(recording, CPU, LIMITS, gives_logits=False)
    launches = step._prepare(3)
    given_back = [register for _, read_last in launches for register in read_last]
    assert sorted([*given_back, recording.result]) == list(range(len(recording.widths)))

    def watched(launch):
        def run(registers, *others):
            held.append(sum(register is not None for register in registers))
            launch(registers, *others)
        return run

    step._launches[3] = [(watched(launch), read_last) for launch, read_last in launches]
    step.run(torch.ones(3, 12), torch.zeros(3, dtype=torch.int64), None)
    assert held == [1, 2, 2, 2, 1]                                # the input, and the result of the previous launch


@pytest.mark.parametrize("change, is_wrong", [
    (lambda rows: rows.tanh(), False),
    (lambda rows: rows if not isinstance(rows, torch.Tensor) else 3 * rows, True)])
def test_an_engine_whose_model_cannot_be_recorded_runs_its_layers(change, is_wrong, monkeypatch, caplog):
    """If a model cannot be recorded, or its fused step gives other logits, the engine runs its layers without fusion.

    Other logits are worth a warning. The attention in torch stands in for Triton's, the only one that has fused steps.
    """
    loaded = load("llama", monkeypatch)
    monkeypatch.setattr("batch_manager.triton_kernels.device_limits.device_limits", lambda: LIMITS)
    pool, absent = pool_of(loaded), {}
    parts = SimpleNamespace(attention=make_attention(loaded.spec, pool), uploads=Uploads(CPU),
                            tokens_per_block=BLOCK_TOKENS)

    def made():
        return attempt(absent, loaded.model, TrtGptModelOptionalParams(), "fused",
                       lambda: make_fused_body(parts, loaded, loaded.spec, 2))

    forward = type(loaded.model).forward
    assert isinstance(made(), FusedBody) and absent == {}
    monkeypatch.setattr(type(loaded.model), "forward", lambda self, hidden, positions, attention: forward(
        self, change(hidden), positions, attention))
    with caplog.at_level(logging.INFO, "batch_manager"):
        assert made() is None
    warnings = [f"steps are not fused: {absent['fused']}"] if is_wrong else []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == warnings


class OutOfResources(Exception):
    __module__ = "triton.runtime.errors"


@pytest.mark.parametrize("error, is_survived", [
    (torch.OutOfMemoryError("CUDA out of memory"), True), (OutOfResources("shared memory"), True),
    (RuntimeError("an illegal memory access was encountered"), False)])
def test_fusion_that_does_not_fit_is_left_out(monkeypatch, caplog, error, is_survived):
    def fails(*given):
        raise error

    absent = {}
    with contextlib.nullcontext() if is_survived else pytest.raises(RuntimeError, match="illegal"):
        assert attempt(absent, object(), (), "fused", fails) is None
    assert not is_survived or f"steps are not fused: {absent['fused']}" in caplog.text
