"""Choosing a token per row on a CPU: argmax, or temperature, top-k, top-p and one uniform number per row.

The meaning is that of the kernel `sample_token` and its oracle; the work is arranged for a CPU. The vocabulary is
looked at in blocks of 64 logits whose maxima are one vectorised pass: the largest logit lies in the block with the
largest maximum, and the K largest logits lie in the K blocks with the largest maxima. Nothing is sorted over the
vocabulary.

    greedy         block maxima, then one block
    top-k          K candidates from K blocks
    top-p          64 candidates, then 1024, until they hold the mass
    no filter      sums of blocks, then one block
    anything else  bisection for the smallest kept logit: ties at a boundary, a very large k, a very flat distribution

A row's result depends on nothing but that row.
"""

import numpy as np
import torch

from ..triton_kernels.reference import philox
from .logprobs import heat_of

BLOCK = 64
CANDIDATES = (64, 1024)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [r] int64, the lowest id among equals; maxima [r]). A row that holds NaN has a maximum of NaN."""
    blocks = _block_maxima(logits)
    maxima, best = blocks.max(1)
    ids = _ids_of(best[:, None], logits.shape[1])
    inside = logits.gather(1, ids).argmax(1, keepdim=True)
    return ids.gather(1, inside)[:, 0], maxima


def sample(logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, seed: np.ndarray,
           position: np.ndarray) -> torch.Tensor:
    """Draw a token per row, [r] int64.

    Shapes   logits [r, vocab] float32, every row with a finite maximum; the others [r] as in SlotState.host, of rows
             that are not greedy; position int32, of the token to be drawn
    """
    draw = _Draw(logits, torch.from_numpy(temperature), torch.from_numpy(top_k).long(),
                 torch.from_numpy(top_p).double(), philox.uniform(torch.from_numpy(seed), torch.from_numpy(position)))
    by_count = (top_k > 0) & (top_k < logits.shape[1])
    by_mass = ~by_count & (top_p > 0) & (top_p < 1)

    tokens = torch.empty(len(logits), dtype=torch.int64)
    for rows, choose in ((by_count, _by_count), (by_mass, _by_mass), (~by_count & ~by_mass, _from_all)):
        if rows.all():
            return choose(draw)
        if rows.any():
            rows = torch.from_numpy(np.nonzero(rows)[0])
            tokens[rows] = choose(draw.select(rows))
    return tokens


class _Draw:
    """Rows to draw from: logits [n, vocab]; heat = 1 / temperature, top_k, top_p, uniform [n]."""

    __slots__ = ("logits", "heat", "top_k", "top_p", "uniform")

    def __init__(self, logits, temperature, top_k, top_p, uniform) -> None:
        self.logits, self.heat = logits, heat_of(temperature)
        self.top_k, self.top_p, self.uniform = top_k, top_p, uniform.double()

    def select(self, rows: torch.Tensor) -> "_Draw":
        part = object.__new__(_Draw)
        for name in self.__slots__:
            setattr(part, name, getattr(self, name)[rows])
        return part

    def weights(self, logits: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
        """Probabilities of `logits` [n, m] up to a factor per row."""
        return (logits - maxima[:, None]).mul_(self.heat[:, None]).exp_()


def _by_count(draw: _Draw) -> torch.Tensor:
    """Top-k, then top-p in what that leaves."""
    blocks = _block_maxima(draw.logits)
    tokens = torch.empty(len(draw.logits), dtype=torch.int64)
    waiting = torch.arange(len(tokens))
    for most in CANDIDATES:
        few = draw.top_k[waiting] <= most
        rows, waiting = waiting[few], waiting[~few]
        if len(rows):
            part = draw.select(rows)
            chosen, solved = _from_largest(part, blocks[rows], int(part.top_k.max()))
            tokens[rows[solved]] = chosen[solved]
            waiting = torch.cat([waiting, rows[~solved]])
    if len(waiting):
        tokens[waiting] = _by_bisection(draw.select(waiting))
    return tokens


def _from_largest(draw: _Draw, blocks: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, whether they are right): wrong where the logit after the k-th equals it."""
    values, ids = _largest(draw.logits, blocks, min(most + 1, draw.logits.shape[1]))
    last = draw.top_k[:, None] - 1
    solved = (values.gather(1, last) > values.gather(1, last + 1))[:, 0]
    weights = draw.weights(values, values[:, 0]).double()
    weights.masked_fill_(torch.arange(values.shape[1]) > last, 0)
    filtered = (draw.top_p > 0) & (draw.top_p < 1)
    if filtered.any():
        target = torch.where(filtered, draw.top_p, 2.0) * weights.sum(1)
        weights.masked_fill_(values < _smallest_kept(values, weights, target), 0)
    return _draw_candidates(weights, ids, draw.uniform), solved


def _by_mass(draw: _Draw) -> torch.Tensor:
    """Top-p alone."""
    blocks = _block_maxima(draw.logits)
    all_weights = draw.weights(draw.logits, blocks.amax(1))
    target = draw.top_p * _block_sums(all_weights).double().sum(1)
    del all_weights

    tokens = torch.empty(len(draw.logits), dtype=torch.int64)
    waiting = torch.arange(len(tokens))
    for most in CANDIDATES:
        if not len(waiting):
            break
        most = min(most, draw.logits.shape[1])
        part = draw.select(waiting)
        values, ids = _largest(part.logits, blocks[waiting], most)
        weights = part.weights(values, values[:, 0]).double()
        smallest = _smallest_kept(values, weights, target[waiting])
        solved = smallest[:, 0] > values[:, -1]                    # else more are needed, or there are equals of it
        solved |= most == draw.logits.shape[1]
        weights.masked_fill_(values < smallest, 0)
        tokens[waiting[solved]] = _draw_candidates(weights, ids, part.uniform)[solved]
        waiting = waiting[~solved]
    if len(waiting):
        tokens[waiting] = _by_bisection(draw.select(waiting))
    return tokens


