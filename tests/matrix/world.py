"""A world of the matrix: requests and the options of their engine, drawn from features, a seed and a model.

Half of the requests use all features of the world, some one of them, some none; one is stopped and one fails. Options
that are no features are drawn as well: block sizes, policies, overlap, two calls a step, host blocks, deterministic,
prompt tables, returned logits, priorities, streams, sampling and others.
"""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from batch_manager import SchedulerPolicy, TrtGptModelType

from .features import FEATURES

SCRIPTED = "scripted"
MODELS = ("llama", "gemma3")                           # of the pairs; mixtures of features also run with these:
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granite_moe")
HIDDEN_SIZES = {"llama": 96, **dict.fromkeys(("gemma3", *WITH_EXPERTS), 64)}
VOCAB = {SCRIPTED: 40, **dict.fromkeys((*MODELS, *WITH_EXPERTS), 211)}
END_OF_A_GRAMMAR = 1
MAX_SEQ_LEN = 120
# How many requests use all features, one of them, none. A request to a model takes ten times as long.
SIZES = {SCRIPTED: (6, 3, 3), **dict.fromkeys((*MODELS, *WITH_EXPERTS), (4, 1, 1))}
SAMPLING = ("runtime_top_p", "random_seed", "temperature", "runtime_top_k", "runtime_min_p")
ENDS = ("end_id", "stop_words_list")
OF_FEATURES = ("return_log_probs", "beam_width", "len_penalty", "early_stopping")    # not drawn by themselves


@dataclass
class Ask:
    """A request that several engines run.

    has       letters of the features that it uses
    trunk     number of first tokens that it has in common with other prompts
    is_long   whether nothing ends its output early
    pattern   regular expression of its grammar; "": none
    fate      "": it runs; "stopped", "fails" or "refused"
    """

    id: int
    arrival: int
    prompt_length: int
    count: int
    has: frozenset[str] = frozenset()
    trunk: int = 0
    is_long: bool = False
    pattern: str = ""
    is_batched: bool = False
    fate: str = ""
    prompt: list[int] = field(default_factory=list)
    tensors: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.tensors.get("beam_width", 1)


