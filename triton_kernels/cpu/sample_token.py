"""Sampling a token per row on a CPU. The contract is that of triton_kernels/sample_token.py.

The vocabulary is looked at in blocks of 64 logits whose maxima are one vectorised pass: the largest logit lies in the
block with the largest maximum, and the K largest logits lie in the K blocks with the largest maxima.

    greedy         block maxima, then one block
    top-k          up to 64: that many candidates from as many blocks
    top-p          64 candidates, where they hold the mass
    no filter      sums of blocks, then one block
    anything else  numpy sorts the values, not the ids, with vector instructions, to find the smallest one that is kept:
                   a larger k, a flatter distribution, ties at the boundary

Min-p is a bound on the logit, known beforehand, and takes part in each of them. A log-prob is a pass over the row, so
it is computed for the rows that want one only. A row's result depends on nothing but that row.
"""

import numpy as np
import torch

from ..reference.sample_token import follow
from .logit_blocks import BLOCK, PLACES, block_maxima, block_sums, ids_of, largest

CANDIDATES = 64
LARGEST_INVERSE = 1e38     # of a temperature: it stays finite, so that zero times it is zero

MULTIPLIERS, KEY_STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)         # of Philox-4x32-10
WORD = np.uint64(0xFFFFFFFF)


def sample_token(logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None,
                 min_p=None, wants_log_prob=None, only_greedy=False, slots=None, end_id=None, finish=None,
                 last_tokens=None, counts=None):
    """One token per row; see the kernel's docstring for shapes. Returns (tokens, log_probs, finite)."""
    if slots is not None:
        temperature, top_k, top_p, seed = temperature[slots], top_k[slots], top_p[slots], seed[slots]
        min_p = None if min_p is None else min_p[slots]
    if logits.dtype != torch.float32:
        logits = logits.float()
    chosen, maxima = argmax(logits)
    is_finite = maxima.isfinite()
    if np.count_nonzero(temperature.numpy()):           # else no row is sampled
        k, p, is_warm = top_k.numpy(), top_p.numpy(), temperature.numpy() != 0
        samples = is_finite.numpy() & is_warm & (k != 1) & ((k != 0) | (p != 0))
        if samples.any():
            # A view where all rows are sampled: rows of logits are large.
            of = slice(None) if samples.all() else samples.nonzero()[0]
            chosen[of] = sample(logits[of], temperature.numpy()[of], k[of], p[of], seed.numpy()[of],
                                position.numpy()[of], None if min_p is None else min_p.numpy()[of])
    all_finite = np.count_nonzero(is_finite.numpy()) == len(chosen)
    if not all_finite:
        chosen.masked_fill_(~is_finite, 0)
    # Where no row wants one, anything will do: the maxima are there.
    is_active = wants_log_prob is None or np.count_nonzero(wants_log_prob.numpy())
    of_chosen = _log_probs(logits, chosen, temperature, wants_log_prob) if is_active else maxima
    if not all_finite:
        of_chosen.masked_fill_(~is_finite, torch.nan)
    if finish is not None or last_tokens is not None:
        follow(chosen, position, slots, end_id, finish, last_tokens)
    return (chosen if tokens is None else tokens.copy_(chosen),
            of_chosen if log_probs is None else log_probs.copy_(of_chosen),
            is_finite if finite is None else finite.copy_(is_finite))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [r] int64, the lowest id among equals; maxima [r]). A row that holds NaN has a maximum of NaN."""
    blocks = block_maxima(logits)
    maxima, best = blocks.max(1)
    ids = ids_of(best[:, None], logits.shape[1])
    inside = logits.gather(1, ids).argmax(1, keepdim=True)
    return ids.gather(1, inside)[:, 0], maxima


def sample(logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, seed: np.ndarray,
           position: np.ndarray, min_p: np.ndarray | None = None) -> torch.Tensor:
    """Sample a token per row, [r] int64.

    Shapes   logits [r, vocab] float32, every row with a finite maximum; the others [r], of rows that are not greedy;
             min_p None: 0
    """
    min_p = np.zeros_like(top_p) if min_p is None else min_p
    draw = _Draw(logits, torch.from_numpy(temperature), torch.from_numpy(top_k).long(),
                 torch.from_numpy(top_p).double(), torch.from_numpy(min_p), torch.from_numpy(uniform(seed, position)))
    by_count = (top_k > 0) & (top_k < logits.shape[1])
    by_mass = ~by_count & (top_p > 0) & (top_p < 1)

    tokens = torch.empty(len(logits), dtype=torch.int64, device="cpu")
    for rows, choose in ((by_count, _by_count), (by_mass, _by_mass), (~by_count & ~by_mass, _from_all)):
        if rows.all():
            return choose(draw)
        if rows.any():
            rows = torch.from_numpy(np.nonzero(rows)[0])
            tokens[rows] = choose(draw.select(rows))
    return tokens


def uniform(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """u in [0, 1), float64 [r]: Philox-4x32-10 with the seed as key and the position as counter, word 0, 24 bits of it.

    Shapes   seed [r] int64, the bits of an unsigned seed; position [r]
    Oracle   triton_kernels/reference/philox.py, which says where the numbers come from
    """
    key_0, key_1 = seed.view(np.uint64) & WORD, seed.view(np.uint64) >> np.uint64(32)
    word_0 = position.astype(np.uint64) & WORD
    word_1 = word_2 = word_3 = np.zeros_like(word_0)
    for _ in range(10):
        product_0, product_1 = word_0 * np.uint64(MULTIPLIERS[0]), word_2 * np.uint64(MULTIPLIERS[1])
        word_0, word_1 = (product_1 >> np.uint64(32)) ^ word_1 ^ key_0, product_1 & WORD
        word_2, word_3 = (product_0 >> np.uint64(32)) ^ word_3 ^ key_1, product_0 & WORD
        key_0, key_1 = (key_0 + np.uint64(KEY_STEPS[0])) & WORD, (key_1 + np.uint64(KEY_STEPS[1])) & WORD
    return (word_0 >> np.uint64(8)) * 2.0**-24


class _Draw:
    """Rows to sample from: logits [n, vocab]; inverse_temperature, top_k, top_p, uniform, min_p_margin [n].

    min_p_margin   how far below the largest logit min-p allows one to be, as a number that is not positive
    """

    __slots__ = ("logits", "inverse_temperature", "top_k", "top_p", "uniform", "min_p_margin")

    def __init__(self, logits, temperature, top_k, top_p, min_p, uniform) -> None:
        self.logits, self.inverse_temperature = logits, inverse_of(temperature)
        self.top_k, self.top_p, self.uniform = top_k, top_p, uniform
        self.min_p_margin = temperature * min_p.log()

    @property
    def has_min_p(self) -> bool:
        return bool((self.min_p_margin > -torch.inf).any())

    def select(self, rows: torch.Tensor) -> "_Draw":
        part = object.__new__(_Draw)
        for name in self.__slots__:
            setattr(part, name, getattr(self, name)[rows])
        return part

    def weights(self, logits: torch.Tensor, maxima: torch.Tensor) -> torch.Tensor:
        """Probabilities of `logits` [n, m] up to a factor per row."""
        return (logits - maxima[:, None]).mul_(self.inverse_temperature[:, None]).exp_()


def _by_count(draw: _Draw) -> torch.Tensor:
    """Top-k, then top-p in what that leaves."""
    few = draw.top_k <= CANDIDATES
    if few.all():
        tokens, solved = _from_largest(draw)
        return tokens if solved.all() else _solve_rest(draw, tokens, solved)
    tokens, solved = torch.empty(len(few), dtype=torch.int64, device="cpu"), torch.zeros_like(few)
    if few.any():
        tokens[few], solved[few] = _from_largest(draw.select(few))
    return _solve_rest(draw, tokens, solved)


def _solve_rest(draw: _Draw, tokens: torch.Tensor, solved: torch.Tensor) -> torch.Tensor:
    rest = (~solved).nonzero()[:, 0]
    if len(rest):
        tokens[rest] = _by_sorting(draw.select(rest))
    return tokens


def _from_largest(draw: _Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, whether they are right): wrong where the logit after the k-th equals it, unless both are forbidden."""
    values, ids = largest(draw.logits, block_maxima(draw.logits), int(draw.top_k.max()) + 1)
    last = draw.top_k[:, None] - 1
    kth = values.gather(1, last)
    solved = ((kth > values.gather(1, last + 1)) | (kth == -torch.inf))[:, 0]
    weights = draw.weights(values, values[:, 0]).double()
    weights.masked_fill_(torch.arange(values.shape[1], dtype=torch.int64, device="cpu") > last, 0)
    filtered = (draw.top_p > 0) & (draw.top_p < 1)
    if filtered.any():
        target = torch.where(filtered, draw.top_p, 2.0) * weights.sum(1)
        weights.masked_fill_(values < _smallest_kept(values, weights, target), 0)
    if draw.has_min_p:
        weights.masked_fill_(values < values[:, :1] + draw.min_p_margin[:, None], 0)
    return _draw_candidates(weights, ids, draw.uniform), solved