def _from_all(draw: _Draw) -> torch.Tensor:
    """No filter."""
    return _draw_weights(draw.weights(draw.logits, draw.logits.amax(1)), draw.uniform)


def _by_bisection(draw: _Draw) -> torch.Tensor:
    """Any filter, by looking for the smallest logit it keeps."""
    logits, vocab = draw.logits, draw.logits.shape[1]
    weights = draw.weights(logits, logits.amax(1))
    threshold = logits.amin(1)
    by_count = (draw.top_k > 0) & (draw.top_k < vocab)
    if by_count.any():
        count = torch.where(by_count, draw.top_k, vocab)
        threshold = _threshold(logits, threshold, lambda kept: kept.sum(1) >= count)
        weights.masked_fill_(logits < threshold[:, None], 0)
    by_mass = (draw.top_p > 0) & (draw.top_p < 1)
    if by_mass.any():
        target = torch.where(by_mass, draw.top_p, 0.0) * weights.sum(1, dtype=torch.float64)
        kept_by_mass = _threshold(
            logits, threshold, lambda kept: torch.where(kept, weights, 0).sum(1, dtype=torch.float64) >= target)
        threshold = torch.where(by_mass, kept_by_mass, threshold)
        weights.masked_fill_(logits < threshold[:, None], 0)
    return _draw_weights(weights, draw.uniform)


def _threshold(logits: torch.Tensor, lowest: torch.Tensor, is_enough) -> torch.Tensor:
    """Per row the largest float t >= lowest for which `is_enough(logits >= t)`; it holds for lowest."""
    low, high = _order_of(lowest), _order_of(logits.amax(1))
    while bool((low < high).any()):
        middle = low + (high - low + 1) // 2
        enough = is_enough(logits >= _float_of(middle)[:, None])
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle - 1)
        high = torch.maximum(low, high)
    return _float_of(low)


def _order_of(values: torch.Tensor) -> torch.Tensor:
    """int64 numbers that order like the float32 `values`."""
    bits = values.contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


def _float_of(order: torch.Tensor) -> torch.Tensor:
    bits = order.int()
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """[r, vocab] -> [r, blocks]; the last block may be shorter."""
    return _reduce_blocks(logits, torch.amax)


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    return _reduce_blocks(weights, torch.sum)


def _reduce_blocks(rows: torch.Tensor, reduce) -> torch.Tensor:
    whole = rows.shape[1] // BLOCK * BLOCK
    parts = []
    if whole:
        parts.append(reduce(rows[:, :whole].unflatten(1, (-1, BLOCK)), -1))
    if whole < rows.shape[1]:
        parts.append(reduce(rows[:, whole:], -1)[:, None])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _ids_of(blocks: torch.Tensor, vocab: int) -> torch.Tensor:
    """Token ids in `blocks` [n, m], [n, m * BLOCK]; past the vocabulary its last id is repeated."""
    return (blocks[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1).clamp_(max=vocab - 1)


def _largest(logits: torch.Tensor, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, ids) of the `count` largest logits of each row, descending. `blocks` are the rows' block maxima."""
    if 2 * count > blocks.shape[1]:
        return logits.topk(count, 1)
    best = blocks.topk(count, 1, sorted=False).indices
    ids = (best[:, :, None] * BLOCK + torch.arange(BLOCK)).flatten(1)
    outside = ids >= logits.shape[1]
    values = logits.gather(1, ids.clamp(max=logits.shape[1] - 1)).masked_fill_(outside, -torch.inf)
    values, order = values.topk(count, 1)
    return values, ids.gather(1, order)


def _smallest_kept(values: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """[n, 1]: the value at which the sum of `weights`, in the descending order of `values`, reaches the target.

    Where it never does, the last value.
    """
    missing = (weights.cumsum(1) < target[:, None]).sum(1, keepdim=True)
    return values.gather(1, missing.clamp_(max=values.shape[1] - 1))


def _draw_candidates(weights: torch.Tensor, ids: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The smallest id whose cumulative weight, in the order of ids, exceeds uniform * (sum of weights)."""
    ids, order = ids.sort(1)
    cumulative = weights.gather(1, order).cumsum(1)
    chosen = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    return ids.gather(1, chosen.clamp_(max=ids.shape[1] - 1))[:, 0]


def _draw_weights(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The same over the whole vocabulary: first the block, then the id in it."""
    cumulative = _block_sums(weights).double().cumsum(1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)

    ids = block * BLOCK + torch.arange(BLOCK)
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).masked_fill_(ids >= weights.shape[1], 0).double()
    cumulative = inside.cumsum(1)
    # The block's sum was rounded: its last token that has any weight takes what rounding left over.
    last = (cumulative < cumulative[:, -1:]).sum(1, keepdim=True)
    chosen = torch.searchsorted(cumulative, target - before, right=True)
    return ids.gather(1, torch.minimum(chosen, last))[:, 0]
