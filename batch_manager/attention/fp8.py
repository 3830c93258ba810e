"""Keys and values in FP8 in the KV cache pool: e4m3, a sign, 4 bits of exponent and 3 of mantissa.

A number is divided by its layer's scale, clamped to the largest number of e4m3 and rounded to the nearest one, ties to
even. NaN stays NaN. Each number of e4m3 is exact in float32, bfloat16 and float16, so this rounding is the only loss.
Attention sees the rounded keys and values of every token, also those of the step's own tokens: a token's result does
not depend on which step stored a key.
"""

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


class Fp8Numbers:
    """Rounds to e4m3, and widens again.

    dtype   of widened numbers
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        self._table = codes.view(FP8).to(dtype)            # on a CPU, a table takes a fifth of torch's conversion

    def rounded(self, rows: torch.Tensor, key_scale: float = 1.0, value_scale: float = 1.0) -> torch.Tensor:
        """Return `rows` [T, 2 * kv heads, head_size], keys and then values, divided by their scales, in e4m3.

        The quotient is in float32.
        """
        if (key_scale, value_scale) != (1.0, 1.0):
            half = rows.shape[1] // 2
            rows = torch.cat([rows[:, :half].float() / key_scale, rows[:, half:].float() / value_scale], 1)
        return rows.clamp(-LARGEST, LARGEST).to(FP8)       # without the clamp, torch turns larger numbers into NaN

    def widened(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the numbers of `stored`, in e4m3, without their scales."""
        return self._table.index_select(0, stored.view(torch.uint8).reshape(-1).int()).view(stored.shape)
