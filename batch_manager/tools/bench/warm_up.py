"""Requests that are served before the measurement."""

from typing import Any

import numpy as np

from ..workload import FIRST_ORDINARY_TOKEN

WARM_UP_PROMPT, WARM_UP_OUTPUT = 48, 6
MOST_REQUESTS = 1024        # of one warm-up, so that its memory and time do not grow with a large --max-batch
MOST_EXTRA_PROMPT = 64


def warm_up_requests(num_requests: int, vocab_size: int, max_seq_len: int | None, number: int) -> list[dict[str, Any]]:
    """Return at most MOST_REQUESTS requests that end one after the other, so that every batch size runs.

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
                                      min(WARM_UP_PROMPT + i % MOST_EXTRA_PROMPT, longest // 2)).tolist(),
        }
        for i in range(min(num_requests, MOST_REQUESTS))
    ]
