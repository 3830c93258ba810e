"""Reports the log-probabilities of the likeliest tokens, and raw log-probabilities, for the rows that asked for them.

Raw log-probabilities are the log_softmax of the model's unchanged logits. Both reports need the log-probability of each
token of the vocabulary in memory. The log-probability of the sampled token is taken from the same numbers, and agrees
with the report to the bit.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import TopLogProbs
from ..triton_kernels.cpu.fixed_pieces import row_by_row
from .logits_rows import LogitsRows
from .slots import RAW_LOG_PROBS, TOP_LOG_PROBS

REPORTED = TOP_LOG_PROBS | RAW_LOG_PROBS


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The likeliest tokens of the rows that asked for them, on the device.

    slots     slot of each row
    counts    number of tokens that each row asked for
    tensors   tensors to read back: top_ids [q, k] int32 and top_log_probs [q, k] float32, for q rows, where k is the
              largest of `counts`
    """

    slots: list[int]
    counts: list[int]
    tensors: dict[str, torch.Tensor]

    def by_slot(self, arrays: Mapping[str, np.ndarray]) -> dict[int, TopLogProbs]:
        """Return slot -> likeliest tokens of the slot's rows, which are contiguous, with their log-probs.

        arrays   the arrays of `tensors`, copied to the host
        """
        ids, log_probs = arrays["top_ids"], arrays["top_log_probs"]
        starts = [row for row in range(len(self.slots)) if not row or self.slots[row] != self.slots[row - 1]]
        return {self.slots[start]: TopLogProbs(ids[start:stop, :self.counts[start]],
                                               log_probs[start:stop, :self.counts[start]])
                for start, stop in zip(starts, [*starts[1:], len(self.slots)])}


def log_distribution(logits: torch.Tensor, temperature: torch.Tensor, one_by_one: bool = False) -> torch.Tensor:
    """Return log_softmax(logits / temperature); a temperature of 0 counts as 1.

    one_by_one   the bits of a row do not depend on the other rows; for a CPU
    Shapes       logits [n, vocab] float32; temperature [n] float32
    Mutates      logits
    """
    divisor = temperature.where(temperature != 0, 1)
    # The dividend is at most 0, so a small temperature cannot give +inf.
    logits.sub_(logits.amax(1, keepdim=True)).div_(divisor[:, None])
    return row_by_row(_log_softmax, logits) if one_by_one else _log_softmax(logits)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(1)


def raw_log_probs(logits: torch.Tensor, rows: LogitsRows, one_by_one: bool) -> torch.Tensor:
    """Return [q, vocab] float32: log_softmax of the model's logits, for the q rows that asked for raw log-probs.

    logits       [r, vocab] before post-processors and stages; not changed
    one_by_one   as for `log_distribution`
    """
    (asked,) = rows.send([np.flatnonzero(rows.active(RAW_LOG_PROBS))])
    own = logits[asked].float()
    return log_distribution(own, torch.ones(len(own), dtype=torch.float32, device=own.device), one_by_one)


def report(logits: torch.Tensor, rows: LogitsRows, tokens: torch.Tensor, log_probs: torch.Tensor | None,
           raw: torch.Tensor | None, beam_topk: Callable, one_by_one: bool) -> TopRows | None:
    """Return the likeliest tokens of the rows that asked for them; None if no row asked.

    logits       [r, vocab], after the stages
    tokens       [r], the sampled tokens
    log_probs    [r] float32, the log-probs of the sampled tokens; None: no request asked for log-probs
    raw          [q, vocab] float32: the result of `raw_log_probs`, for the q rows that asked for raw log-probs; None:
                 no row asked
    one_by_one   as for `log_distribution`
    Mutates      log_probs, in the rows that asked for likeliest tokens or raw log-probs
    """
    asked = np.flatnonzero(rows.active(REPORTED))
    is_top, is_raw = rows.active(TOP_LOG_PROBS)[asked], rows.active(RAW_LOG_PROBS)[asked]
    top = np.flatnonzero(is_top)
    device_asked, device_top, device_raw, starts = rows.send([
        asked, top, np.flatnonzero(is_raw), np.arange(len(top) + 1, dtype=np.int32)])
    if is_raw.all():
        distribution = raw
    else:
        distribution = log_distribution(logits[device_asked].float(), rows.column("temperature")[device_asked],
                                        one_by_one)
        if raw is not None:
            distribution[device_raw] = raw
    if log_probs is not None:
        log_probs[device_asked] = distribution.gather(1, tokens[device_asked].long()[:, None])[:, 0]
    if not len(top):
        return None
    slots = rows.slots[asked[top]]
    counts = rows.on_host("top_log_probs")[asked[top]].tolist()
    distribution = distribution if len(top) == len(asked) else distribution[device_top]
    zeros = torch.zeros(len(top), dtype=torch.float32, device=logits.device)
    found, _, ids, _ = beam_topk(distribution, zeros, zeros, zeros, starts, max(counts), 1,
                                 are_log_probs=torch.ones_like(zeros, dtype=torch.bool))
    return TopRows(slots.tolist(), counts, {"top_ids": ids, "top_log_probs": found})