class World:
    """The options of an engine, and its requests. Features change both in their `engine` and `request`.

    letters       the features
    block         tokens per block
    most_tokens   tokens of a step; None: no limit that matters
    is_tight      whether the pool holds little more than one request
    drawn         names of the options that were drawn, besides the features
    adapter_pages   pages for adapters on the device; 0: the engine has no adapters
    is_exact      whether outcomes are compared bit by bit
    tensor_size, num_stages   sizes of ParallelConfig
    right         probability that a draft is right
    texts         request id -> its output alone, which the drafter knows

    exact         set `deterministic`, with the same requests otherwise, and weights as they are stored
    """

    def __init__(self, letters: str, seed: int, model: str, *, exact: bool = False) -> None:
        draw = Random(f"{''.join(sorted(letters))} {seed} {model}")
        self.letters, self.seed, self.model = letters, seed, model
        self.is_scripted, self.vocab = model == SCRIPTED, VOCAB[model]
        self.block = draw.choice([2, 4, 4, 8] if self.is_scripted else [8, 16, 16])
        self.least_tokens = 8
        self.most_tokens: int | None = None
        self.is_tight, self.host_blocks, self.adapter_pages, self.right = False, 0, 0, 0.0
        self.texts: dict[int, list[int]] = {}
        self.tensor_size = self.num_stages = 1
        self.has_disk = self.has_contexts = False
        self.kv: dict[str, Any] = {}
        self.options: dict[str, Any] = {
            "policy": draw.choice(list(SchedulerPolicy)), "max_beam_width": draw.choice([1, 1, 3]),
            "model_type": draw.choice([TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching]),
            "max_batch_size": draw.choice([4, 6])}
        self.drawn: set[str] = set()
        features = [FEATURES[letter] for letter in letters]
        for feature in features:
            feature.engine(self, draw)
        self._draw_options(draw)
        if exact and not self.is_scripted:
            self.options |= {"deterministic": True, "quantization": None}
        self.is_exact = self.is_scripted or "deterministic" in self.options and self.tensor_size == 1
        self.asks = self._draw_asks(draw)
        most = max(self._most_blocks(ask) for ask in self.asks)
        self.num_blocks = most + draw.choice([0, 1]) if self.is_tight else 6 * most

    def _most_blocks(self, ask: Ask) -> int:
        """A number of blocks with which the request runs alone. Its beams share the full blocks of the prompt."""
        shared = len(ask.prompt) // self.block
        own = -(-(len(ask.prompt) + ask.count) // self.block) - shared
        return shared + ask.width * own + 2

    def _draw_options(self, draw: Random) -> None:
        def maybe(name: str, share: float) -> bool:
            drawn = draw.random() < share
            if drawn:
                self.drawn.add(name)
            return drawn

        if not set(self.letters) & set("AV") and maybe("overlap", 0.3):
            self.options["enable_trt_overlap"] = True
        if not self.is_scripted and "Q" not in self.letters and maybe("deterministic", 0.2):
            self.options["deterministic"] = True
        if maybe("more active requests than a step has", 0.2) and "V" not in self.letters:
            self.options["max_num_sequences"] = 9
        if self.host_blocks:
            self.drawn.add("host blocks")
        if not self.is_scripted and self.block == 16 and "deterministic" not in self.options:
            self.drawn.add("compiled steps")    # with a C compiler; blocks of 8 tokens run in torch
        if self.options["model_type"] is TrtGptModelType.InflightBatching:
            self.drawn.add("two calls a step")
        self.drawn.add(self.options["policy"].name)

    def _draw_asks(self, draw: Random) -> list[Ask]:
        letters, asks, arrival = self.letters, [], 0
        trunk = [draw.randrange(2, self.vocab) for _ in range(64)]
        sizes = [size for size, count in zip((len(letters), 1, 0), SIZES[self.model]) for _ in range(count)]
        draw.shuffle(sizes)
        styles = [self._draw_style(draw) for _ in range(1 if "V" in letters else 3)]
        for number, size in enumerate(sizes, 1):
            arrival += draw.choice([0, 0, 0, 1] if "V" in letters else [0, 0, 1, 2, 5])
            ask = Ask(number, arrival, draw.randint(1, 14), draw.randint(2, 9), frozenset(draw.sample(letters, size)))
            for letter in letters:
                if letter in ask.has:
                    FEATURES[letter].request(ask, self, draw)
            self._finish(ask, draw, trunk, draw.choice(styles))
            asks.append(ask)
        stopped, failing = draw.sample(asks, 2)
        stopped.fate, failing.fate = "stopped", draw.choice(["fails", "refused"])
        if failing.pattern:
            failing.fate = "refused"
        return asks

    def _finish(self, ask: Ask, draw: Random, trunk: list[int], style: dict[str, Any]) -> None:
        """Draw everything about a request that its features left open."""
        ask.prompt_length = min(ask.prompt_length, MAX_SEQ_LEN - ask.count)
        own = [draw.randrange(2, self.vocab) for _ in range(max(ask.prompt_length - ask.trunk, 1))]
        ask.prompt = (trunk[:ask.trunk] + own)[:MAX_SEQ_LEN - ask.count]
        tensors = ask.tensors
        tensors["return_log_probs"] = True
        if "S" in self.letters and "S" not in ask.has:
            ask.options["speculation"] = False
        if ask.pattern:                        # nothing else may forbid what the grammar asks for
            tensors |= {"end_id": END_OF_A_GRAMMAR} | {name: style[name] for name in style if name in SAMPLING}
        else:
            tensors |= {name: value for name, value in style.items() if not (ask.is_long and name in ENDS)}
        for name, value, share, holds in (
                ("return_context_logits", True, 0.12, not ask.trunk),
                ("return_generation_logits", True, 0.2, True),
                ("return_top_log_probs", 3, 0.2, ask.width == 1),
                ("raw_log_probs", True, 0.1, ask.width == 1),
                ("return_perf_metrics", True, 0.2, True),
                ("input_token_extra_ids", [draw.randrange(3) for _ in ask.prompt], 0.1, not ask.trunk)):
            if draw.random() < share and holds:
                tensors[name] = value
        if not self.is_scripted and not ask.trunk and draw.random() < 0.1:
            rows = min(3, len(ask.prompt))
            table = np.random.default_rng(draw.getrandbits(32)).normal(size=(rows, HIDDEN_SIZES[self.model]))
            tensors |= {"prompt_embedding_table": table.astype(np.float32), "prompt_vocab_size": rows}
            ask.prompt[:rows] = [self.vocab + row for row in range(rows)]
        if ask.width == 1 and draw.random() < 0.4:
            ask.options["is_streaming"] = True
        if draw.random() < 0.2:
            ask.options["priority"] = draw.choice([0.0, 0.25, 0.75, 1.0])
        if not ask.trunk and draw.random() < 0.1:
            ask.options["cache_salt"] = "a"
        self.drawn |= {name for name in (*tensors, *ask.options) if name not in OF_FEATURES}

    def _draw_style(self, draw: Random) -> dict[str, Any]:
        """Return sampling tensors. Several requests have the same, so that static batches of several requests form."""
        ids = draw.sample(range(2, self.vocab), 8)
        style: dict[str, Any] = {"end_id": ids[:1] if self.is_scripted else ids}
        if draw.random() < 0.4:
            style |= {"runtime_top_p": 0.9, "random_seed": draw.getrandbits(63)}
        if self.is_scripted:
            return style
        offers: dict[str, Any] = {
            "temperature": 0.8, "runtime_top_k": 30, "runtime_min_p": 0.02, "repetition_penalty": 1.3,
            "presence_penalty": 0.4, "frequency_penalty": 0.2, "no_repeat_ngram_size": 2, "min_length": 4,
            "bad_words_list": [[7], [8, 9]], "stop_words_list": [[token] for token in ids[2:7]]}
        style |= {name: value for name, value in offers.items() if draw.random() < 0.2}
        if "runtime_top_p" in style and draw.random() < 0.3:
            style |= {"runtime_top_p_decay": 0.9, "runtime_top_p_min": 0.2, "runtime_top_p_reset_ids": ids[0]}
        if "V" not in self.letters and draw.random() < 0.2:
            noise = np.random.default_rng(draw.getrandbits(32)).normal(size=self.vocab)
            style["embedding_bias"] = noise.astype(np.float32)
        return style
