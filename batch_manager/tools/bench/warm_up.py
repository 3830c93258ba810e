"""Requests that are served before the measurement."""

from typing import Any

import numpy as np

from ..workload import FIRST_ORDINARY_TOKEN

WARM_UP_PROMPT, WARM_UP_OUTPUT = 48, 6


def warm_up_requests(max_batch: int, vocab_size: int, max_seq_len: int | None, number: int) -> list[dict[str, Any]]:
    """Return a full batch of requests that end one after the other, so that every batch size runs.

    The prompts come from a separate random stream, so that they share no prefix with a workload.

    max_seq_len   a prompt and an output have at most half of it each; None: no limit
    number        number of this warm-up in the run, part of the seed
    """
    random = np.random.default_rng([number, *b"warm-up"])
    longest = max_seq_len or 2**30
    return [
        {
            "id": i,
            "arrival_s": 0.0,
            "max_tokens": min(WARM_UP_OUTPUT + i, longest // 2),
            "prompt": random.integers(min(FIRST_ORDINARY_TOKEN, vocab_size - 1), vocab_size,
                                      min(WARM_UP_PROMPT + i, longest // 2)).tolist(),
        }
        for i in range(max_batch)
    ]
