"""A request that waits for a compiler waits for seconds: the warm-up must have met every variant of a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "count_compilations.py"
SHARED = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
          "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100},
}


def test_the_warm_up_compiles_every_variant_of_attention_and_fused_products_that_serving_meets(tmp_path):
    """11,000 steps a model: every batch size and every length, but not every pair. Those are 35,000, by hand."""
    pytest.importorskip("triton", reason="triton is not installed")
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHARED | config))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, PROGRAM, *(tmp_path / name for name in CONFIGS)], env=environment,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["steps"] > 256 * 16 + 46 * 112
        assert found["serving"] == {}
        # Generation reads the block tables of its step, or, where it is plain, those of all sequences.
        assert found["warm_up"] == {"_rope_kv_append_kernel": 1, "_context_kernel": 1, "_decode_kernel": 2,
                                    "_merge_kernel": 1}
        # Of the products behind a norm: queries, keys and values; gate and up; the head. In steps of any rows the same.
        assert found["fused"] == [{"_fused_linear_kernel": 3}, {}]
    assert len(done.stdout.splitlines()) == len(CONFIGS)