def _by_mass(draw: _Draw) -> torch.Tensor:
    """Top-p alone."""
    blocks = block_maxima(draw.logits)
    all_weights = draw.weights(draw.logits, blocks.amax(1))
    target = draw.top_p * block_sums(all_weights).double().sum(1)
    del all_weights

    most = min(CANDIDATES, draw.logits.shape[1])
    values, ids = largest(draw.logits, blocks, most)
    weights = draw.weights(values, values[:, 0]).double()
    smallest = _smallest_kept(values, weights, target).maximum(values[:, :1] + draw.min_p_margin[:, None])
    solved = smallest[:, 0] > values[:, -1]                        # else more are needed, or there are equals of it
    solved |= most == draw.logits.shape[1]
    weights.masked_fill_(values < smallest, 0)
    return _solve_rest(draw, _draw_candidates(weights, ids, draw.uniform), solved)


def _from_all(draw: _Draw) -> torch.Tensor:
    """No filter, or min-p alone."""
    maxima = draw.logits.amax(1)
    weights = draw.weights(draw.logits, maxima)
    if draw.has_min_p:
        weights.masked_fill_(draw.logits < (maxima + draw.min_p_margin)[:, None], 0)
    return _draw_weights(weights, draw.uniform)


def _by_sorting(draw: _Draw) -> torch.Tensor:
    """Any filter, by the smallest logit that it keeps."""
    # Row by row: what is looked at stays in the processor's cache.
    smallest = torch.tensor([
        _smallest_of_row(row, inverse, count, mass) for row, inverse, count, mass in zip(
            draw.logits.numpy(), draw.inverse_temperature.numpy(), draw.top_k.tolist(), draw.top_p.tolist())
    ], dtype=draw.logits.dtype, device="cpu")
    maxima = draw.logits.amax(1)
    smallest = smallest.maximum(maxima + draw.min_p_margin)
    weights = draw.weights(draw.logits, maxima).masked_fill_(draw.logits < smallest[:, None], 0)
    return _draw_weights(weights, draw.uniform)


