"""Compares greedy tokens with those of transformers, for random models, requests and engine options.

    python tests/campaigns/same_tokens_as_transformers.py --first-seed 0 --seconds 400

Each seed makes a checkpoint of a random family and shape and sends random prompts at random times to an engine with
random options. Each token must have the largest logit that transformers computes for the same sequence. A token within
1e-5 of the largest logit is a tie, which two summation orders may break differently; ties are counted separately.
Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelOptionalParams, TrtGptModelType
from tests.harness.client import StaggeredClient
from tests.harness.requests import request
from tests.harness.world import make_manager

TIE = 1e-5
ROPES = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 1e4},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64, "rope_theta": 5e5},
]


def random_config(draw: random.Random) -> transformers.PretrainedConfig:
    heads, head_size = draw.choice([1, 2, 3, 4, 6, 8]), draw.choice([8, 16, 24, 32, 64])
    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common = {
        "vocab_size": draw.choice([97, 256, 1000, 5003]),
        "hidden_size": heads * head_size,
        "intermediate_size": draw.choice([48, 100, 256]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0]),
        "max_position_embeddings": draw.choice([384, 512, 1024]),
        "initializer_range": draw.choice([0.02, 0.1, 0.3]),
        "tie_word_embeddings": draw.choice([True, False]),
        "rope_parameters": draw.choice(ROPES),
        **no_tokens,
    }
    wide, bias = draw.choice([head_size, 2 * head_size]), draw.choice([True, False])
    family = draw.choice(["llama", "mistral", "qwen2", "qwen3", "gpt2", *[None] * 15])
    if family is None:
        return config_of_a_later_family(draw, common, wide, bias)
    if family == "llama":
        return transformers.LlamaConfig(**common, head_dim=wide, attention_bias=bias, mlp_bias=draw.random() < 0.5)
    if family == "mistral":
        return transformers.MistralConfig(**common, head_dim=wide, sliding_window=draw.choice([None, 7, 16, 33, 100]))
    if family == "qwen2":
        return transformers.Qwen2Config(**common, use_sliding_window=bias, sliding_window=draw.choice([9, 32, 70]),
                                        max_window_layers=draw.choice([0, 1, 2]))
    if family == "qwen3":
        return transformers.Qwen3Config(**common, head_dim=wide, attention_bias=bias)
    return transformers.GPT2Config(
        vocab_size=common["vocab_size"], n_embd=heads * head_size, n_layer=common["num_hidden_layers"], n_head=heads,
        n_positions=common["max_position_embeddings"], initializer_range=common["initializer_range"],
        n_inner=draw.choice([None, 100]), **no_tokens)


def config_of_a_later_family(draw: random.Random, common: dict, wide: int, bias: bool) -> transformers.PretrainedConfig:
    window = draw.choice([7, 16, 33, 100])
    windows, softcaps = {"sliding_window": window}, {"final_logit_softcapping": draw.choice([None, 5.0])}
    whole = {**common, "num_key_value_heads": common["num_attention_heads"]}
    theta = {"rope_type": "default", "rope_theta": draw.choice([1e4, 5e5])}
    kinds = [draw.choice(["sliding_attention", "full_attention"]) for _ in range(common["num_hidden_layers"])]
    query = {"query_pre_attn_scalar": draw.choice([8, 24, 64])}
    make = {
        "Gemma": lambda: {**common, "head_dim": wide, "attention_bias": bias},
        "Gemma2": lambda: {**common, **windows, **softcaps, **query, "head_dim": wide, "attention_bias": bias,
                           "attn_logit_softcapping": draw.choice([None, 2.0, 20.0])},
        "Gemma3Text": lambda: {**common, **windows, **softcaps, **query, "head_dim": wide, "layer_types": kinds,
                               "rope_parameters": {"full_attention": common["rope_parameters"],
                                                   "sliding_attention": theta}},
        "Phi3": lambda: {**common, "sliding_window": draw.choice([None, window]), "rope_parameters": {
            **theta, "partial_rotary_factor": draw.choice([0.5, 1.0])}},
        "Phi": lambda: {**common, "qk_layernorm": bias, "rope_parameters": {**theta, "partial_rotary_factor": 0.5}},
        "Olmo2": lambda: {**common, "attention_bias": bias},
        "Olmo3": lambda: {**common, **windows, "layer_types": kinds, "attention_bias": bias, "rope_parameters": {
            "full_attention": common["rope_parameters"], "sliding_attention": theta}},
        "SmolLM3": lambda: {**common, **windows, "use_sliding_window": bias, "attention_bias": bias,
                            "no_rope_layers": [draw.choice([0, 1]) for _ in kinds]},
        "StableLm": lambda: {**common, "qk_layernorm": draw.choice([True, False]),
                             "use_qkv_bias": bias, "use_parallel_residual": draw.choice([True, False]),
                             "rope_parameters": {**theta, "partial_rotary_factor": draw.choice([0.25, 0.5])}},
        "Starcoder2": lambda: {**common, "head_dim": wide, "use_bias": bias,
                               "sliding_window": draw.choice([None, window])},
        "GPTNeoX": lambda: {**whole, "attention_bias": bias, "use_parallel_residual": draw.choice([True, False]),
                            "rope_parameters": {**theta, "partial_rotary_factor": draw.choice([0.25, 1.0])}},
        "Cohere": lambda: {**common, "use_qk_norm": draw.choice([True, False]), "attention_bias": bias,
                           "logit_scale": draw.choice([0.1, 3.0])},
        "Cohere2": lambda: {**common, **windows, "attention_bias": bias, "logit_scale": draw.choice([0.1, 3.0]),
                            "layer_types": kinds},
        "Granite": lambda: {**common, "attention_bias": bias, "mlp_bias": draw.choice([True, False]),
                            "embedding_multiplier": draw.choice([1.0, 5.0]), "logits_scaling": draw.choice([1.0, 4.0]),
                            "residual_multiplier": draw.choice([1.0, 0.3]), "attention_multiplier": 0.2},
        "OPT": lambda: {
            **{name: value for name, value in common.items() if name not in (
                "num_key_value_heads", "intermediate_size", "initializer_range", "rope_parameters")},
            "ffn_dim": 100, "init_std": common["initializer_range"], "enable_bias": bias,
            "do_layer_norm_before": draw.choice([True, False]), "word_embed_proj_dim": draw.choice([None, 24]),
            "layer_norm_elementwise_affine": draw.choice([True, False])},
        "Bloom": lambda: {
            **{name: common[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
                                               "initializer_range", "tie_word_embeddings", "bos_token_id",
                                               "eos_token_id")},
            "seq_length": common["max_position_embeddings"], "apply_residual_connection_post_layernorm": bias},
        "Falcon": lambda: {
            **{name: value for name, value in common.items() if name not in (
                "num_key_value_heads", "intermediate_size")},
            **draw.choice([{"new_decoder_architecture": True, "num_kv_heads": common["num_key_value_heads"],
                            "num_ln_in_parallel_attn": draw.choice([1, 2])},
                           {"parallel_attn": bias}, {"multi_query": False, "parallel_attn": bias}]),
            **draw.choice([{"alibi": True, "rope_parameters": theta}, {"alibi": False}]), "bias": bias,
            "ffn_hidden_size": draw.choice([None, 100])},
        "GPTJ": lambda: {
            "vocab_size": common["vocab_size"], "n_embd": common["hidden_size"], "n_layer": len(kinds),
            "n_head": common["num_attention_heads"], "n_positions": common["max_position_embeddings"],
            "rotary_dim": draw.choice([4, common["hidden_size"] // common["num_attention_heads"]]),
            "n_inner": draw.choice([None, 100]), "initializer_range": common["initializer_range"],
            "tie_word_embeddings": common["tie_word_embeddings"], "bos_token_id": None, "eos_token_id": None},
    }
    if common["hidden_size"] // common["num_attention_heads"] == 8:      # too few for families that rotate a quarter
        return transformers.Olmo2Config(**make["Olmo2"]())
    family = draw.choice(list(make))
    return getattr(transformers, f"{family}Config")(**make[family]())


def random_engine(draw: random.Random, prompts: dict[int, list[int]], lengths: dict[int, int]) -> tuple:
    """Return (model type, policy, options) of a random engine, mostly with a small pool.

    The pool has room for each prompt with its output length, alone. Chunks and overlap are often on.
    """
    model_type = draw.choice(list(TrtGptModelType))
    is_static = model_type is TrtGptModelType.V1    # lockstep, without chunks
    tokens_per_block, chunked = draw.choice([8, 16, 32, 64]), not is_static and draw.choice([True, False])
    worst = max(-(-(len(prompts[i]) + lengths[i]) // tokens_per_block) for i in prompts)
    blocks = draw.choice([worst, worst + 1, worst + 2, 400])
    return model_type, draw.choice(list(SchedulerPolicy)), TrtGptModelOptionalParams(
        max_batch_size=draw.choice([1, 2, 5, 16, 32]),
        enable_chunked_context=chunked,
        max_num_tokens=max(draw.choice([64, 128, 512]), tokens_per_block) if chunked else 8192,
        enable_trt_overlap=not is_static and draw.choice([True, False]),
        num_threads=1,
        kv_cache_config=KvCacheConfig(tokens_per_block=tokens_per_block, max_tokens=blocks * tokens_per_block))


def run_seed(seed: int) -> Counter:
    """Run the random model and requests of one seed. Prints each difference and returns the counts."""
    draw, counts = random.Random(seed), Counter(models=1)
    torch.manual_seed(seed)
    config = random_config(draw)
    # Falcon's eager attention has ALiBi in the mask and once more in the scores.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=draw.choice(["20KB", "1GB"]))
        prompts = {i: [draw.randrange(config.vocab_size) for _ in range(draw.choice(
            [draw.randrange(1, 40), draw.randrange(1, 140), 16 * draw.randrange(1, 9) + draw.choice([-1, 0, 1])]))]
            for i in range(draw.choice([3, 8, 20]))}
        lengths = {i: draw.randrange(1, 24) for i in prompts}
        streaming = {i: draw.random() < 0.4 for i in prompts}
        items = [request(i, prompts[i], lengths[i], streaming=streaming[i]) for i in prompts]
        client = StaggeredClient(items, draw, [0, 0, 1, 3, 8])
        model_type, policy, params = random_engine(draw, prompts, lengths)
        manager = make_manager(client, model_path=folder, params=params, policy=policy, model_type=model_type)
        client.wait_for_finals(*prompts)
        assert manager.shutdown()

    counts["pauses"] = sum(json.loads(record).get("Paused Requests", 0) for record in client.stats)
    for i, prompt in prompts.items():
        counts["requests"] += 1
        # Static batches (V1) stream all tokens in one response.
        got = client.streamed(i) if streaming[i] else client.final(i).tokens()[len(prompt):]
        gap = largest_gap(model, prompt, got) if len(got) == lengths[i] else float("inf")
        counts["tokens"] += len(got)
        if gap > 0:
            verdict = "ties" if gap <= TIE else "wrong"
            counts[verdict] += 1
            print(f"seed {seed}, {type(config).__name__}, request {i}: {verdict}, {gap:.1e} below the largest logit, "
                  f"{client.final(i).error}", flush=True)
    return counts


def largest_gap(model: torch.nn.Module, prompt: list[int], generated: list[int]) -> float:
    """Return the largest distance of a generated token's logit from the largest logit at the token's position."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1:-1]
    chosen = logits.gather(1, torch.tensor(generated)[:, None])[:, 0]
    return float((logits.max(dim=1).values - chosen).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--only", nargs="+", default=(), help="model types, as falcon; seeds of others are passed over")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    total, seed, started = Counter(), options.first_seed, time.monotonic()
    while time.monotonic() - started < options.seconds:
        if not options.only or random_config(random.Random(seed)).model_type in options.only:
            total += run_seed(seed)
        seed += 1
    print(f"seeds {options.first_seed}..{seed - 1}, {time.monotonic() - started:.0f} s: " +
          ", ".join(f"{total[name]:,} {name}" for name in ("models", "requests", "tokens", "pauses", "ties", "wrong")))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
