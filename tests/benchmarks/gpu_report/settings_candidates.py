"""The launch settings that the section `settings` tries. The present settings come first."""

from typing import Any

from batch_manager.triton_kernels.fused_linear_settings import (
    FEW_ROWS,
    MOST_STAGES,
    FusedLinearSettings,
    most_stages,
)
from batch_manager.triton_kernels.paged_attention_context import ContextSettings
from batch_manager.triton_kernels.paged_attention_decode import (
    DecodeSettings,
    bytes_of_page,
    bytes_of_program,
    with_resident_programs,
)

DECODE_STAGES, DECODE_WARPS = (3, 4, 5, 2), (4, 8)
# rows, keys, warps, stages
CONTEXT = ((128, 64, 8, 3), (128, 64, 8, 2), (128, 64, 8, 4), (128, 32, 8, 4), (128, 32, 8, 3), (64, 64, 4, 3),
           (64, 64, 4, 2), (64, 64, 4, 4), (16, 16, 4, 3))


def decode_candidates(present: DecodeSettings, head_size: int, tokens_per_block: int, element_size_bytes: int,
                      limits: Any) -> list[DecodeSettings]:
    page_bytes = bytes_of_page(head_size, tokens_per_block, element_size_bytes)
    tried = [with_resident_programs(stages, warps, page_bytes, limits) for warps in DECODE_WARPS
             for stages in DECODE_STAGES if bytes_of_program(stages, page_bytes) <= limits.shared_bytes]
    return list(dict.fromkeys([present, *tried]))


def context_candidates(present: ContextSettings, tokens_per_block: int) -> list[ContextSettings]:
    tried = (ContextSettings(*one) for one in CONTEXT)
    return list(dict.fromkeys([present, *(one for one in tried if one.keys <= tokens_per_block and (
        one.rows >= 64 or present.rows < 64))]))


def fused_candidates(present: FusedLinearSettings, in_size: int, out_size: int, gated: bool, element_size_bytes: int,
                     limits: Any) -> list[FusedLinearSettings]:
    """Return the settings to try for up to FEW_ROWS rows.

    The first element is `present`, the current settings. The others are variants of it.

    Each variant but the last changes the columns, the step or the warps, and has as many stages as fit. The last
    variant has the columns, the step and the warps of `present`, and fewer stages.
    """

    def with_stages(columns: int, step: int, warps: int, most: int = MOST_STAGES) -> FusedLinearSettings:
        stages = most_stages(FEW_ROWS, columns, gated, step, in_size, element_size_bytes, limits)
        return FusedLinearSettings(FEW_ROWS, columns, step, warps, min(most, stages))

    found = [present]
    found += [with_stages(columns, present.step, present.num_warps) for columns in (16, 32, 64)
              if columns <= (32 if gated else 64)]
    found += [with_stages(present.columns, step, present.num_warps) for step in (128, 512) if step <= 2 * in_size]
    found.append(with_stages(present.columns, present.step, 8))
    found.append(with_stages(present.columns, present.step, present.num_warps, max(present.num_stages - 1, 1)))
    return list(dict.fromkeys(found))
