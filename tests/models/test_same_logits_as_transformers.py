"""In every model family, packed steps over a paged cache give the logits of transformers, with and without chunks."""

import pytest
import torch

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.1, 2.5, 3.0],
            "long_factor": [4.0] * 8}
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

FAMILIES = {
    "llama, grouped queries": ("Llama", {}),
    "llama, one key head per query head, biases": ("Llama", {"num_key_value_heads": 4, "attention_bias": True,
                                                             "mlp_bias": True}),
    "llama, one key head, tied": ("Llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama, head size of its own": ("Llama", {"head_dim": 24}),
    "llama, linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama, llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "mistral, window of 7": ("Mistral", {"sliding_window": 7}),
    "mistral, window of 20, head size of its own": ("Mistral", {"sliding_window": 20, "head_dim": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2, upper layers slide": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3, tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, biases, yarn": ("Qwen3", {"head_dim": 16, "attention_bias": True, "rope_parameters": YARN_MSCALE}),
    "qwen3, upper layers slide": ("Qwen3", {"head_dim": 32, "use_sliding_window": True, "sliding_window": 33,
                                            "max_window_layers": 2}),
    "gemma": ("Gemma", {"head_dim": 32}),
    "gemma, biases, untied, one key head": ("Gemma", {"head_dim": 24, "attention_bias": True, "num_key_value_heads": 1,
                                                      "tie_word_embeddings": False}),
    "gemma 2": ("Gemma2", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 20,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma 2, no softcaps, biases, other layers": (
        "Gemma2", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": None, "attention_bias": True,
                   "final_logit_softcapping": None, "query_pre_attn_scalar": 16,
                   "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
    "gemma 3": ("Gemma3", {"head_dim": 32, "sliding_window": 7, "query_pre_attn_scalar": 24,
                           "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                           "rope_parameters": {"full_attention": LINEAR,
                                               "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}}),
    "gemma 3, every second layer, softcap": ("Gemma3", {"head_dim": 16, "sliding_window": 11, "attention_bias": True,
                                                        "sliding_window_pattern": 2, "final_logit_softcapping": 2.5}),
    "olmo 2": ("Olmo2", {}),
    "olmo 2, biases, tied, one key head": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True,
                                                     "num_key_value_heads": 1, "rope_parameters": YARN}),
    "phi 3": ("Phi3", NO_TOKENS),
    "phi 3, window, a part of each head rotated, tied": (
        "Phi3", {**NO_TOKENS, "sliding_window": 9, "tie_word_embeddings": True, "num_key_value_heads": 4,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi 3, longrope": ("Phi3", {**NO_TOKENS, "original_max_position_embeddings": 64, "rope_parameters": LONGROPE}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt-neox, one after the other, no biases, tied": (
        "GPTNeoX", {"use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_new",
                    "tie_word_embeddings": True, "rope_parameters": {
                        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
    "smollm 3": ("SmolLM3", {**NO_TOKENS, "no_rope_layer_interval": 2}),
    "smollm 3, windows where there are no positions, biases": (
        "SmolLM3", {**NO_TOKENS, "no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 9,
                    "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "stablelm": ("StableLm", {}),
    "stablelm, side by side, biases, more rotated": (
        "StableLm", {"use_parallel_residual": True, "use_qkv_bias": True, "num_key_value_heads": 4,
                     "partial_rotary_factor": 0.5, "tie_word_embeddings": True}),
    "starcoder 2": ("Starcoder2", {}),
    "starcoder 2, window, no biases, untied": ("Starcoder2", {"sliding_window": 9, "use_bias": False,
                                                              "tie_word_embeddings": False, "head_dim": 32}),
    "phi": ("Phi", {}),
    "phi, norms of heads, grouped queries, tied": ("Phi", {"qk_layernorm": True, "num_key_value_heads": 1,
                                                           "tie_word_embeddings": True}),
    "cohere": ("Cohere", {**NO_TOKENS, "logit_scale": 0.3}),
    "cohere, biases, untied, linear": ("Cohere", {**NO_TOKENS, "attention_bias": True, "tie_word_embeddings": False,
                                                  "logit_scale": 2.0, "rope_parameters": LINEAR}),
    "gpt-j": ("GPTJ", {"rotary_dim": 8}),
    "gpt-j, whole heads rotated, another inner size": ("GPTJ", {"rotary_dim": 16, "n_inner": 80}),
    "cohere 2": ("Cohere2", {**NO_TOKENS, "logit_scale": 0.5, "sliding_window": 9, "sliding_window_pattern": 2}),
    "cohere 2, other layers, biases": ("Cohere2", {
        **NO_TOKENS, "logit_scale": 2.0, "sliding_window": 20, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.4,
                            "logits_scaling": 0.5}),
    "granite, no factors, biases, tied": ("Granite", {"attention_bias": True, "mlp_bias": True,
                                                      "tie_word_embeddings": True}),
    "olmo 3": ("Olmo3", {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2,
                         "num_hidden_layers": 4, "attention_bias": True,
                         "rope_parameters": {"full_attention": YARN, "sliding_attention": LINEAR}}),
    "stablelm, norms of heads": ("StableLm", {"qk_layernorm": True, "num_key_value_heads": 1}),
    "cohere, norms of heads": ("Cohere", {**NO_TOKENS, "logit_scale": 0.3, "use_qk_norm": True}),
    "opt": ("OPT", {"ffn_dim": 80}),
    "opt, norms behind, tokens of another size": ("OPT", {"do_layer_norm_before": False, "word_embed_proj_dim": 40}),
    "opt, no biases, norms without weights, untied": (
        "OPT", {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False,
                "activation_function": "gelu"}),
    "opt, no last norm": ("OPT", {"_remove_final_layer_norm": True}),
    "bloom": ("Bloom", {}),
    "bloom, heads no power of two, sums of normed rows, untied": (
        "Bloom", {"hidden_size": 72, "n_head": 6, "apply_residual_connection_post_layernorm": True,
                  "tie_word_embeddings": False}),
    "bloom, more heads than the power of two and half": ("Bloom", {"hidden_size": 112, "n_head": 7}),
    "falcon, one key head": ("Falcon", {"num_key_value_heads": None}),
    "falcon, new, groups of key heads": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, new, one norm, untied, biases, yarn": (
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1, "bias": True,
                   "tie_word_embeddings": False, "rope_parameters": YARN}),
    "falcon, one after the other, slopes": (
        "Falcon", {"multi_query": False, "parallel_attn": False, "alibi": True, "bias": True}),
    "falcon, slopes, heads no power of two": (
        "Falcon", {"multi_query": False, "alibi": True, "num_attention_heads": 6, "hidden_size": 72,
                   "ffn_hidden_size": 80, "activation": "relu"}),
    "falcon, slopes, one key head": ("Falcon", {"alibi": True}),
    "falcon, new, slopes, groups of key heads": (
        "Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": True, "num_attention_heads": 6,
                   "hidden_size": 72}),
    "gpt2": ("GPT2", {}),
    "gpt2, untied, another inner size": ("GPT2", {"tie_word_embeddings": False, "n_inner": 80,
                                                  "activation_function": "relu"}),
}

# Families that no form but calls of the layers computes; test_experts.py runs them.
MOE = {"num_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 3, **NO_TOKENS}
EXPERTS = {
    "mixtral, window": ("Mixtral", {**NO_TOKENS, "num_local_experts": 8, "sliding_window": 8}),
    "qwen2-moe, windows in some layers": ("Qwen2Moe", {
        **MOE, "shared_expert_intermediate_size": 80, "use_sliding_window": True, "sliding_window": 8,
        "max_window_layers": 1}),
    "qwen2-moe, dense layers, renormalised": ("Qwen2Moe", {
        **MOE, "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "mlp_only_layers": [0],
        "decoder_sparse_step": 1, "qkv_bias": False}),
    "qwen3-moe, every second layer, tied": ("Qwen3Moe", {
        **MOE, "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "olmoe": ("Olmoe", {**NO_TOKENS, "num_experts": 8, "num_experts_per_tok": 3}),
    "olmoe, clipped, renormalised, biases": ("Olmoe", {
        **NO_TOKENS, "num_experts": 4, "num_experts_per_tok": 4, "clip_qkv": 0.8, "norm_topk_prob": True,
        "attention_bias": True}),
    "granite-moe": ("GraniteMoe", {
        **NO_TOKENS, "num_local_experts": 8, "embedding_multiplier": 3.0, "residual_multiplier": 0.3,
        "attention_multiplier": 0.4, "logits_scaling": 0.5, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("chunk", [None, 16], ids=["whole", "chunks, deterministic"])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_packed_batch_has_the_logits_of_transformers(case, chunk, reference, driver, prompts, check_against):
    family, options = FAMILIES[case]
    model, folder = reference(family, **options)
    run = driver(folder, shuffled=chunk is not None, deterministic=chunk is not None)
    check_against(model, run, prompts([1, 5, 16, 17, 40]), chunk=chunk)


@pytest.mark.parametrize("chunk", [None, 128], ids=["whole", "chunks"])
@pytest.mark.parametrize("family", ["Falcon", "Bloom"])
def test_slopes_at_positions_that_are_no_numbers_of_bfloat16(family, chunk, reference, driver, prompts, check_against):
    options = {"alibi": True, "multi_query": False, "num_attention_heads": 6, "hidden_size": 72,
               "max_position_embeddings": 700} if family == "Falcon" else {"hidden_size": 72, "n_head": 6}
    model, folder = reference(family, **options)
    check_against(model, driver(folder, shuffled=True), prompts([530, 257]), steps=6, chunk=chunk)


@pytest.mark.parametrize("tokens_per_block", [16, 32, 64])
@pytest.mark.parametrize("shuffled", [False, True], ids=["consecutive", "shuffled"])
@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("window", [None, 21], ids=["all", "window"])
def test_prompt_lengths_around_multiples_of_a_block(tokens_per_block, shuffled, chunked, window, reference, driver,
                                                    prompts, check_against):
    model, folder = reference("Mistral", sliding_window=window)
    lengths = [max(1, n * tokens_per_block + d) for n in (1, 2) for d in (-1, 0, 1)] + [1, 3]
    check_against(model, driver(folder, tokens_per_block=tokens_per_block, shuffled=shuffled), prompts(lengths),
                  chunk=tokens_per_block if chunked else None)


def test_contexts_and_generation_in_one_step(reference, driver, prompts):
    model, folder = reference("Mistral", sliding_window=20)
    old, new, halved = prompts([37, 30, 48])
    run = driver(folder, shuffled=True)
    run.run([(0, old, True), (2, halved[:16], False)])
    logits = run.run([(1, new, True), (2, halved[16:32], False)], [(0, 5)])
    last = run.run([(2, halved[32:], True)], [(0, 6), (1, 7)])

    with torch.inference_mode():
        def expected(tokens):
            return model(torch.tensor([tokens])).logits[0, -1]

        for row, tokens in [(logits[0], new), (logits[1], [*old, 5]), (last[0], halved), (last[1], [*old, 5, 6]),
                            (last[2], [*new, 7])]:
            torch.testing.assert_close(row, expected(tokens), atol=1e-4, rtol=0)


def test_a_batch_of_very_different_lengths(reference, driver, prompts, check_against, monkeypatch):
    # A low limit makes the generating sequences form several groups.
    monkeypatch.setattr("batch_manager.attention.torch_paged.MAX_PADDED_BYTES", 8192)
    model, folder = reference("Llama")
    check_against(model, driver(folder, shuffled=True), prompts([120, 2, 64, 3, 33, 110, 1, 70]), steps=6)


def test_a_sharded_checkpoint_is_the_same_model(reference, driver, prompts, check_against):
    model, folder = reference("Llama", shard="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    check_against(model, driver(folder), prompts([9, 30]), steps=4)


def test_bfloat16_stays_close_to_float32(reference, driver, prompts):
    _, folder = reference("Qwen3", head_dim=32, tie_word_embeddings=True)
    texts = prompts([5, 33, 64, 100])
    exact = driver(folder).prefill(texts)
    rounded = driver(folder, dtype="bfloat16").prefill(texts, chunk=32).float()
    assert ((rounded - exact).norm() / exact.norm()) < 0.03


def test_a_result_does_not_depend_on_what_a_neighbour_holds(reference, driver, prompts):
    _, folder = reference("Llama")
    texts = prompts([40, 3, 50])
    alone = driver(folder)
    alone.run([(1, texts[1], True)])
    expected = alone.run([], [(1, 7)])

    run = driver(folder)
    run.prefill(texts)
    for block in run.tables[0] + run.tables[2]:
        run.pool[block] = torch.nan
    rows = run.run([], [(0, 7), (1, 7), (2, 7)])
    assert rows[0].isnan().any() and rows[2].isnan().any()
    torch.testing.assert_close(rows[1], expected[0], atol=1e-4, rtol=0)
