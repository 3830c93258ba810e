"""Sampling of one token per row on a CPU. Same contract as triton_kernels/sample_token.py.

The vocabulary is divided into blocks of 64 logits, whose maxima take one vectorized pass. The largest logit is in the
block with the largest maximum, and the K largest logits are in the K blocks with the largest maxima.

    greedy         block maxima, then one block
    top-k <= 64    k candidates from k blocks
    top-p          64 candidates, if their total probability suffices
    no filter      sums of the probabilities in each block, then one block
    otherwise      sort the values (not the ids) with numpy's vectorized sort to find the smallest kept value. This case
                   is a larger k, a flatter distribution, or ties at the boundary

Min-p is a lower bound on logits that is known in advance. It is applied in all of these cases. A log-prob takes a pass
over the row, so it is computed only for rows that need it. The result of a row depends on that row alone: with the
compiled library bit by bit, without it except for the rounding of torch's sums.
"""

import sys
from math import log, nan

import numpy as np
import torch

from ..reference.philox import BLOCKS, TOKENS
from ..reference.sample_token import record_tokens
from .logit_blocks import BLOCK, OFFSETS, block_maxima, block_sums, ids_of, largest
from .native.library import Library, loaded_library

CANDIDATES = 64
LARGEST_INVERSE = 1e38     # limit of an inverse temperature, because 0 * inf is NaN

MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)                  # of Philox-4x32-10
KEY_STEPS = np.array([[0x9E3779B9, 0xBB67AE85]], np.uint32) * np.arange(10, dtype=np.uint32)[:, None]
SHIFT = BLOCK.bit_length() - 1     # number of bits of an id's place in its block
QUARTERS = np.arange(BLOCK // 4)
NO_ID = np.iinfo(np.int64).max
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)      # halves of a 64-bit number in memory


