"""With block reuse, host blocks, windows or sinks, the tokens and log-probs are those of transformers."""

import json
import random
from pathlib import Path

import numpy as np
import torch

from batch_manager import KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.models import load_model
from tests.harness.client import StaggeredClient
from tests.integration.families import families_and_engines
from tests.integration.greedy_model import GreedyModel

MAX, GUARANTEED = SchedulerPolicy.MAX_UTILIZATION, SchedulerPolicy.GUARANTEED_NO_EVICT
SPLIT = TrtGptModelType.InflightBatching
SIZE = 8
SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"


def family_of_prompts(vocab_size, seed=0):
    """Return prompts with common prefixes.

    Some are equal, some are prefixes of others, and some differ from the middle of a block on.
    """
    draw = random.Random(seed)
    trunk = [draw.randrange(vocab_size) for _ in range(90)]

    def branch(length, more):
        return trunk[:length] + [draw.randrange(vocab_size) for _ in range(more)]

    return dict(enumerate([
        branch(80, 0), branch(80, 0), branch(80, 5), branch(43, 0), branch(43, 30), branch(16, 9), branch(17, 9),
        branch(0, 12), branch(90, 3), branch(80, 5), branch(64, 1), branch(1, 0)]))


def serve(make_manager, new_request, folder, prompts, count, *, options=None, **engine):
    """Run all prompts in one engine, where a few arrive at a time.

    Returns the final responses by id, and the statistics.
    """
    items = [new_request(i, prompt, count(i), return_log_probs=True, **(options or {}))
             for i, prompt in prompts.items()]

    client = StaggeredClient(items, random.Random(1), [0, 0, 1, 2])
    manager = make_manager(client, model_path=folder, num_threads=1, **engine)
    client.wait_for_finals(*prompts)
    assert manager.shutdown()
    finals = {i: client.final(i) for i in prompts}
    assert all(final.error == "" for final in finals.values())
    return finals, [json.loads(record) for record in client.stats]


def kv(blocks, **more):
    return KvCacheConfig(tokens_per_block=SIZE, max_tokens=blocks * SIZE, enable_block_reuse=True, **more)


# Small pools pause and evict; 1 MiB of host memory holds at least 32 blocks. tests/matrix has more engines.
ENGINES = {
    "pauses and chunks": dict(policy=MAX, kv_cache_config=kv(19), enable_chunked_context=True, max_num_tokens=32),
    "split, chunks, host blocks": dict(policy=GUARANTEED, kv_cache_config=kv(15, host_cache_size=1 << 20),
                                       model_type=SPLIT, enable_chunked_context=True, max_num_tokens=24),
}


@families_and_engines(("engine",), [(name,) for name in ENGINES], each=1)
def test_greedy_tokens_are_those_of_transformers(make_manager, new_request, reference, engine):
    prompts = family_of_prompts(reference.vocab_size)
    finals, records = serve(make_manager, new_request, reference.folder, prompts, lambda i: 12 + i % 5,
                            **ENGINES[engine])
    for i, prompt in prompts.items():
        tokens = finals[i].tokens()
        generated = tokens[len(prompt):]
        assert generated == reference.greedy(prompt, 12 + i % 5, guess=generated), f"prompt {i}"
        logits = reference.logits(tokens).astype(np.float64)[len(prompt) - 1:-1]
        chosen = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = chosen[np.arange(len(chosen)), tokens[len(prompt):]]
        np.testing.assert_allclose(finals[i].tensors["output_log_probs"][0, 0], chosen, atol=2e-4, rtol=0)
    assert records[-1]["Reused KV cache blocks"] > 15
    if "pauses" in engine:
        assert sum(record["Paused Requests"] for record in records) > 0


# Windows and sinks.

