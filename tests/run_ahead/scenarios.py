"""Generates random scenarios from seeds: the configuration of an engine, and requests for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import numpy as np

from batch_manager import (
    ContextChunkingPolicy,
    InferenceRequest,
    KvCacheConfig,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)
from tests.deterministic.differential import CONFIGS, FAMILIES, VOCAB

SMALL = 9                               # ids below 9 are likely because of a bias; words consist of these ids
SCRIPTED = "scripted"
WIDEST = 3


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of a scenario, without an id. Several engines run it.

    arrival    iteration in which the get callback returns the request
    options    further arguments of InferenceRequest
    features   names of the request's features, such as beams
    """

    arrival: int
    tensors: dict[str, Any]
    options: dict[str, Any]
    features: tuple[str, ...]

    @property
    def beam_width(self) -> int:
        return self.tensors.get("beam_width", 1)

    def request(self, request_id: int) -> InferenceRequest:
        return InferenceRequest(request_id, self.tensors, **self.options)


@dataclass(frozen=True)
class RunAheadScenario:
    """The configuration of an engine, and the requests {id: Ask} that it runs.

    family   the model family of the checkpoint, or SCRIPTED for the scripted model
    """

    seed: int
    family: str
    dtype: str
    model_type: TrtGptModelType
    policy: SchedulerPolicy
    chunking: ContextChunkingPolicy | None
    tokens_per_block: int
    num_blocks: int
    host_blocks: int
    reuse: bool
    window: int | None
    sinks: int
    vocab: int
    max_seq_len: int
    max_batch_size: int
    max_num_sequences: int | None
    max_num_tokens: int
    asks: dict[int, Ask] = field(repr=False)

    @cached_property
    def is_scripted(self) -> bool:
        return self.family == SCRIPTED

    def params(self, run_ahead: bool) -> TrtGptModelOptionalParams:
        """Return the engine's parameters. They leave out the KV cache parameters that only `make_backend` uses."""
        return TrtGptModelOptionalParams(
            run_ahead=run_ahead, max_batch_size=self.max_batch_size, max_num_sequences=self.max_num_sequences,
            max_num_tokens=self.max_num_tokens, enable_chunked_context=self.chunking is not None,
            context_chunking_policy=self.chunking or ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
            kv_cache_config=KvCacheConfig(enable_block_reuse=self.reuse, host_cache_size=1 if self.host_blocks else 0))

    def features(self) -> list[str]:
        """Return the model family and the names of the engine's features, such as its policy and block reuse."""
        said = {"max utilization": self.policy is SchedulerPolicy.MAX_UTILIZATION,
                "no evict": self.policy is SchedulerPolicy.GUARANTEED_NO_EVICT,
                "split": self.model_type is TrtGptModelType.InflightBatching,
                "fused": self.model_type is TrtGptModelType.InflightFusedBatching,
                "chunks in order": self.chunking is ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
                "chunks alike": self.chunking is ContextChunkingPolicy.EQUAL_PROGRESS,
                "reuse": self.reuse, "host blocks": self.host_blocks, "window": self.window, "sinks": self.sinks}
        return [self.family, *(name for name, holds in said.items() if holds)]


# Functions of the user. They raise the logit of a token that depends on all earlier tokens, including the newest.

def shift_one(request_id: int, logits, token_ids: list[list[int]]):
    for beam, tokens in enumerate(token_ids):
        logits[0, beam, sum(tokens) % logits.shape[-1]] += 4.0
    return logits


def shift_batched(request_ids: list[int], logits, token_ids: list[list[list[int]]]) -> None:
    for request_id, rows, tokens in zip(request_ids, logits, token_ids, strict=True):
        shift_one(request_id, rows, tokens)