def sample_token(logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None,
                 min_p=None, wants_log_prob=None, only_greedy=False, slots=None, end_id=None, finish=None,
                 last_tokens=None, counts=None, native: Library | None = None):
    """Sample one token per row. Returns (tokens, log_probs, finite). See triton_kernels/sample_token.py for shapes.

    native   the compiled library, which then computes the probabilities; None: torch does
    """
    if slots is not None:
        temperature, top_k, top_p, seed = temperature[slots], top_k[slots], top_p[slots], seed[slots]
        min_p = None if min_p is None else min_p[slots]
    if logits.dtype != torch.float32:
        logits = logits.float()
    chosen, maxima = argmax(logits)
    is_finite = maxima.isfinite()
    if np.count_nonzero(temperature.numpy()):           # else all rows are greedy
        k, p, is_warm = top_k.numpy(), top_p.numpy(), temperature.numpy() != 0
        samples = is_finite.numpy() & is_warm & (k != 1) & ((k != 0) | (p != 0))
        if samples.any():
            # A view if all rows are sampled, because rows of logits are large.
            rows = slice(None) if samples.all() else samples.nonzero()[0]
            chosen[rows] = sample(logits[rows], temperature.numpy()[rows], k[rows], p[rows], seed.numpy()[rows],
                                  position.numpy()[rows], None if min_p is None else min_p.numpy()[rows], native)
    all_finite = np.count_nonzero(is_finite.numpy()) == len(chosen)
    if not all_finite:
        chosen.masked_fill_(~is_finite, 0)
    # If no row needs a log-prob, the values are arbitrary: reuse the maxima.
    is_active = wants_log_prob is None or np.count_nonzero(wants_log_prob.numpy())
    chosen_log_prob = _log_probs(logits, chosen, temperature, wants_log_prob, native) if is_active else maxima
    if not all_finite:
        chosen_log_prob.masked_fill_(~is_finite, torch.nan)
    if finish is not None or last_tokens is not None:
        record_tokens(chosen, position, slots, end_id, finish, last_tokens)
    return (chosen if tokens is None else tokens.copy_(chosen),
            chosen_log_prob if log_probs is None else log_probs.copy_(chosen_log_prob),
            is_finite if finite is None else finite.copy_(is_finite))


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (tokens [r] int64, maxima [r]). Ties: the lowest id. The maximum of a row with NaN is NaN."""
    blocks = block_maxima(logits)
    maxima, best = blocks.max(1)
    ids = ids_of(best[:, None], logits.shape[1])
    inside = logits.gather(1, ids).argmax(1, keepdim=True)
    return ids.gather(1, inside)[:, 0], maxima


def sample(logits: torch.Tensor, temperature: np.ndarray, top_k: np.ndarray, top_p: np.ndarray, seed: np.ndarray,
           position: np.ndarray, min_p: np.ndarray | None = None, native: Library | None = None) -> torch.Tensor:
    """Sample one token per row. Returns [r] int64.

    Shapes   logits [r, vocab] float32; the other arguments [r]. min_p None: no min-p
    native   see `sample_token`
    Needs    no row is greedy, and all rows have a finite maximum
    """
    min_p = np.zeros_like(top_p) if min_p is None else min_p
    batch = _Batch(logits, torch.from_numpy(temperature), torch.from_numpy(top_k).long(),
                   torch.from_numpy(top_p).double(), torch.from_numpy(min_p), torch.from_numpy(seed),
                   torch.from_numpy(position), native)
    by_count = (top_k > 0) & (top_k < logits.shape[1])
    by_mass = ~by_count & (top_p > 0) & (top_p < 1)

    tokens = torch.empty(len(logits), dtype=torch.int64, device="cpu")
    for rows, choose in ((by_count, _by_count), (by_mass, _by_mass), (~by_count & ~by_mass, _from_all)):
        if rows.all():
            return choose(batch)
        if rows.any():
            rows = torch.from_numpy(np.nonzero(rows)[0])
            tokens[rows] = choose(batch.select(rows))
    return tokens


def philox(seed: np.ndarray, position: np.ndarray, purpose: np.ndarray, quarter: np.ndarray) -> np.ndarray:
    """Return the words of Philox-4x32-10 with the seed as key and (position, purpose, quarter, 0) as counter.

    Computed by the compiled library if this process has loaded it, otherwise in numpy, with the same result.

    Shapes   seed [r] int64, the bits of an unsigned seed; position [r] int32; purpose [c] uint32; quarter [r, c], or
             [c] for the same numbers in all rows; the result [r, 4, c] uint32
    Oracle   triton_kernels/reference/philox.py, which names the source
    """
    library = loaded_library()
    if library is None:
        return _philox_in_numpy(seed, position, purpose, quarter)
    words = np.empty((len(seed), 4, len(purpose)), np.uint32)
    seed, position, quarter = np.ascontiguousarray(seed), np.ascontiguousarray(position), quarter.astype(np.uint32)
    library.philox_words(seed.ctypes.data, position.ctypes.data, purpose.ctypes.data, quarter.ctypes.data,
                         len(purpose) if quarter.ndim > 1 else 0, len(seed), len(purpose), words.ctypes.data)
    return words


def _philox_in_numpy(seed: np.ndarray, position: np.ndarray, purpose: np.ndarray, quarter: np.ndarray) -> np.ndarray:
    seed = np.ascontiguousarray(seed)
    keys = (seed.view(np.uint32).reshape(-1, 2)[:, [LOW, HIGH]] + KEY_STEPS[:, None])[..., None]    # [10, r, 2, 1]
    counters = np.zeros((len(seed), 4, quarter.shape[-1]), np.uint32)
    counters[:, 0], counters[:, 1], counters[:, 2] = position[:, None], purpose, quarter
    multiplied, others = counters[:, ::2].astype(np.uint64), counters[:, 1::2]       # words 0 and 2, words 1 and 3
    products = np.empty_like(multiplied)
    halves = products.view(np.uint32).reshape(*products.shape, 2)
    low, high = halves[:, ::-1, :, LOW], halves[:, ::-1, :, HIGH]                    # of word 2 first, then of word 0
    mixed = np.empty_like(others)
    for key in keys:
        np.multiply(multiplied, MULTIPLIERS[:, None], out=products)
        np.bitwise_xor(others, key, out=mixed)
        np.bitwise_xor(mixed, high, out=multiplied)
        others = low.copy()
    counters[:, ::2], counters[:, 1::2] = multiplied, others
    return counters


def gumbel(words: np.ndarray) -> np.ndarray:
    """Return -log(-log(u)), float32, u = ((word >> 9) + 1/2) * 2^-23, of each word of `philox`."""
    u = ((words >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(u))


class _Batch:
    """Rows to sample: logits [n, vocab]; inverse_temperature, top_k, top_p, seed, position, min_p_margin [n].

    min_p_margin   <= 0; min-p keeps logits >= the largest logit + min_p_margin
    native         see `sample_token`
    """

    __slots__ = ("logits", "inverse_temperature", "top_k", "top_p", "seed", "position", "min_p_margin", "native")

    def __init__(self, logits, temperature, top_k, top_p, min_p, seed, position, native) -> None:
        self.logits, self.inverse_temperature = logits, inverse_temperature_of(temperature)
        self.top_k, self.top_p, self.seed, self.position, self.native = top_k, top_p, seed, position, native
        with np.errstate(divide="ignore"):
            self.min_p_margin = temperature * torch.from_numpy(np.log(min_p.numpy()))

    @property
    def has_min_p(self) -> bool:
        return bool((self.min_p_margin > -torch.inf).any())

    def select(self, rows: torch.Tensor) -> "_Batch":
        part = object.__new__(_Batch)
        for name in self.__slots__[:-1]:
            setattr(part, name, getattr(self, name)[rows])
        part.native = self.native
        return part

    def weights(self, logits: torch.Tensor, maxima: torch.Tensor, smallest: torch.Tensor | None = None
                ) -> torch.Tensor:
        """Return unnormalized probabilities of `logits` [n, m], with 1 at the maximum of a row.

        smallest   [n]: smaller logits have probability 0; None: none
        """
        if self.native is not None:
            return weigh(self.native, logits, self.inverse_temperature, maxima, smallest, "weights")
        weights = (logits - maxima[:, None]).mul_(self.inverse_temperature[:, None]).exp_()
        return weights if smallest is None else weights.masked_fill_(logits < smallest[:, None], 0)

    def block_weights(self, maxima: torch.Tensor, smallest: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of `weights` of each block of all logits, [n, blocks]."""
        if self.native is not None:
            return weigh(self.native, self.logits, self.inverse_temperature, maxima, smallest, "sums")
        return block_sums(self.weights(self.logits, maxima, smallest))


