"""Which keys a query sees when attention is limited to a window, and which blocks it therefore reads. Pure functions.

    a query at position p sees the keys k <= p with   k > p - window   or   k < sink

The first `sink` tokens stay visible for ever (StreamingLLM, Xiao et al. 2023). Positions are absolute: a key lies in
the cache rotated by the position it was written at, and nothing is rotated again when tokens between the sinks and the
window are dropped. (The paper numbers what is left in the cache anew, for texts longer than the model's positions; no
sequence here is longer than those.) Without a window sinks mean nothing.
"""

from collections.abc import Sequence

import numpy as np


def effective_windows(model_windows: Sequence[int | None], max_attention_window: int | None, sink_token_length: int,
                      max_seq_len: int) -> tuple[tuple[int | None, ...], int]:
    """(window per layer, sink) from the model's own windows and the configured ones.

    In each layer the smaller of the two windows holds, and none (None) where no sequence outgrows it. Sinks belong to
    the configured window: with one they are visible in every layer, also where the model's own window is the smaller.
    A model's windows alone have no sinks.
    """
    windows = []
    for own in model_windows:
        given = [window for window in (own, max_attention_window) if window is not None]
        windows.append(min(given) if given and min(given) < max_seq_len else None)
    return tuple(windows), sink_token_length if max_attention_window is not None and any(windows) else 0


def blocks_seen(first_position: np.ndarray, length: np.ndarray, block: int, window: int | None,
                sink: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks with a key that some query from first_position to length - 1 sees, element by element.

    Returns   (sink blocks 0 .. s - 1, skipped blocks after them, blocks seen in all); the seen blocks after the sinks
              are s + skipped .. the last. Skipped ones may have been given back: what they hold must not be read.
    """
    first = np.maximum(first_position - window + 1, 0) // block if window else np.zeros_like(first_position)
    sinks = np.minimum(-(-sink // block), first)
    return sinks, first - sinks, (length - 1) // block + 1 - first + sinks