def draw_scenario(seed: int, family: str | None = None) -> RunAheadScenario:
    """Return the scenario of a seed. Odd seeds have the scripted model, unless `family` is given."""
    draw = Random(f"run ahead {seed}")
    if family is None:
        family = SCRIPTED if seed % 2 else draw.choice([one for one in FAMILIES for _ in range(
            1 if one == "austen-4m" else 3)])                     # the shipped model is large
    is_scripted = family == SCRIPTED
    block = draw.choice([1, 2, 3, 4, 8, 16]) if is_scripted else draw.choice([8, 8, 8, 16])
    vocab = draw.choice([5, 12, 40, 200]) if is_scripted else 4096 if family == "austen-4m" else VOCAB
    max_seq_len = draw.choice([64, 100]) if is_scripted else 120
    policy = draw.choice([SchedulerPolicy.MAX_UTILIZATION] * 2 + [SchedulerPolicy.GUARANTEED_NO_EVICT])
    window, sinks = None, 0
    if draw.random() < 0.25:
        window = draw.randint(2 if is_scripted else 9, 40)
        sinks = draw.randint(1, 12) if draw.random() < 0.4 else 0
    reuse = not sinks and draw.random() < 0.45
    prompt, output = draw.choice([6, 6, 16, 30]), draw.choice([6, 12, 24, 30])
    chunking = draw.choice([None, None, *ContextChunkingPolicy])
    if reuse and chunking is not None:                            # many chunks of prompts with a common prefix
        prompt, output = draw.choice([30, 50]), min(output, 12)
        block = min(block, 8)
    beginning = [draw.randrange(vocab) for _ in range(prompt)]
    is_tight = draw.random() < 0.4 and prompt < 50               # a few long outputs outgrow the pool together
    if is_tight:
        prompt, output = min(prompt, 30 if reuse and chunking is not None else 6), max(output, 24)
    shares = {"beams": 0.0 if is_tight else draw.choice([0.0, 0.3]), "processors": draw.choice([0.0, 0.2]),
              "shortest_output": output * 2 // 3 if is_tight else 1}
    asks = {number: draw_ask(draw, vocab, beginning if draw.random() < (0.8 if reuse else 0.2) else [], prompt, output,
                             family, **shares)
            for number in range(1, (24 if is_scripted else 12) + 1)}
    most = max(num_blocks(ask, block, is_reused_or_slides=reuse or window is not None) for ask in asks.values())
    batch = draw.choice([3, 4, 8] if is_tight else [2, 3, 4, 8])
    pools = [most, most + 1, most + 2, most + most // 2, 2 * most, 8 * most][: 4 if is_tight else 6]
    most_tokens = draw.choice([block, 2 * block, 4 * block]) if chunking is not None else draw.choice([60, 120, 1000])
    return RunAheadScenario(
        seed, family, "int32" if is_scripted else draw.choice(["float32", "float32", "bfloat16", "float16"]),
        draw.choice([TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching]), policy, chunking,
        block, draw.choice(pools), draw.choice([0, 8]) if reuse else 0, reuse, window, sinks, vocab, max_seq_len, batch,
        draw.choice([None, None, batch + 3]), max(most_tokens, WIDEST, batch), asks)


def num_blocks(ask: Ask, tokens_per_block: int, *, is_reused_or_slides: bool) -> int:
    """Return an estimate of the number of blocks that the request needs alone."""
    tokens = len(ask.tensors["input_ids"]) + ask.tensors["request_output_len"]
    return ask.beam_width * (-(-tokens // tokens_per_block) + 2 * is_reused_or_slides)


def draw_ask(draw: Random, vocab: int, beginning: list[int], longest_prompt: int, longest_output: int, family: str,
             beams: float, processors: float, shortest_output: int) -> Ask:
    """Return a request with random features.

    beginning    tokens that the prompt may begin with, so that prompts have common prefixes
    family       model family, or SCRIPTED, for which requests have fewer features
    beams        probability of several beams
    processors   probability of a logits post-processor
    """
    is_scripted = family == SCRIPTED

    def likely(share: float) -> bool:
        return draw.random() < share

    length = draw.randint(1, longest_prompt)
    common = beginning[:draw.choice([length, draw.randint(0, length)])]
    prompt = common + [draw.randrange(vocab) for _ in range(length - len(common))]
    tensors: dict[str, Any] = {"input_ids": prompt, "request_output_len": draw.randint(shortest_output, longest_output)}
    options: dict[str, Any] = {}
    for name, share in (("return_log_probs", 0.7), ("return_generation_logits", 0.3), ("return_context_logits", 0.15)):
        if likely(share):
            tensors[name] = True
    if likely(0.15):
        options["priority"] = draw.choice([0.0, 0.25, 0.75, 1.0])
    if likely(0.1):
        options["cache_salt"] = "a"
    if likely(beams):
        tensors |= {"beam_width": draw.randint(2, WIDEST), "len_penalty": draw.choice([0.0, 0.5, 1.0]),
                    "early_stopping": draw.randrange(3)}
        if likely(0.3):
            tensors["beam_search_diversity_rate"] = 0.3
    elif likely(0.4):
        options["is_streaming"] = True
    if likely(processors) and not (is_scripted and "beam_width" in tensors):
        options["logits_post_processor"] = draw.choice([shift_one, "batched"])
    (draw_scripted_wishes if is_scripted else draw_wishes)(draw, tensors, vocab)
    if not is_scripted and likely(0.08):
        add_prompt_tuning_tokens(draw, tensors, vocab, family)
    arrival = draw.choice([0, 0, draw.randint(0, 8), draw.randint(0, 40)])
    return Ask(arrival, tensors, options, tuple(features_of(tensors, options)))


def draw_scripted_wishes(draw: Random, tensors: dict[str, Any], vocab: int) -> None:
    if draw.random() < 0.5:
        tensors["end_id"] = draw.randrange(vocab)
    if draw.random() < 0.4 and "beam_width" not in tensors:
        tensors |= {"runtime_top_p": 1.0, "random_seed": draw.getrandbits(63)}
    if draw.random() < 0.3 and "beam_width" in tensors:
        tensors["stop_words_list"] = words(draw, vocab)


def draw_wishes(draw: Random, tensors: dict[str, Any], vocab: int) -> None:
    """Add random sampling options for a real model."""
    offers: dict[str, Callable[[], Any]] = {
        "temperature": lambda: draw.choice([0.0, 0.7, 1.3]), "runtime_top_k": lambda: draw.choice([1, 5, 50]),
        "runtime_top_p": lambda: draw.uniform(0.3, 1.0), "runtime_min_p": lambda: 0.05,
        "random_seed": lambda: draw.getrandbits(63), "repetition_penalty": lambda: draw.uniform(0.7, 2.0),
        "presence_penalty": lambda: draw.gauss(0.0, 1.0), "frequency_penalty": lambda: draw.gauss(0.0, 0.5),
        "no_repeat_ngram_size": lambda: draw.randint(1, 4), "min_length": lambda: draw.randint(1, 12),
        "bad_words_list": lambda: words(draw, SMALL), "stop_words_list": lambda: words(draw, SMALL)}
    tensors |= {name: offer() for name, offer in offers.items() if draw.random() < 0.2}
    if draw.random() < 0.2:
        tensors |= {"runtime_top_p": draw.uniform(0.5, 1.0), "runtime_top_p_decay": 0.9, "runtime_top_p_min": 0.2,
                    "runtime_top_p_reset_ids": draw.randrange(SMALL), "random_seed": draw.getrandbits(63)}
    if draw.random() < 0.45:                                      # the output may end at any token
        noise = np.random.default_rng(draw.getrandbits(32)).normal(size=vocab)
        tensors["embedding_bias"] = (draw.choice([5.0, 20.0]) * (np.arange(vocab) < SMALL) + noise).astype(np.float32)
        if draw.random() < 0.8:
            tensors["end_id"] = draw.randrange(SMALL)


def words(draw: Random, vocab: int) -> list[list[int]]:
    return [[draw.randrange(vocab) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 4))]


def add_prompt_tuning_tokens(draw: Random, tensors: dict[str, Any], vocab: int, family: str) -> None:
    """Add a table of embeddings, and prompt-tuning tokens before the prompt."""
    rows = draw.randint(1, 3)
    table = np.random.default_rng(draw.getrandbits(32)).normal(size=(rows, HIDDEN_SIZES[family]))
    tensors |= {"prompt_embedding_table": table.astype(np.float32), "prompt_vocab_size": rows,
                "input_ids": [vocab + row for row in range(rows)] + tensors["input_ids"]}


HIDDEN_SIZES = {family: config.get("hidden_size") or config["n_embd"] for family, config in CONFIGS.items()} | {
    "austen-4m": 256}

FEATURES = {"temperature": "sampled", "runtime_top_k": "top-k", "runtime_top_p": "top-p", "runtime_min_p": "min-p",
            "runtime_top_p_decay": "top-p decay", "repetition_penalty": "penalties", "presence_penalty": "penalties",
            "frequency_penalty": "penalties", "no_repeat_ngram_size": "n-gram bans", "bad_words_list": "bad words",
            "stop_words_list": "stop words", "min_length": "min length", "embedding_bias": "bias", "end_id": "end id",
            "return_log_probs": "log-probs", "return_context_logits": "context logits",
            "return_generation_logits": "generation logits", "beam_width": "beams",
            "prompt_embedding_table": "prompt table", "is_streaming": "streaming",
            "logits_post_processor": "post-processor", "priority": "priority", "cache_salt": "salt"}


def features_of(tensors: dict[str, Any], options: dict[str, Any]) -> list[str]:
    found = dict.fromkeys(name for key, name in FEATURES.items() if key in tensors or key in options)
    return list(found) if {"temperature", "runtime_top_k", "runtime_top_p", "beam_width"} & tensors.keys() else [
        "greedy", *found]
