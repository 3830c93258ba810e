"""The items that the server returns from get, valid and faulty, with their expected results."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

from batch_manager.requests.inference_request import InferenceRequest

from .adapters import Adapters
from .history import Handed
from .oracle import Oracle
from .swarm import TEN_YEARS_S, Swarm
from .transfers import SimulatedTransfers


class Nameless:
    """An item without a usable id."""


class Requests:
    """Generates random items and their expected results, by the probabilities of a swarm."""

    def __init__(self, swarm: Swarm, rng: Random, mark: Callable[[str], None], adapters: Adapters,
                 transfers: SimulatedTransfers | None) -> None:
        self.adapters, self.transfers = adapters, transfers
        self.swarm, self.rng, self._mark = swarm, rng, mark
        self._wishes = Random(f"wishes {swarm.seed}")
        self._oracle = Oracle(vocab_size=swarm.vocab_size, key=swarm.seed, window=swarm.window, sink=swarm.sinks)
        self._prefixes = [self._tokens(rng.randint(1, max(swarm.traffic.prompt, 1))) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return self.rng.choices(range(self.swarm.vocab_size), k=count)

    def fair(self, request_id: int) -> tuple[InferenceRequest, Handed]:
        """Return (a valid request, which may be too large, and its expected result)."""
        rng, swarm, traffic = self.rng, self.swarm, self.swarm.traffic
        die = rng.random
        unit = swarm.tokens_per_block
        length = rng.randint(1, traffic.prompt)
        if die() < 0.3:                                            # around a block boundary
            length = rng.randint(1, max(traffic.prompt // unit, 1)) * unit + rng.choice([-1, 0, 0, 1])
        if die() < 0.02 or ("allocator.smallest_pool" in swarm.faults and die() < 0.1):
            length = swarm.max_seq_len - rng.randint(1, 3)
        length = min(max(length, 1), swarm.max_seq_len - 1)
        prompt = self._tokens(length)
        if die() < traffic.shares_prefix:
            prompt = (rng.choice(self._prefixes)[:rng.randint(1, length)] + prompt)[:length]
        output = rng.randint(1, traffic.output)
        if die() < 0.02 or ("allocator.smallest_pool" in swarm.faults and die() < 0.3):
            output = swarm.max_seq_len
        width = 1
        if self._wishes.random() < traffic.beams:
            width, length, output = self._with_beams(length, output)
            prompt = prompt[:length]
        transfer = None if self.transfers is None else self.transfers.wish(prompt, width)
        if transfer is not None and transfer.prompt and width == 1:
            prompt = list(transfer.prompt)

        tensors: dict[str, Any] = {"input_ids": np.array(prompt) if die() < 0.2 else prompt,
                                   "request_output_len": output}
        handed = Handed(0.0, request_id, "", prompt, output)
        options: dict[str, Any] = {}
        if die() < traffic.ends_early:
            tensors["end_id"] = handed.end_id = rng.randrange(swarm.vocab_size)
            if request_id % 4 == 1:
                self._mark("several end ids")
                handed.more_end_ids = [(handed.end_id + step) % swarm.vocab_size for step in (1, 5)]
                tensors["end_id"] = [handed.end_id, *handed.more_end_ids]
        if die() < traffic.samples:
            handed.seed = rng.choice([0, 7, rng.getrandbits(64)])
            tensors |= {"runtime_top_p": 1.0, "random_seed": handed.seed, "temperature": rng.choice([0.5, 1.0])}
            if rng.random() < 0.2:
                tensors["temperature"], handed.seed = 0.0, None
        if die() < traffic.asks_more:
            tensors["return_log_probs"] = handed.log_probs = True
            if width == 1 and request_id % 3 == 0:
                tensors["return_top_log_probs"] = handed.top_log_probs = 1 + request_id % 20
            logits = {f"return_{kind}_logits": True for kind in ("context", "generation") if die() < 0.3}
            if logits:
                self._mark("logits asked for")
                tensors |= logits
        streams = die() < traffic.streams and width == 1
        handed.streams = streams and not swarm.is_static
        handed.excludes = handed.streams or swarm.exclude_input or (swarm.is_static and streams)
        if die() < traffic.deadline:
            options["deadline_s"] = handed.deadline_s = rng.choice([0.001, 0.1, 0.5, 2.0, TEN_YEARS_S])
        if die() < traffic.prioritised:
            options["priority"] = rng.choice([0.0, 0.25, 0.75, 1.0])
        if die() < traffic.salted:
            options["cache_salt"] = rng.choice(["a", "b"])
        if transfer is not None:
            transfer.ask(tensors, options, handed)
        handed.salt = options.get("cache_salt")
        if swarm.drafts and request_id % 7 == 3:
            options["speculation"] = False
        if request_id % 5 == 2:
            self._mark("timings asked for")
            tensors["return_perf_metrics"] = handed.metrics = True
        if width > 1:
            self._ask_for_beams(tensors, handed, width)
        if self._wishes.random() < traffic.words:
            self._ask_for_words(tensors, handed)
        handed.must = self._refusal(len(prompt), handed.max_new_tokens, width)
        if transfer is None and traffic.adapted and self._wishes.random() < traffic.adapted:
            self.adapters.ask(tensors, handed)
            if handed.brings and not handed.must:
                handed.must = None                                 # the id may name other content by then
        return InferenceRequest(request_id, tensors, is_streaming=streams, **options), handed

    def _with_beams(self, prompt: int, output: int) -> tuple[int, int, int]:
        """Return (number of beams, of prompt tokens, of output tokens), which fit the pool in nine of ten cases."""
        rng, swarm = self._wishes, self.swarm
        width = rng.randint(2, swarm.max_beam_width)
        if rng.random() < 0.9:
            output = min(output, swarm.max_seq_len - prompt)
            while output > 1 and self._blocks(prompt, output, width)[1] > swarm.num_blocks:
                output -= -(-output // 4)
            while prompt > 1 and self._blocks(prompt, output, width)[1] > swarm.num_blocks:
                prompt -= -(-prompt // 4)
        return width, prompt, max(output, 1)

    def _ask_for_beams(self, tensors: dict[str, Any], handed: Handed, width: int) -> None:
        rng = self._wishes
        handed.beam_width = tensors["beam_width"] = width
        if rng.random() < 0.7:
            handed.len_penalty = tensors["len_penalty"] = rng.choice([0.0, 0.5, 1.0, 2.0])
        if rng.random() < 0.7:
            handed.early_stopping = tensors["early_stopping"] = rng.choice([0, 1, 2])
        if rng.random() < 0.3:
            handed.diversity_rate = tensors["beam_search_diversity_rate"] = rng.choice([0.5, 2.0])

    def _ask_for_words(self, tensors: dict[str, Any], handed: Handed) -> None:
        """Add stop words. Without beams, also add rules that forbid tokens, which the scripted beam search lacks."""
        rng, is_plain = self._wishes, handed.beam_width == 1
        if is_plain and rng.random() < 0.4:
            tensors["bad_words_list"] = handed.bad_words = self._words(handed.prompt)
        if is_plain and rng.random() < 0.4:
            tensors["no_repeat_ngram_size"] = handed.no_repeat_ngram_size = rng.randint(1, 3)
        if is_plain and rng.random() < 0.4:
            tensors["min_length"] = handed.min_length = rng.choice([1, 3, handed.max_new_tokens])
        if is_plain and rng.random() < 0.4:
            tensors[rng.choice(["repetition_penalty", "presence_penalty", "frequency_penalty"])] = 1.5
            handed.penalizes = True
        if rng.random() < 0.6:
            words = self._words(handed.prompt)
            limit = min(handed.max_new_tokens, self.swarm.max_seq_len - len(handed.prompt))
            text = self._oracle.text(handed, limit, min(limit, 24)).tokens
            if len(text) > 1 and rng.random() < 0.5:               # a stop word that occurs
                start = rng.randrange(len(text) - 1)
                words = [text[start:start + rng.randint(2, 4)]]
            tensors["stop_words_list"] = handed.stop_words = words

    def _words(self, prompt: list[int]) -> list[list[int]]:
        """Return a few words. Some begin with the last tokens of the prompt."""
        rng, vocab, words = self._wishes, self.swarm.vocab_size, []
        for _ in range(rng.randint(1, 4)):
            words.append([rng.randrange(vocab) for _ in range(rng.randint(1, 3))])
            if rng.random() < 0.3:
                words[-1][:-1] = prompt[-rng.randint(1, 3):]
        return words

    def _refusal(self, prompt: int, output: int, width: int) -> str | None:
        """Return the error code with which a valid request must be refused because it can never run.

        "" means that the request must be accepted. None means that acceptance and refusal are both right: with a
        window, or with beams that keep their own blocks of a reused prompt, the engine may need a few blocks more.
        """
        swarm = self.swarm
        total = min(prompt + output, swarm.max_seq_len)
        if width > swarm.max_num_tokens and not swarm.is_static:
            return "INVALID_REQUEST"
        if swarm.chunking is None and not swarm.is_static and prompt > swarm.max_num_tokens:
            return "INVALID_REQUEST"
        fewest, most = self._blocks(prompt, total - prompt, width)
        if most <= swarm.num_blocks:
            return ""
        return None if swarm.window is not None or fewest <= swarm.num_blocks else "TOO_LARGE_FOR_KV_CACHE"

    def _blocks(self, prompt: int, output: int, width: int) -> tuple[int, int]:
        """Return the smallest and the largest number of blocks that the engine may need for a request."""
        unit, swarm = self.swarm.tokens_per_block, self.swarm
        in_all, shared = -(-(prompt + output) // unit), prompt // unit
        fewest = shared + (in_all - shared) * width
        return fewest, fewest + 2 * width * (swarm.window is not None or (swarm.reuse and width > 1))

    def unfair(self, new_id: Callable[[], int]) -> tuple[Any, Handed]:
        """Return (an item that every engine must refuse, or an unaddressable item, and its expected result)."""
        rng, vocab, longest = self.rng, self.swarm.vocab_size, self.swarm.max_seq_len
        kind = rng.randrange(11 if self.swarm.max_beam_width > 1 else 10)
        if kind == 0:
            item = rng.choice([None, 5, "request", Nameless(), object()])
            return item, Handed(0.0, None)
        request_id = new_id()
        good = {"input_ids": [0], "request_output_len": 2}
        bad = [
            {"input_ids": []},
            {"input_ids": [vocab]},
            {"input_ids": [0, -1]},
            {"input_ids": [0] * longest},
            {"input_ids": np.zeros((2, 2), np.int32)},
            {"request_output_len": rng.choice([0, -1, 2**31, 2**63])},
            {"temperature": float("nan")},
            {"input_ids": [0.5]},
            {"end_id": vocab},
            rng.choice([{"beam_width": self.swarm.max_beam_width + 1}, {"beam_width": 2, "streaming": True},
                        {"beam_width": 2, "len_penalty": -1.0}]),
        ][kind - 1]
        return InferenceRequest(request_id, good | bad), Handed(0.0, request_id, "INVALID_REQUEST")

