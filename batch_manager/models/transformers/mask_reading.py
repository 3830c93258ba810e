"""Reads the window of a layer from the function that defines its mask."""

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedModelError, counted

MOST_READ = 2**20                 # keys of one row that are checked


def read_window(sees: Callable[..., Any], max_positions: int, layer: str) -> int | None:
    """Return the window of a causal mask, in tokens, including the query's own token; None: the mask has no window.

    max_positions   number of positions of the model; the mask has as many rows. Only a few rows are checked; the last
                    of them is row min(max_positions, 2**20) - 1
    layer           name of the layer, for the message of the error
    Raises UnsupportedModelError for any other mask.
    """
    last = min(max_positions, MOST_READ) - 1
    try:
        row = _row(sees, last)
        window = int(row[: last + 1].sum())
        if not window:
            raise _unsupported(layer, f"the query at position {last:,} sees no key")
        queries = {0, 1, 2, 7, last // 3, last // 2, last - 1, *(window * times + by for times in (1, 2, 3)
                                                                for by in (-1, 0, 1))}
        for query in sorted(query for query in queries if 0 <= query <= last) + [last]:
            first = max(query - window + 1, 0)
            row = _row(sees, query)
            if bool(row[:first].any()) or not bool(row[first : query + 1].all()) or bool(row[query + 1 :].any()):
                raise _unsupported(layer, f"for a window of {counted(window, 'token')}, the query at position "
                                          f"{query:,} must see positions {first:,} to {query:,} and no others")
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _unsupported(layer, f"reading it raised {type(error).__name__}") from None
    return None if window > last else window


def _row(sees: Callable[..., Any], query: int) -> torch.Tensor:
    """Return a bool for each key up to two positions after the query: whether the query sees the key."""
    keys = torch.arange(query + 3, dtype=torch.int64, device="cpu")
    zero = torch.zeros_like(keys)
    seen = sees(zero, zero, zero + query, keys)
    if not isinstance(seen, torch.Tensor) or seen.shape != keys.shape or seen.device.type != "cpu":
        raise TypeError
    return seen


def _unsupported(layer: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the mask of {layer} is not causal with one window: {reason}",
                                 "expected a mask that shows all earlier tokens, or a fixed number of them",
                                 "use a model without that mask")
