"""Models whose attention and layers run on Triton kernels give the logits of transformers.

The kernels run in Triton's interpreter, in a separate process. The first model also runs with another window, sinks,
ALiBi slopes and sink logits, and must agree with attention in torch. transformers does not support them for this model.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batch_manager.attention.registry import make_attention
from tests.models.conftest import TINY, make_reference
from tests.models.gguf_writing import write_gguf
from tests.weights.test_quantised_folders import FORMATS, write_folder

# Family, configuration, and how its weights are quantised: a type of GGUF, or a key of FORMATS.
FAMILIES = [
    ("Mistral", {"num_hidden_layers": 1, "sliding_window": 11}),
    ("Qwen3", {"num_hidden_layers": 1, "head_dim": 16, "intermediate_size": 96, "tie_word_embeddings": True}, "Q4_0"),
    ("Qwen3Moe", {"num_hidden_layers": 1, "head_dim": 16, "num_experts": 5, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 48}),
    ("GPT2", {"n_layer": 1}),
    ("Gemma3", {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 20,
                "layer_types": ["sliding_attention", "full_attention"], "final_logit_softcapping": 3.0}),
    ("Gemma2", {"num_hidden_layers": 1, "head_dim": 16, "sliding_window": 11, "query_pre_attn_scalar": 20,
                "attn_logit_softcapping": 2.0, "intermediate_size": 128}, "AWQ"),
    ("Phi", {"num_hidden_layers": 1, "pad_token_id": None}),                       # a head with biases
    ("Cohere", {"num_hidden_layers": 1, "use_qk_norm": True, "pad_token_id": None, "eos_token_id": None,
                "bos_token_id": None, "logit_scale": 0.3}),
    ("Bloom", {"n_layer": 1, "n_head": 6, "hidden_size": 96}),
    ("Falcon", {"num_hidden_layers": 1, "multi_query": False, "alibi": True}),
]
WINDOW, SINK, SLOPES, SINK_LOGITS = 6, 3, (0.5, 0.2, 0.1, 0.0), (1.0, -0.5, 0.0, 2.0)
SCRIPT = """
import dataclasses, functools, importlib.util, json, sys, torch
spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = sys.modules["helpers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helpers)
from batch_manager.attention.registry import make_attention

first, second, window, sink, slopes, sink_logits = json.loads(sys.argv[2])

def with_sinks(spec, pool):
    layers = tuple(dataclasses.replace(layer, window=window, alibi_slopes=tuple(slopes), has_sink_logits=True)
                   for layer in spec.attention)
    attention = make_attention(dataclasses.replace(spec, attention=layers), pool, sink)
    attention.run = functools.partial(attention.run, sink_logits=torch.tensor(sink_logits))
    return attention

for folder, attention_class in [(sys.argv[3], with_sinks), *((folder, make_attention) for folder in sys.argv[3:])]:
    run = helpers.Driver(helpers.load_model(folder, device="cpu", dtype="float32"), shuffled=True,
                         attention_class=attention_class)
    assert run.attention.dispatch == "triton"
    logits = [run.run([(0, first[:16], False), (1, second, True)]), run.run([(0, first[16:], True)], [(1, 5)]),
              run.run([], [(0, 6), (1, 7)])]
    is_kept = run.loaded.weight_bytes < 3 * run.loaded.spec.num_weights
    print(json.dumps([is_kept, [row.tolist() for rows in logits for row in rows]]))
"""


@pytest.mark.parametrize("driver", ["torch"], indirect=True)      # the model is loaded for the kernels
def test_the_kernels_give_the_logits_of_transformers(reference, prompts, driver, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    def made_of(family, options, kind=None):
        if kind is None:
            return reference(family, **options)
        if kind in FORMATS:
            return write_folder(tmp_path / kind, kind, family, **{**TINY, **options}), tmp_path / kind
        return write_gguf(make_reference(family, **options), tmp_path / f"{kind}.gguf", family, kind), (
            tmp_path / f"{kind}.gguf")

    made = [made_of(*one) for one in FAMILIES]
    first, second = prompts([20, 3])
    helpers = os.path.join(os.path.dirname(__file__), "conftest.py")
    numbers = json.dumps([first, second, WINDOW, SINK, SLOPES, SINK_LOGITS])
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "-c", SCRIPT, helpers, numbers,
         *(str(folder) for _, folder in made)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=300, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-2000:]

    def with_sinks(spec, pool):
        layers = tuple(dataclasses.replace(layer, window=WINDOW, alibi_slopes=SLOPES, has_sink_logits=True)
                       for layer in spec.attention)
        attention = make_attention(dataclasses.replace(spec, attention=layers), pool, SINK)
        attention.run = functools.partial(attention.run, sink_logits=torch.tensor(SINK_LOGITS))
        return attention

    sequences = [second, first, [*second, 5], [*first, 6], [*second, 5, 7]]
    sinks, *lines = done.stdout.splitlines()
    expected = torch.cat([driver(made[0][1], attention_class=with_sinks).run([(0, tokens, True)])
                          for tokens in sequences])
    torch.testing.assert_close(torch.tensor(json.loads(sinks)[1]), expected, atol=1e-4, rtol=0)
    for (model, _), (_, _, *kind), line in zip(made, FAMILIES, lines, strict=True):
        is_kept, logits = json.loads(line)
        assert is_kept == bool(kind)
        with torch.inference_mode():
            expected = torch.stack([model(torch.tensor([tokens])).logits[0, -1] for tokens in sequences])
        torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-4, rtol=0)
