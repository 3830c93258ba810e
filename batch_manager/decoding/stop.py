"""Whether a token ends its sequence. Lengths are counted by the host."""

import torch

from ..handover import END_ID, NOT_FINISHED, STOP_WORDS, SlotSetup
from ..triton_kernels import dispatch
from .history import TokenHistory
from .slots import DrawRows
from .word_lists import WordLists


def finish_codes(tokens: torch.Tensor, end_ids: torch.Tensor) -> torch.Tensor:
    """FinishReason of each row, [r] uint8. An end id of -1 is no token's."""
    return (tokens == end_ids).to(torch.uint8) * END_ID


class StopWords:
    """Ends a sequence with the last token of a stop word.

    The word's last token is one that was drawn; the others may be of the prompt, as in TensorRT-LLM. An end id that is
    also the last token of a word ends the sequence as an end id. The meaning is that of the kernel `match_stop_words`.
    Those of beams are beam_stop_words.py's: the search wants to know of every candidate.
    """

    def __init__(self, num_slots: int, device: torch.device, history: TokenHistory) -> None:
        self._history = history
        self._kernel = dispatch.kernel("match_stop_words", device) if dispatch.use_triton(device) else None
        self._words = WordLists(num_slots, device, in_kernel=self._kernel is not None)

    def set_up(self, slot: int, setup: SlotSetup) -> None:
        self._words.put(slot, () if setup.has_beams else setup.stop_words)

    def mark(self, finish: torch.Tensor, tokens: torch.Tensor, rows: DrawRows) -> torch.Tensor:
        """`finish` [r] uint8, with STOP_WORDS where `tokens` [r] end a word and nothing else ended the sequence."""
        if not self._words.is_wanted(rows):
            return finish
        if self._kernel is not None:
            ended = self._kernel(tokens, self._history.tokens, self._history.device_rows_of(rows),
                                 rows.device_positions, *self._words.for_kernel(rows)[:3])
        else:
            ended = self._on_host(tokens, rows)
        return finish.masked_fill(ended & (finish == NOT_FINISHED), STOP_WORDS)

    def _on_host(self, tokens: torch.Tensor, rows: DrawRows) -> torch.Tensor:
        history_rows, drawn = self._history.rows_of(rows), tokens.numpy()
        ended = torch.zeros(len(rows), dtype=torch.bool, device="cpu")
        for row in self._words.indices(rows).tolist():
            history = self._history.of_row(int(history_rows[row]), int(rows.positions[row]))
            ended[row] = bool((self._words.last_tokens(int(rows.slots[row]), history) == drawn[row]).any())
        return ended
