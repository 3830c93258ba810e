"""Which keys a query sees under a sliding window, and which blocks it reads. Pure functions.

    a query at position p sees the keys k <= p with   k > p - window   or   k < sink

The first `sink` tokens stay visible (StreamingLLM, Xiao et al. 2023). Positions are absolute: a key is rotated once, by
its position, when it is written to the cache. It is not rotated again when tokens between the sinks and the window are
dropped. (The paper renumbers the remaining tokens, to support sequences longer than the model's maximum position. Here
no sequence is that long.) Without a window, `sink` has no effect.
"""

from collections.abc import Sequence

import numpy as np


def effective_windows(model_windows: Sequence[int | None], max_attention_window: int | None, sink_token_length: int,
                      max_seq_len: int) -> tuple[tuple[int | None, ...], int]:
    """Return (window of each layer, number of sink tokens), from the windows of the model and the configured window.

    Each layer uses the smaller of its own window and the configured window, or None if no sequence can be longer than
    this window. Sink tokens need a configured window: without it, or if no layer has a window, their number is 0.
    Otherwise they are visible in every layer that has a window, even if the layer's own window is the smaller.
    """
    windows = []
    for own in model_windows:
        given = [window for window in (own, max_attention_window) if window is not None]
        windows.append(min(given) if given and min(given) < max_seq_len else None)
    return tuple(windows), sink_token_length if max_attention_window is not None and any(windows) else 0


def blocks_seen(first_position: np.ndarray, length: np.ndarray, block: int, window: int | None,
                sink: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Count the blocks that the queries at positions first_position .. length - 1 of each sequence see.

    Returns   (number of sink blocks, number of skipped blocks, number of all blocks that the queries see). The sink
              blocks are the first blocks of the sequence, and the queries see them. The skipped blocks come next.
              The queries do not see them, and they may already be freed. The queries see all blocks after them
    """
    first = np.maximum(first_position - window + 1, 0) // block if window else np.zeros_like(first_position)
    sinks = np.minimum(-(-sink // block), first)
    return sinks, first - sinks, (length - 1) // block + 1 - first + sinks