class Streaming(GreedyModel):
    """StreamingLLM in plain torch: the loaded model runs on the whole sequence with a masked attention."""

    dispatch = "mask"

    def __init__(self, folder, window, sink):
        super().__init__()
        self.loaded = load_model(folder, device=torch.device("cpu"), dtype="float32")
        self.spec, self.window, self.sink = self.loaded.spec, window, sink

    def run(self, layer, query, key, value, rotary):
        count, position = len(query), torch.arange(len(query))
        if rotary is not None:
            query, key = self._rotate(query, rotary), self._rotate(key, rotary)
        group = self.spec.num_heads // self.spec.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        back = position[:, None] - position
        visible = (back >= 0) & ((back < self.window) | (position < self.sink))
        how = self.spec.attention[layer]
        assert how.window is None or how.window > self.window
        scores = torch.einsum("qhd,khd->hqk", query, key) * how.scale
        if how.softcap is not None:
            scores = how.softcap * torch.tanh(scores / how.softcap)
        if how.alibi_slopes is not None:
            slopes, factor = torch.tensor(how.alibi_slopes)[:, None, None], how.alibi_bfloat16_factor
            scores += -slopes * back if factor is None else factor * (slopes.bfloat16() * position).float()
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(count, -1)

    @staticmethod
    def _rotate(heads, rotary):
        cos, sin = rotary.cos[:len(heads), None], rotary.sin[:len(heads), None]
        half = cos.shape[-1]
        first, second, rest = heads[..., :half], heads[..., half:2 * half], heads[..., 2 * half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def likeliest(self, tokens):
        model = self.loaded.model
        with torch.inference_mode():
            hidden = model.forward(model.embed(torch.tensor(tokens)), torch.arange(len(tokens)), self)
            return model.logits(hidden).argmax(1).tolist()


WINDOWED = [
    (20, 0, dict(policy=GUARANTEED, kv=dict(max_tokens=24 * SIZE, enable_block_reuse=True, host_cache_size=1 << 20),
                 enable_chunked_context=True, max_num_tokens=24)),
    (20, 3, dict(policy=MAX, kv=dict(max_tokens=30 * SIZE))),
]


@families_and_engines(("window", "sink", "engine"), WINDOWED, each=1)
def test_windows_and_sinks_are_streaming_llm(make_manager, new_request, reference, window, sink, engine):
    config = KvCacheConfig(tokens_per_block=SIZE, max_attention_window=window, sink_token_length=sink, **engine["kv"])
    engine = {name: value for name, value in engine.items() if name != "kv"}
    prompts = family_of_prompts(reference.vocab_size, seed=5)
    finals, records = serve(make_manager, new_request, reference.folder, prompts, lambda i: 10 + 2 * i,
                            kv_cache_config=config, **engine)
    expected = Streaming(reference.folder, window, sink)
    for i in (0, 2, 4, 7, 9, 11):
        prompt = prompts[i]
        generated = finals[i].tokens()[len(prompt):]
        assert generated == expected.greedy(prompt, 10 + 2 * i, guess=generated), f"prompt {i}"
    assert (records[-1]["Reused KV cache blocks"] > 0) == config.enable_block_reuse


def test_a_window_lets_a_long_text_run_in_a_pool_that_does_not_hold_it(make_manager, new_request,
                                                                       llama_reference):
    """A long output runs in a small pool, because blocks return to the pool when they leave the window."""
    config = KvCacheConfig(tokens_per_block=SIZE, max_attention_window=32, sink_token_length=4, max_tokens=7 * SIZE)
    finals, records = serve(make_manager, new_request, llama_reference.folder, {1: [5, 6, 7]},
                            lambda i: 120, kv_cache_config=config, policy=GUARANTEED)
    generated = finals[1].tokens()[3:]
    assert generated == Streaming(llama_reference.folder, 32, 4).greedy([5, 6, 7], 120, guess=generated)
    assert max(record["Used KV cache blocks"] for record in records) <= 1 + 4 + 2


def test_a_models_own_window_gives_its_blocks_back(make_manager, new_request, references):
    reference = references("mistral-window")
    prompts = {i: prompt for i, prompt in family_of_prompts(reference.vocab_size, seed=6).items() if i in (0, 2, 4, 5)}
    finals, records = serve(make_manager, new_request, reference.folder, prompts, lambda i: 60,
                            kv_cache_config=kv(60), max_batch_size=1)
    for i, prompt in prompts.items():
        generated = finals[i].tokens()[len(prompt):]
        assert generated == reference.greedy(prompt, 60, guess=generated)
    generating = [record for record in records if record["Generation Requests"]]
    assert max(record["Used KV cache blocks"] for record in generating) <= 48 // SIZE + 2
