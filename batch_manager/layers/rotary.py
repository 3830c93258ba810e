"""The rotary position embedding and its frequencies: default, linear, llama3, yarn, longrope.

The frequencies equal those of transformers' `modeling_rope_utils`. Sources: RoFormer (arXiv 2104.09864), position
interpolation (2306.15595), the Llama 3.1 release, YaRN (2309.00071) and LongRoPE (2402.13753).
"""

import math
from dataclasses import dataclass

import torch

from ..errors import ConfigError
from .context import LayerContext

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryParameters:
    """The parameters of the rotary frequencies. A kind ignores the fields that it does not use.

    kind                      "default", "linear", "llama3", "yarn" or "longrope"
    theta                     base of the frequencies
    factor                    scaling factor of the context length (linear, llama3, yarn)
    original_max_positions    context length before scaling (llama3, yarn, longrope)
    low_freq_factor, high_freq_factor   numbers of rotations in original_max_positions: a frequency with fewer than
                              low_freq_factor is divided by `factor`, one with more than high_freq_factor stays, and
                              one between them is interpolated (llama3)
    beta_slow, beta_fast      the same for yarn, where beta_slow is the lower number
    truncate                  round the index of the frequency at beta_fast down, and at beta_slow up (yarn)
    short_factors             divisor of each frequency, for contexts of up to original_max_positions tokens
                              (longrope). The factors for longer contexts are not supported
    amplitude                 factor on cosines and sines, computed from attention_factor or mscale (yarn, longrope)
    """

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    amplitude: float = 1.0


class Rotary:
    """The rotary position embedding for `Attention.run`, in the half-split ("NeoX") arrangement.

    size       number of leading entries of each head that are rotated; even
    cos, sin   [max_positions, size / 2] float32 on the device of the LayerContext, multiplied by
               `RotaryParameters.amplitude`
    """

    def __init__(self, context: LayerContext, parameters: RotaryParameters, size: int, max_positions: int) -> None:
        if not isinstance(parameters, RotaryParameters):
            raise ConfigError(f"Rotary got {parameters!r} for parameters", "expected the RotaryParameters of a spec",
                              "do not construct a Rotary for a spec without them, because such a model rotates nothing")
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32, device="cpu"),
                             inverse_frequencies(parameters, size))
        # In place, because each copy takes hundreds of megabytes for a long context.
        self.cos = angles.cos().mul_(parameters.amplitude).to(context.device)
        self.sin = angles.sin_().mul_(parameters.amplitude).to(context.device)


def half_split_rows(rotated_heads: int, other_heads: int, head_size: int, size: int) -> torch.Tensor:
    """Return the `row_order` of a `Linear` that converts interleaved rotation (GPT-J, Cohere) to half-split rotation.

    Queries and keys get the same permutation, so scores do not change.

    rotated_heads   number of query and key heads, whose rows come first
    other_heads     number of value heads, whose rows keep their order
    size            number of leading entries of each head that are rotated
    Returns         [rows] int64, on the CPU
    """
    rows = torch.arange((rotated_heads + other_heads) * head_size, dtype=torch.int64, device="cpu")
    heads = rows[: rotated_heads * head_size].view(rotated_heads, head_size)
    return torch.cat([torch.cat([heads[:, 0:size:2], heads[:, 1:size:2], heads[:, size:]], 1).reshape(-1),
                      rows[rotated_heads * head_size :]])


def inverse_frequencies(rotary: RotaryParameters, head_size: int) -> torch.Tensor:
    """Return the rotary frequencies [head_size / 2] float32, in radians per position.

    head_size   number of rotated entries of a head
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size
    plain = 1.0 / rotary.theta**exponents
    if rotary.kind == "default":
        return plain
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(rotary, plain)
    if rotary.kind == "longrope":
        return 1.0 / (torch.tensor(rotary.short_factors, dtype=torch.float32, device="cpu")
                      * rotary.theta**exponents)
    assert rotary.kind == "yarn"
    return _yarn(rotary, head_size, rotary.theta**exponents)


def _llama3(rotary: RotaryParameters, plain: torch.Tensor) -> torch.Tensor:
    """Return the frequencies `plain`, with low ones divided by `factor` and medium ones interpolated (Llama 3.1)."""
    wavelength = 2 * math.pi / plain
    blend = (rotary.original_max_positions / wavelength - rotary.low_freq_factor) / (
        rotary.high_freq_factor - rotary.low_freq_factor)
    stretched = torch.where(wavelength > rotary.original_max_positions / rotary.low_freq_factor,
                            plain / rotary.factor, plain)
    blended = (1 - blend) * stretched / rotary.factor + blend * stretched
    between = ((wavelength >= rotary.original_max_positions / rotary.high_freq_factor)
               & (wavelength <= rotary.original_max_positions / rotary.low_freq_factor))
    return torch.where(between, blended, stretched)


def _yarn(rotary: RotaryParameters, head_size: int, periods: torch.Tensor) -> torch.Tensor:
    """Return the frequencies 1 / `periods`, with low ones divided by `factor` and medium ones blended along a ramp."""
    def dimension_of(rotations: float) -> float:
        return (head_size * math.log(rotary.original_max_positions / (rotations * 2 * math.pi))
                / (2 * math.log(rotary.theta)))

    low, high = dimension_of(rotary.beta_fast), dimension_of(rotary.beta_slow)
    if rotary.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    if low == high:
        high += 0.001
    dimension = torch.arange(head_size // 2, dtype=torch.float32, device="cpu")
    kept = 1 - ((dimension - low) / (high - low)).clamp(0, 1)
    return 1.0 / (rotary.factor * periods) * (1 - kept) + 1.0 / periods * kept
