"""Whether the newly sampled token completes a stop word.

Arguments, results and rules are those of the kernel, in triton_kernels/match_stop_words.py.
"""

import torch

from .ban_words import lacks_last_token, words_of


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """Return [R] bool: whether the token of each row completes a stop word. See the module docstring for shapes."""
    return torch.tensor([
        any(word[-1] == int(token[row]) and lacks_last_token(word, history, history_row[row], length[row])
            for word in words_of(lists, list_start[row], count[row]))
        for row in range(len(token))], dtype=torch.bool, device=token.device)
