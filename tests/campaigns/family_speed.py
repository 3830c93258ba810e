"""Measures the step time of each family per byte of weights, relative to Llama's, on this machine's CPU.

    python tests/campaigns/family_speed.py [--dtype bfloat16] [--in-flight 1] [--families opt phi ...]

Each family has a model of the same width and depth with random weights. The program measures the median step time of
the family's model and of Llama's in turn, several times. It prints the smallest median of each. It also prints the
median of the time ratios, divided by the ratio of the weight bytes that a step reads (all matrices except an embedding
that is not the head). Results are recorded in tests/CAMPAIGNS.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from batch_manager import InferenceRequest, KvCacheConfig, TrtGptModelOptionalParams
from batch_manager.models import read_spec
from tests.harness.client import Client
from tests.harness.world import make_manager

VOCAB, WIDTH, INNER, LAYERS, HEADS = 16384, 768, 2048, 12, 12
DECODER = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
           "num_attention_heads": HEADS, "num_key_value_heads": 4, "max_position_embeddings": 1024,
           "tie_word_embeddings": False}
PLAIN = {name: value for name, value in DECODER.items() if name != "num_key_value_heads"}
OF_GPT = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 1024,
          "n_inner": 3 * INNER // 2, "tie_word_embeddings": False}
CONFIGS = {
    "llama": ("LlamaForCausalLM", DECODER),
    "mistral": ("MistralForCausalLM", {**DECODER, "sliding_window": 256}),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 64}),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 64}),
    "gemma2": ("Gemma2ForCausalLM", {**DECODER, "head_dim": 64, "sliding_window": 256}),
    "gemma3": ("Gemma3ForCausalLM", {**DECODER, "head_dim": 64, "sliding_window": 256}),
    "phi": ("PhiForCausalLM", {**PLAIN, "intermediate_size": 3 * INNER // 2}),
    "phi3": ("Phi3ForCausalLM", {**DECODER, "sliding_window": 256}),
    "olmo2": ("Olmo2ForCausalLM", DECODER),
    "olmo3": ("Olmo3ForCausalLM", {**DECODER, "sliding_window": 256}),
    "smollm3": ("SmolLM3ForCausalLM", DECODER),
    "stablelm": ("StableLmForCausalLM", DECODER),
    "starcoder2": ("Starcoder2ForCausalLM", {**DECODER, "intermediate_size": 3 * INNER // 2}),
    "granite": ("GraniteForCausalLM", {**DECODER, "embedding_multiplier": 2.0, "logits_scaling": 2.0,
                                       "residual_multiplier": 0.5, "attention_multiplier": 0.1}),
    "cohere": ("CohereForCausalLM", DECODER),
    "cohere2": ("Cohere2ForCausalLM", {**DECODER, "sliding_window": 256}),
    "gptj": ("GPTJForCausalLM", {**OF_GPT, "rotary_dim": 32}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**PLAIN, "intermediate_size": 3 * INNER // 2}),
    "opt": ("OPTForCausalLM", {**PLAIN, "ffn_dim": 3 * INNER // 2}),
    "gpt2": ("GPT2LMHeadModel", OF_GPT),
    "falcon": ("FalconForCausalLM", {**PLAIN, "ffn_hidden_size": 3 * INNER // 2, "new_decoder_architecture": True,
                                     "num_kv_heads": 4}),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS,
                                   "tie_word_embeddings": False}),
}


class Timed(Client):
    """The client of a manager, which records the time of each response and drops the response."""

    has_stats = False

    def __init__(self, folder: Path, dtype: str, in_flight: int) -> None:
        super().__init__()
        self.in_flight, self.next_id, self.left, self.times = in_flight, 1, 0, []
        params = TrtGptModelOptionalParams(dtype=dtype, device="cpu", load_format="dummy", max_batch_size=in_flight,
                                           num_threads=len(os.sched_getaffinity(0)),
                                           kv_cache_config=KvCacheConfig(max_tokens=256 * in_flight))
        self.manager = make_manager(self, model_path=folder, params=params)

    def received(self, request_id: int, tensors: list, final: bool, error: str) -> None:
        assert not error, error
        self.times.append(time.perf_counter())
        self.left -= final

    def step_ms(self, tokens: int) -> float:
        """Generate `tokens` tokens for each request, and return the median milliseconds between two steps."""
        self.times, self.left = [], self.in_flight
        self.pending = [InferenceRequest(self.next_id + i, {
            "input_ids": [5 + i] * 16, "request_output_len": tokens, "streaming": True}) for i in range(self.in_flight)]
        self.next_id += self.in_flight
        while self.left:
            time.sleep(0.002)
        marks = self.times[:: self.in_flight][2:]
        return 1e3 * statistics.median(after - before for before, after in zip(marks, marks[1:]))


def bytes_read(folder: Path, dtype: str) -> int:
    spec = read_spec(folder)
    table = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
    positions = spec.max_position_embeddings * spec.hidden_size if spec.rotary is None else 0
    return (spec.num_weights - table - positions) * getattr(torch, dtype).itemsize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--in-flight", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--families", nargs="*", default=[])
    options = parser.parse_args()
    families = [name for name in options.families or CONFIGS if name != "llama"]
    with tempfile.TemporaryDirectory() as parent:
        folders = {}
        for name in ("llama", *families):
            architecture, config = CONFIGS[name]
            folders[name] = Path(parent, name)
            folders[name].mkdir()
            (folders[name] / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
        llama = Timed(folders["llama"], options.dtype, options.in_flight)
        of_llama = bytes_read(folders["llama"], options.dtype)
        for name in families:
            timed = Timed(folders[name], options.dtype, options.in_flight)
            pairs = [(llama.step_ms(options.tokens), timed.step_ms(options.tokens)) for _ in range(options.rounds)]
            base, own = (min(column) for column in zip(*pairs))
            ratio = statistics.median(mine / theirs for theirs, mine in pairs)
            weight = bytes_read(folders[name], options.dtype) / of_llama
            print(f"{name:10} {own:7.3f} ms a step, Llama {base:7.3f} ms; weights {weight:5.3f} of Llama's; "
                  f"time a weight {ratio / weight:5.3f} of Llama's", flush=True)
            timed.manager.shutdown()
        llama.manager.shutdown()


if __name__ == "__main__":
    main()
