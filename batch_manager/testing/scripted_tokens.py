"""The tokens of a ScriptedBackend: the next one is a keyed hash of all tokens that the sequence attends to.

    term(i, token)  = mix(key + (i + 1) * A + (token + 1) * B + mark)      mix: the finalizer of splitmix64
    word            = mix(key ^ salt ^ sum of the terms of the history)    all modulo 2^64
    next token      = (word >> 16) % vocab_size                            log-prob = -(word & 0xFFFF) / 4096
    salt            = 0 for a greedy sequence, mix(random_seed ^ A) for a sampled one
    i               = position of the token in its sequence;  key, A, B: constants
    mark            = 0 without an adapter, else mix(sum of mix(word of page j + (j + 1) * A)) over the adapter's pages

The word of a page is a hash of the content that was loaded into it, and of the rank.

With beams, each beam has as many candidates as the beam search considers, at most vocab_size. The beam search is the
same as for models:

    candidate j     = (next token + j) % vocab_size, with the log-prob of word_j
    word_j          = word for j = 0, mix(word + j * A) otherwise

The backend computes with arrays. The oracles `expected_samples` and `expected_candidates` use Python's integers, one
token after another.
"""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from ..adapter_values import AdapterContent
from ..decoding.beam_search import BeamSearch
from ..handover import SlotSetup

WORD = (1 << 64) - 1
POSITION_FACTOR, TOKEN_FACTOR = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def expected_samples(prompt: Sequence[int], count: int, *, vocab_size: int = 1000, key: int = 0,
                     end_id: int | Sequence[int] = -1, random_seed: int | None = None, window: int | None = None,
                     sink: int = 0, adapter: AdapterContent | None = None) -> list[tuple[int, float]]:
    """Return up to `count` pairs (token, log-prob) after `prompt`, without the end id, computed one token at a time."""
    terms: list[int] = []
    mark = mark_of([] if adapter is None else page_words(adapter))
    end_ids = {end_id} if isinstance(end_id, int) else set(end_id)

    def seen_with(token: int) -> int:
        """Append a token, and return by how much the sum of the visible hash terms changes.

        The new term is added, and the term that leaves the window is subtracted.
        """
        position = len(terms)
        terms.append(mix(key + (position + 1) * POSITION_FACTOR + (token + 1) * TOKEN_FACTOR + mark))
        leaves = window is not None and position - window >= sink
        return terms[position] - (terms[position - window] if leaves else 0)

    history_sum = sum(map(seen_with, prompt))
    salt = 0 if random_seed is None else mix(random_seed ^ POSITION_FACTOR)

    samples: list[tuple[int, float]] = []
    while len(samples) < count:
        word = mix(key ^ salt ^ (history_sum & WORD))
        token = (word >> 16) % vocab_size
        if token in end_ids:
            break
        samples.append((token, -(word & 0xFFFF) / 4096))
        history_sum += seen_with(token)
    return samples


def expected_candidates(history: Sequence[int], count: int, *, vocab_size: int = 1000, key: int = 0,
                        window: int | None = None, sink: int = 0, adapter: AdapterContent | None = None
                        ) -> list[tuple[int, float]]:
    """Oracle for beams: return up to `count` candidates (token, log-prob) after a history."""
    mark = mark_of([] if adapter is None else page_words(adapter))
    length = len(history)
    seen = [i for i in range(length) if window is None or i >= length - window or i < sink]
    terms = [mix(key + (i + 1) * POSITION_FACTOR + (history[i] + 1) * TOKEN_FACTOR + mark) for i in seen]
    word = mix(key ^ (sum(terms) & WORD))
    words = [word] + [mix(word + j * POSITION_FACTOR) for j in range(1, min(count, vocab_size))]
    return [(((word >> 16) + j) % vocab_size, -(words[j] & 0xFFFF) / 4096) for j in range(len(words))]


def page_words(adapter: AdapterContent) -> list[int]:
    """Return the words of the pages of an adapter, in order of rank."""
    return [int.from_bytes(blake2b(adapter.digest + rank.to_bytes(2, "big"), digest_size=8).digest(), "big") | 1
            for rank in range(adapter.num_pages)]


def mark_of(words: Sequence[int]) -> int:
    """Return the mark of an adapter whose pages have these words; 0 without pages."""
    return mix(sum(mix(word + (rank + 1) * POSITION_FACTOR) for rank, word in enumerate(words))) if words else 0


def salt_of(setup: SlotSetup) -> int:
    return 0 if setup.sampling.is_greedy else mix(setup.sampling.random_seed ^ POSITION_FACTOR)


def mix(word: int) -> int:
    word &= WORD
    word = ((word ^ (word >> 30)) * MIX_1) & WORD
    word = ((word ^ (word >> 27)) * MIX_2) & WORD
    return word ^ (word >> 31)


def mix_array(words: np.ndarray) -> np.ndarray:
    """Apply the hash function `mix` to every element of `words`, in place."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(MIX_1)
    words ^= words >> np.uint64(27)
    words *= np.uint64(MIX_2)
    words ^= words >> np.uint64(31)
    return words


def log_probs_of(words: np.ndarray) -> np.ndarray:
    return (words & np.uint64(0xFFFF)).astype(np.float32) / np.float32(-4096)


def best_candidates(search: BeamSearch, words: np.ndarray, vocab_size: int) -> tuple[np.ndarray, ...]:
    """Return (log-probs, parents, tokens) of the best candidates of a step of `search`, best first.

    The kernel `beam_topk` chooses and orders candidates in the same way.

    words   [beams] the word of each beam, as in the formulas at the top of the file
    """
    count, wanted = min(search.num_candidates, vocab_size), search.num_candidates
    steps = np.arange(count, dtype=np.uint64)
    tokens = ((((words >> np.uint64(16)) % np.uint64(vocab_size))[:, None] + steps) % np.uint64(vocab_size)).astype(int)
    numbers = mix_array(words[:, None] + steps * np.uint64(POSITION_FACTOR))
    numbers[:, 0] = words
    log_probs = log_probs_of(numbers)

    order = np.lexsort((tokens, -log_probs), axis=1)
    tokens, log_probs = np.take_along_axis(tokens, order, 1), np.take_along_axis(log_probs, order, 1)
    diversity = np.float32(search.sampling.beam_search_diversity_rate)
    scores = search.cum_log_probs[:, None] + log_probs - diversity * steps.astype(int)
    best = np.argsort(-scores, axis=None, kind="stable")[:wanted]
    best = best[scores.ravel()[best] > -np.inf]
    padding = (0, wanted - len(best))
    return (np.pad(log_probs.ravel()[best], padding, constant_values=-np.inf),
            np.pad((best // count).astype(np.int32), padding), np.pad(tokens.ravel()[best].astype(np.int32), padding))
