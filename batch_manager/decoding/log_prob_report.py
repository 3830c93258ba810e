"""Log-probabilities that are reported besides those of `sample_token`: of the likeliest tokens, and of the model's own
distribution.

Either is read from a distribution that is written out, row by row of those that asked. The log-probability of the token
that was sampled is read from it too, so that the two agree to the bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..handover import TopLogProbs
from .logits_rows import LogitsRows
from .slots import RAW_LOG_PROBS, TOP_LOG_PROBS, Send

REPORTED = TOP_LOG_PROBS | RAW_LOG_PROBS


@dataclass(frozen=True, slots=True, eq=False)
class TopRows:
    """The likeliest tokens of the rows that asked for them, on the device.

    slots     of the rows, in order
    counts    how many each row asked for
    tensors   to be read back: top_ids [q, k] int32 and top_log_probs [q, k] float32, k the largest of `counts`
    """

    slots: list[int]
    counts: list[int]
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def joined(parts: "Sequence[TopRows | None]") -> "TopRows | None":
        """The rows of all parts, one after the other; None where there are none."""
        parts = [part for part in parts if part is not None]
        if not parts:
            return None
        most = max(max(part.counts) for part in parts)
        tensors = {name: torch.cat([torch.nn.functional.pad(part.tensors[name], (0, most - max(part.counts)))
                                    for part in parts]) for name in parts[0].tensors}
        return TopRows([slot for part in parts for slot in part.slots],
                       [count for part in parts for count in part.counts], tensors)

    def by_slot(self, arrays: Mapping[str, np.ndarray]) -> dict[int, TopLogProbs]:
        """slot -> what its row asked for. arrays: `tensors`, on the host"""
        ids, log_probs = arrays["top_ids"], arrays["top_log_probs"]
        return {slot: TopLogProbs(ids[row: row + 1, :count], log_probs[row: row + 1, :count])
                for row, (slot, count) in enumerate(zip(self.slots, self.counts))}


def log_distribution(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits / temperature); a temperature of 0 counts as 1.

    Shapes    logits [n, vocab] float32; temperature [n] float32
    Mutates   logits
    """
    divisor = temperature.where(temperature != 0, 1)
    # What is divided is at most 0, so that a small temperature makes no infinity of it.
    return logits.sub_(logits.amax(1, keepdim=True)).div_(divisor[:, None]).log_softmax(1)


def raw_log_probs(logits: torch.Tensor, rows: LogitsRows) -> torch.Tensor:
    """[q, vocab] float32: the model's own distributions, of the rows that asked for them. `logits` is as the model gave
    it, and stays so."""
    asked = torch.from_numpy(np.flatnonzero(rows.active(RAW_LOG_PROBS))).to(logits.device)
    own = logits[asked].float()
    return log_distribution(own, torch.ones(len(own), dtype=torch.float32, device=own.device))


def report(logits: torch.Tensor, rows: LogitsRows, tokens: torch.Tensor, log_probs: torch.Tensor | None,
           raw: torch.Tensor | None, beam_topk: Callable, send: Send) -> TopRows | None:
    """The likeliest tokens of the rows that asked for them.

    logits      [r, vocab], after the stages
    tokens      [r]: what was sampled
    log_probs   [r] float32; None: no request asked
    raw         [q, vocab] float32: what `raw_log_probs` gave for these rows; None: none of them asked
    Mutates     log_probs: of the rows that asked for REPORTED
    """
    asked = np.flatnonzero(rows.active(REPORTED))
    is_top, is_raw = rows.active(TOP_LOG_PROBS)[asked], rows.active(RAW_LOG_PROBS)[asked]
    top = np.flatnonzero(is_top)
    there, top_there, raw_there, starts = send([
        asked, top, np.flatnonzero(is_raw), np.arange(len(top) + 1, dtype=np.int32)])
    if is_raw.all():
        distribution = raw
    else:
        distribution = log_distribution(logits[there].float(), rows.column("temperature")[there])
        if raw is not None:
            distribution[raw_there] = raw
    if log_probs is not None:
        log_probs[there] = distribution.gather(1, tokens[there].long()[:, None])[:, 0]
    if not len(top):
        return None
    slots = rows.slots[asked[top]]
    counts = rows.on_host("top_log_probs")[asked[top]].tolist()
    distribution = distribution if len(top) == len(asked) else distribution[top_there]
    zeros = torch.zeros(len(top), dtype=torch.float32, device=logits.device)
    found, _, ids, _ = beam_topk(distribution, zeros, zeros, zeros, starts, max(counts), 1,
                                 are_log_probs=torch.ones_like(zeros, dtype=torch.bool))
    return TopRows(slots.tolist(), counts, {"top_ids": ids, "top_log_probs": found})
