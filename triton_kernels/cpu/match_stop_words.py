"""Stop words on a CPU. The contract is that of triton_kernels/match_stop_words.py."""

import torch

from .ban_words import begun_words


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """[R] bool; see the kernel's docstring for shapes."""
    rows, last = begun_words(history, history_row, length, lists, list_start, count)
    ended = torch.zeros(len(token), dtype=torch.bool, device="cpu")
    ended.numpy()[rows[last == token.numpy()[rows]]] = True
    return ended
