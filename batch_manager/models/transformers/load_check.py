"""Verifies at load time that a model computes the same logits with the engine's attention as with eager attention."""

from typing import Any

import numpy as np
import torch

from ...attention.interface import PackedStep
from ...attention.registry import make_attention
from ...errors import UnsupportedModelError, counted
from ...layers.context import LayerContext
from .installed import ANOTHER_TYPE, first_words

NUM_TOKENS, SECOND_TOKENS = 64, 23      # lengths of two prompts that are computed in one batch, in chunks
MOST_TOKENS = 192                       # maximum length of the first prompt, which is extended to exceed a window
BLOCK = 16

# The largest difference of a row, relative to the largest logit, and the share of rows that must be within it. In
# float16 and bfloat16, rounding can route a token to other experts, so some rows may differ more.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
ROWS_WITHIN = {torch.float32: 1.0}
ROWS_WITHIN_IN_HALF = 0.9


def refuse_different_logits(wrapped: Any, model: Any, spec: Any, context: LayerContext) -> None:
    """Raise UnsupportedModelError if the logits of the wrapped model differ from those of `model` with eager attention.

    Both models compute two prompts of random tokens from a fixed seed. The wrapped model computes the prompts packed,
    in chunks, and their last tokens as generation rows. TOLERANCES are the differences allowed for rounding.
    ROWS_WITHIN and ROWS_WITHIN_IN_HALF are the shares of tokens whose difference must be within the tolerance.

    wrapped   the TransformersModel that wraps `model`
    """
    windows = [layer.window for layer in spec.attention if layer.window is not None]
    wanted = max([NUM_TOKENS, *(window + BLOCK for window in windows if window + BLOCK <= MOST_TOKENS)])
    lengths = [min(spec.max_position_embeddings, count) for count in (wanted, SECOND_TOKENS)]
    random = np.random.default_rng(0)
    prompts = [random.integers(0, spec.vocab_size, length).astype(np.int64) for length in lengths]
    try:
        found = _engine_logits(wrapped, spec, context, prompts)
        expected = _reference_logits(model, context, prompts)
    except Exception as fault:
        if isinstance(fault, MemoryError) or "memory" in str(fault).lower():
            raise
        raise UnsupportedModelError(f"{spec.where}: computing a prompt of {counted(lengths[0], 'token')} raised "
                                    f"{first_words(fault)}", "expected a model that runs", ANOTHER_TYPE
                                    ) from fault
    tolerance, share = TOLERANCES[context.dtype], ROWS_WITHIN.get(context.dtype, ROWS_WITHIN_IN_HALF)
    scale = max(float(logits.abs().max()) for logits in expected)
    rows = torch.cat([(mine - theirs).abs().amax(1) for mine, theirs in zip(found, expected)])
    within = float((rows <= tolerance * max(scale, 1e-6)).float().mean())          # NaN is never within
    if within < share and all(bool(logits.isfinite().all()) for logits in expected):
        raise UnsupportedModelError(
            f"{spec.where}: logits of {type(model).__name__} through the engine's attention differ by up to "
            f"{float(rows.nan_to_num(torch.inf).max()):.3g} from those with eager attention. For only {within:.0%} "
            f"of {len(rows)} tokens, the difference is at most {tolerance:g} of the largest logit, {scale:.3g}",
            f"expected this for at least {share:.0%} of the tokens",
            "use another model, because this one attends in a way that is not supported")


def _reference_logits(model: Any, context: LayerContext, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    """Return the logits of each prompt, computed with transformers' own attention, one prompt at a time."""
    chosen = model.config._attn_implementation
    model.config._attn_implementation = "eager"
    try:
        return [model(input_ids=torch.from_numpy(prompt)[None].to(context.device), use_cache=False).logits[0].float()
                for prompt in prompts]
    finally:
        model.config._attn_implementation = chosen


def _engine_logits(wrapped: Any, spec: Any, context: LayerContext, prompts: list[np.ndarray]) -> list[torch.Tensor]:
    """Return the logits of each prompt, computed in packed steps with the engine's attention.

    The first step and the second step each compute one chunk of each prompt. The third step computes the last token of
    each prompt, as a generation row.
    """
    columns = -(-max(map(len, prompts)) // BLOCK)
    pool = torch.zeros(len(prompts) * columns, spec.num_layers, 2, spec.num_kv_heads, BLOCK, spec.head_size,
                       dtype=context.dtype, device=context.device)
    attention = make_attention(spec, pool)
    # Interleave the blocks of the prompts.
    tables = np.arange(len(prompts) * columns, dtype=np.int32).reshape(columns, len(prompts)).T.copy()
    cuts = [[0, len(prompt) * 5 // 8, len(prompt) - 1, len(prompt)] for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for number in range(3):
        spans = [(cut[number], cut[number + 1]) for cut in cuts]
        taken = [which for which, (start, stop) in enumerate(spans) if start < stop]
        if not taken:
            continue
        step = _step(prompts, spans, taken, tables, is_generation=number == 2)
        planned = attention.plan(step)
        if planned is not None:
            attention.receive([torch.from_numpy(array).to(context.device) for array in planned])
        hidden = wrapped.embed(torch.from_numpy(step.token_ids.astype(np.int64)).to(context.device))
        positions = torch.from_numpy(step.positions.astype(np.int64)).to(context.device)
        rows = wrapped.logits(wrapped.forward(hidden, positions, attention)).float()
        for row, which in enumerate(taken):
            logits[which].append(rows[int(step.query_starts[row]) : int(step.query_starts[row + 1])])
    return [torch.cat(parts) for parts in logits]


def _step(prompts: list[np.ndarray], spans: list[tuple[int, int]], taken: list[int], tables: np.ndarray,
          is_generation: bool) -> PackedStep:
    starts = np.cumsum([0, *(spans[which][1] - spans[which][0] for which in taken)]).astype(np.int32)
    positions = [np.arange(*spans[which], dtype=np.int64) for which in taken]
    slots = [tables[which][at // BLOCK] * np.int64(BLOCK) + at % BLOCK for which, at in zip(taken, positions)]
    return PackedStep(
        token_ids=np.concatenate([prompts[which][slice(*spans[which])] for which in taken]).astype(np.int32),
        positions=np.concatenate(positions).astype(np.int32), pool_slots=np.concatenate(slots),
        slots=np.array(taken, np.int32), query_starts=starts,
        kv_lengths=np.array([spans[which][1] for which in taken], np.int32), block_tables=tables[taken],
        num_contexts=0 if is_generation else len(taken), logits_rows=starts[1:].astype(np.int64) - 1)
