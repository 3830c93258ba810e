"""The warm-up compiles every variant of a kernel, so that no request waits seconds for the compiler."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.harness import forked

PROGRAM = Path(__file__).parent / "count_compilations.py"
SHARED = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
          "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048,
          "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu"}
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100},
}


# Kernels that a step of these models launches, besides those of attention.
OTHERS = {"_ban_ngrams_kernel", "_ban_words_kernel", "_beam_block_kernel", "_beam_group_kernel", "_beam_row_kernel",
          "_gated_activation_kernel", "_match_stop_words_kernel", "_prepare_step_kernel", "_rms_norm_kernel",
          "_sample_digit_kernel", "_sample_token_kernel", "_sample_block_kernel", "_sample_piece_kernel",
          "_token_penalties_kernel"}


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Run count_compilations.py on two models. Return its JSON objects: one for each model, then one for memory."""
    pytest.importorskip("triton", reason="triton is not installed")
    tmp_path = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(SHARED | config))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = forked.run([sys.executable, PROGRAM, *(tmp_path / name for name in CONFIGS)], env=environment,
                      capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_warm_up_compiles_every_variant_of_a_kernel_that_serving_meets(findings):
    """After the warm-up, no step compiles a variant of a kernel.

    Attention runs 7,000 steps for each model. They have every batch size and every length in blocks, but not every
    pair of the two. The 35,000 steps of all pairs run only if a developer starts the program with --every-pair.
    """
    *of_models, _ = findings
    assert len(of_models) == len(CONFIGS)
    for name, found in zip(CONFIGS, of_models):
        assert found["steps"] > 350 and found["attention_steps"] > 256 * 9 + 22 * 120 + 234 * 8
        assert found["serving"] == {}
        # Generation reads the block tables of its step or, at fixed addresses, the block tables of all sequences.
        # Parts of generation rows are merged, and parts of contexts, unless the window is too short to split contexts.
        attention = {"_rope_kv_append_kernel": 1, "_context_kernel": 1, "_decode_kernel": 2,
                     "_merge_kernel": 2 if name == "llama" else 1}
        assert attention.items() <= found["warm_up"].items()
        assert found["warm_up"].keys() >= OTHERS
        # There are three products after a norm: queries, keys and values; gate and up; the head. Each has a variant for
        # few rows, and one for tiles of rows. More tiles add none, because the products are small.
        assert found["fused"] == [{"_fused_linear_kernel": 6}, {}]


def test_the_memory_that_sampling_works_in_is_what_a_plan_counts(findings):
    pairs = findings[-1]["scratch"]
    assert len(pairs) == 4 and all(taken == counted > 0 for taken, counted in pairs)


def test_the_memory_for_parts_of_attention_is_at_most_what_a_plan_counts(findings):
    pairs = findings[-1]["attention_scratch"]
    assert len(pairs) == 2 and all(counted / 4 < taken <= counted for taken, counted in pairs)