def _smallest_of_row(logits: np.ndarray, inverse_temperature: np.float32, top_k: int, top_p: float) -> float:
    """The smallest of `logits` [vocab] that top-k, then top-p keep."""
    ascending = np.sort(logits)
    if 0 < top_k < len(ascending):
        # With the equals of the k-th.
        ascending = ascending[np.searchsorted(ascending, ascending[-top_k]) :]
    if not 0 < top_p < 1:
        return float(ascending[0])

    weights = np.zeros(-(-len(ascending) // BLOCK) * BLOCK, np.float32)
    np.exp((ascending[::-1] - ascending[-1]) * inverse_temperature, out=weights[: len(ascending)])
    weights = weights.reshape(-1, BLOCK)
    cumulative = weights.sum(1).cumsum(dtype=np.float64)
    target = top_p * cumulative[-1]
    block = int(np.searchsorted(cumulative, target))
    before = cumulative[block - 1] if block else 0.0
    inside = int(np.searchsorted(weights[block].cumsum(dtype=np.float64), target - before))
    return float(ascending[-1 - min(block * BLOCK + min(inside, BLOCK - 1), len(ascending) - 1)])


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
    cumulative = block_sums(weights).double().cumsum(1)
    target = uniform[:, None] * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)

    ids = block * BLOCK + PLACES
    inside = weights.gather(1, ids.clamp(max=weights.shape[1] - 1)).masked_fill_(ids >= weights.shape[1], 0).double()
    cumulative = inside.cumsum(1)
    # The block's sum was rounded: its last token that has any weight takes what rounding left over.
    last = (cumulative < cumulative[:, -1:]).sum(1, keepdim=True)
    chosen = torch.searchsorted(cumulative, target - before, right=True)
    return ids.gather(1, torch.minimum(chosen, last))[:, 0]


def _log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor,
               wants_log_prob: torch.Tensor | None) -> torch.Tensor:
    """log_softmax(logits / temperature) at the tokens, [r] float32; anything in the rows that do not want it."""
    if wants_log_prob is None or bool(wants_log_prob.all()):
        return chosen_log_probs(logits, tokens, temperature)
    log_probs, wanted = torch.empty(len(tokens), dtype=torch.float32, device="cpu"), wants_log_prob.nonzero()[:, 0]
    log_probs[wanted] = chosen_log_probs(logits[wanted], tokens[wanted], temperature[wanted])
    return log_probs


def chosen_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """log_softmax(logits / temperature) at the chosen tokens, [r] float32. A temperature of 0 counts as 1.

    Shapes   logits [r, vocab] float32; tokens [r]; temperature [r] float32
    """
    top = logits.amax(1, keepdim=True)
    scaled = (logits - top).mul_(inverse_of(temperature)[:, None])
    chosen = scaled.gather(1, tokens.long()[:, None])[:, 0]
    return chosen - scaled.exp_().sum(1).log_()


def inverse_of(temperature: torch.Tensor) -> torch.Tensor:
    """1 / temperature, with temperature 0 taken for 1."""
    return torch.where(temperature == 0, 1.0, temperature).reciprocal().clamp_(max=LARGEST_INVERSE)
