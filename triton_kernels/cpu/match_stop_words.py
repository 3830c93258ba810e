"""Stop words on a CPU. Same contract as triton_kernels/match_stop_words.py."""

import torch

from .ban_words import words_lacking_last_token


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """Return [R] bool: whether the token of each row completes a stop word.

    See triton_kernels/match_stop_words.py for shapes.
    """
    rows, last = words_lacking_last_token(history, history_row, length, lists, list_start, count)
    ended = torch.zeros(len(token), dtype=torch.bool, device="cpu")
    ended.numpy()[rows[last == token.numpy()[rows]]] = True
    return ended