def _by_count(batch: _Batch) -> torch.Tensor:
    """Return the tokens [n] of rows with top-k, sampled from the tokens that top-k, top-p and min-p keep in turn."""
    few = batch.top_k <= CANDIDATES
    if few.all():
        tokens, solved = _from_largest(batch)
        return tokens if solved.all() else _solve_rest(batch, tokens, solved)
    tokens, solved = torch.empty(len(few), dtype=torch.int64, device="cpu"), torch.zeros_like(few)
    if few.any():
        tokens[few], solved[few] = _from_largest(batch.select(few))
    return _solve_rest(batch, tokens, solved)


def _solve_rest(batch: _Batch, tokens: torch.Tensor, solved: torch.Tensor) -> torch.Tensor:
    """Sample the rows that are not `solved`, by sorting. Writes their tokens to `tokens` and returns `tokens`."""
    rest = (~solved).nonzero()[:, 0]
    if len(rest):
        tokens[rest] = _by_sorting(batch.select(rest))
    return tokens


def _from_largest(batch: _Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token for each row, from the k largest logits of the row. Top-p and min-p can exclude some of them.

    Returns (tokens [n], whether each token is valid [n]).

    A token is invalid if the k-th largest logit of its row equals the next largest, unless both are -inf.
    """
    values, ids = largest(batch.logits, block_maxima(batch.logits), int(batch.top_k.max()) + 1)
    last = batch.top_k[:, None] - 1
    kth = values.gather(1, last)
    solved = ((kth > values.gather(1, last + 1)) | (kth == -torch.inf))[:, 0]
    weights = batch.weights(values, values[:, 0]).double()
    weights.masked_fill_(torch.arange(values.shape[1], dtype=torch.int64, device="cpu") > last, 0)
    filtered = (batch.top_p > 0) & (batch.top_p < 1)
    if filtered.any():
        target = torch.where(filtered, batch.top_p, 2.0) * weights.cumsum(1)[:, -1]    # in order: zeros change nothing
        weights.masked_fill_(values < _smallest_kept(values, weights, target), 0)
    if batch.has_min_p:
        weights.masked_fill_(values < values[:, :1] + batch.min_p_margin[:, None], 0)
    return _draw_candidate(weights, ids, batch), solved


def _by_mass(batch: _Batch) -> torch.Tensor:
    """Return the tokens [n] of rows without top-k, sampled from the tokens that top-p and min-p keep."""
    blocks = block_maxima(batch.logits)
    target = batch.top_p * batch.block_weights(blocks.amax(1)).double().cumsum(1)[:, -1]

    most = min(CANDIDATES, batch.logits.shape[1])
    values, ids = largest(batch.logits, blocks, most)
    weights = batch.weights(values, values[:, 0]).double()
    smallest = _smallest_kept(values, weights, target).maximum(values[:, :1] + batch.min_p_margin[:, None])
    solved = smallest[:, 0] > values[:, -1]                        # else more candidates are needed, or there are ties
    solved |= most == batch.logits.shape[1]
    weights.masked_fill_(values < smallest, 0)
    tokens = _draw_candidate(weights, ids, batch) if solved.any() else torch.empty_like(ids[:, 0])
    return _solve_rest(batch, tokens, solved)


def _from_all(batch: _Batch) -> torch.Tensor:
    """Return the tokens [n] of rows without top-k and top-p, sampled from all tokens that min-p keeps."""
    maxima = batch.logits.amax(1)
    return _draw(batch, maxima, maxima + batch.min_p_margin if batch.has_min_p else None)


def _by_sorting(batch: _Batch) -> torch.Tensor:
    """Return the tokens [n] of rows with any combination of filters.

    Sorting finds the smallest logit of a row that top-k and top-p keep.
    """
    # Row by row, because one row fits the cache.
    smallest = torch.tensor([
        _smallest_of_row(row, inverse, count, mass) for row, inverse, count, mass in zip(
            batch.logits.numpy(), batch.inverse_temperature.numpy(), batch.top_k.tolist(), batch.top_p.tolist())
    ], dtype=batch.logits.dtype, device="cpu")
    maxima = batch.logits.amax(1)
    return _draw(batch, maxima, smallest.maximum(maxima + batch.min_p_margin))


def _smallest_of_row(logits: np.ndarray, inverse_temperature: np.float32, top_k: int, top_p: float) -> float:
    """Return the smallest of `logits` [vocab] that top-k and then top-p keep."""
    ascending = np.sort(logits)
    if 0 < top_k < len(ascending):
        # Keep all ties of the k-th.
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
    """Return [n, 1]: for each row, the first value at which the cumulative sum of `weights` reaches `target`.

    If the sum of all weights is less than `target`, return the last value of the row.

    values   [n, m] descending
    """
    missing = (weights.cumsum(1) < target[:, None]).sum(1, keepdim=True)
    return values.gather(1, missing.clamp_(max=values.shape[1] - 1))


def _draw_candidate(weights: torch.Tensor, ids: torch.Tensor, batch: _Batch) -> torch.Tensor:
    """Return the drawn token of each row, [n] int64. Ids that are not in `ids` have weight 0.

    Shapes   weights [n, m] float64, descending; ids [n, m]
    """
    kept = int(weights.count_nonzero(1).max())
    weights, ids = weights[:, :kept], ids[:, :kept]
    blocks, num_blocks = ids >> SHIFT, -(-batch.logits.shape[1] // BLOCK)
    sums = weights.new_zeros(len(ids), num_blocks).scatter_add_(1, blocks, weights).gather(1, blocks)

    weights, ids, blocks, sums = weights.numpy(), ids.numpy(), blocks.numpy(), sums.numpy()
    quarters = np.concatenate([blocks >> 2, np.broadcast_to(QUARTERS, (len(ids), len(QUARTERS)))], 1)
    words = philox(batch.seed.numpy(), batch.position.numpy(), _purposes(kept), quarters)
    row, inside = np.arange(len(ids))[:, None], ids % BLOCK
    gumbels = gumbel(np.concatenate([words[row, blocks & 3, np.arange(kept)],
                                     words[row, inside & 3, kept + (inside >> 2)]], 1))
    with np.errstate(divide="ignore"):                             # tokens that are not kept
        scores = np.log(np.concatenate([sums, weights], 1, dtype=np.float32)) + gumbels
    block = _lowest_of_largest(scores[:, :kept], blocks)[:, None]
    scores[:, kept:][blocks != block] = -np.inf
    return torch.from_numpy(_lowest_of_largest(scores[:, kept:], ids))


def _purposes(num_of_blocks: int) -> np.ndarray:
    """Return the purposes of `num_of_blocks` counters of blocks, and of all counters of tokens after them."""
    return np.repeat(np.array([BLOCKS, TOKENS], np.uint32), [num_of_blocks, len(QUARTERS)])


def _lowest_of_largest(scores: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return [n]: the id with the largest score in each row. Ties: the lowest id. Shapes: scores and ids [n, m]"""
    return np.where(scores == scores.max(1, keepdims=True), ids, NO_ID).min(1)


def _draw(batch: _Batch, maxima: torch.Tensor, smallest: torch.Tensor | None) -> torch.Tensor:
    """Return the drawn token of each row, [n] int64: of the logits from the smallest [n] on; None: of all."""
    sums, vocab = batch.block_weights(maxima, smallest).numpy(), batch.logits.shape[1]
    num_quarters = -(-sums.shape[1] // 4)
    words = philox(batch.seed.numpy(), batch.position.numpy(), _purposes(num_quarters),
                   np.concatenate([np.arange(num_quarters), QUARTERS]))
    gumbels = gumbel(words.transpose(0, 2, 1).reshape(len(words), -1))
    with np.errstate(divide="ignore"):                             # blocks and tokens that are not kept
        block = torch.from_numpy((np.log(sums) + gumbels[:, :sums.shape[1]]).argmax(1))
        ids = block[:, None] * BLOCK + OFFSETS
        inside = batch.weights(batch.logits.gather(1, ids.clamp(max=vocab - 1)), maxima, smallest).numpy()
        scores = np.log(inside) + gumbels[:, 4 * num_quarters:]
    scores[ids.numpy() >= vocab] = -np.inf
    return ids.gather(1, torch.from_numpy(scores.argmax(1))[:, None])[:, 0]


def _log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor,
               wants_log_prob: torch.Tensor | None, native: Library | None) -> torch.Tensor:
    """Return log_softmax(logits / temperature) at the tokens, [r] float32.

    Rows that need no log-prob get arbitrary values.
    """
    if wants_log_prob is None or bool(wants_log_prob.all()):
        return chosen_log_probs(logits, tokens, temperature, native)
    log_probs, wanted = torch.empty(len(tokens), dtype=torch.float32, device="cpu"), wants_log_prob.nonzero()[:, 0]
    log_probs[wanted] = chosen_log_probs(logits[wanted], tokens[wanted], temperature[wanted], native)
    return log_probs


def chosen_log_probs(logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor,
                     native: Library | None = None) -> torch.Tensor:
    """Return log_softmax(logits / temperature) at the chosen tokens, [r] float32. Temperature 0 means 1.

    Shapes   logits [r, vocab] float32; tokens [r]; temperature [r] float32
    native   see `sample_token`
    """
    top, inverse = logits.amax(1, keepdim=True), inverse_temperature_of(temperature)
    if native is not None:
        chosen = (logits.gather(1, tokens.long()[:, None]) - top)[:, 0].mul_(inverse)
        totals = weigh(native, logits, inverse, top[:, 0], None, "totals")
        return chosen - torch.tensor([log(total) if total > 0 else nan for total in totals.tolist()],
                                     dtype=torch.float32, device="cpu")
    scaled = (logits - top).mul_(inverse[:, None])
    chosen = scaled.gather(1, tokens.long()[:, None])[:, 0]
    return chosen - scaled.exp_().sum(1).log_()


def weigh(native: Library, logits: torch.Tensor, inverse: torch.Tensor, maxima: torch.Tensor,
          smallest: torch.Tensor | None, what: str) -> torch.Tensor:
    """Return what native/weights.h computes from rows of logits: their "weights", the "sums" of blocks, or "totals".

    Shapes   logits [n, m] float32; inverse temperatures, maxima and smallest [n] float32. The result is [n, m],
             [n, blocks], or [n] float64
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    given = [None if column is None else column.float().contiguous() for column in (inverse, maxima, smallest)]
    count = logits.shape[1]
    width = {"weights": (count,), "sums": (-(-count // BLOCK),), "totals": ()}[what]
    result = torch.empty((len(logits), *width), dtype=torch.float64 if what == "totals" else torch.float32,
                         device="cpu")
    native.weights_of_rows(logits.data_ptr(), logits.stride(0), len(logits), count,
                           *(None if column is None else column.data_ptr() for column in given),
                           *(result.data_ptr() if what == name else None for name in ("weights", "sums", "totals")))
    return result


def inverse_temperature_of(temperature: torch.Tensor) -> torch.Tensor:
    """Return 1 / temperature, limited to LARGEST_INVERSE, or 1 for temperature 0."""
    return torch.where(temperature == 0, 1.0, temperature).reciprocal().clamp_(max=LARGEST_INVERSE)
