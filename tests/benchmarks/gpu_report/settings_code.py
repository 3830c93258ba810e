"""The outcome of comparing launch settings: a table, and the fastest settings as code.

The code goes into the functions of `triton_kernels` that choose the settings, directly below their docstrings. The
code for `decode_work_list` replaces constants of its file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple

import numpy as np

from batch_manager.triton_kernels.decode_work_list import split_pages

from .device_clock import Timing

# settings function -> (file, parameters that the settings depend on, as in the keys of trials)
FUNCTIONS = {
    "decode_settings": ("paged_attention_decode.py", ("head_size", "tokens_per_block", "element_size_bytes")),
    "context_settings": ("paged_attention_context.py", ("head_size_pow2", "element_size_bytes", "tokens_per_block",
                                                        "uniform_rows")),
    "settings_of_few_rows": ("fused_linear_settings.py", ("in_size", "out_size", "gated", "element_size_bytes")),
    "decode_work_list": ("decode_work_list.py", ()),
}


class Parts(NamedTuple):
    """Constants of decode_work_list.py, which splits the pages of a sequence into parts for decode attention.

    The constants determine the number of parts.
    """

    min_pages_per_part: int
    rounds: int

    def pages_per_part(self, lengths: np.ndarray, tokens_per_block: int, num_kv_heads: int,
                       resident_programs: int) -> int:
        pages = int((-(-lengths // tokens_per_block)).sum())
        return split_pages(pages, num_kv_heads, resident_programs, self.min_pages_per_part, self.rounds)


@dataclass(frozen=True, slots=True)
class Trial:
    """The trial of a kernel with some settings.

    function     name of the function that chooses the settings, one of FUNCTIONS
    key          arguments of the function; the settings are tried for these arguments
    case         description of the kernel's inputs
    is_present   whether the function chooses these settings now
    timing       times of the kernel with these settings; None: the settings cannot be used
    rate         bandwidth or arithmetic rate, as text
    predicted    predicted time of the kernel, as text; "": no prediction
    problem      why the settings cannot be used; "": they can
    """

    function: str
    key: tuple[Any, ...]
    case: str
    settings: Any
    is_present: bool
    timing: Timing | None
    rate: str = ""
    predicted: str = ""
    problem: str = ""

    @property
    def microseconds(self) -> float | None:
        return None if self.timing is None else self.timing.median * 1e6

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.settings._asdict().items())

    def is_like(self, other: "Trial") -> bool:
        """Whether this trial and `other` have the same function, key and inputs of the kernel."""
        return (self.function, self.key, self.case) == (other.function, other.key, other.case)


class Best(NamedTuple):
    """The fastest settings for a key.

    gain   time with the present settings / time with these settings, as a geometric mean over the cases
    """

    function: str
    key: tuple[Any, ...]
    settings: Any
    gain: float


def best_of(trials: Sequence[Trial]) -> Best | None:
    """Return the fastest of the settings that were timed in every case of the trials.

    All trials must have the same function and key. Returns None if the function's present settings were not timed in
    every case.
    """
    times = {(trial.case, trial.settings): trial.timing.median for trial in trials if trial.timing is not None}
    cases = list(dict.fromkeys(trial.case for trial in trials))
    present = [trial.settings for trial in trials if trial.is_present]
    if not present or any((case, present[0]) not in times for case in cases):
        return None
    gains = {}
    for settings in dict.fromkeys(trial.settings for trial in trials):
        if all((case, settings) in times for case in cases):
            ratios = [log(times[case, present[0]] / times[case, settings]) for case in cases]
            gains[settings] = exp(sum(ratios) / len(ratios))
    settings = max(gains, key=lambda one: gains[one])
    return Best(trials[0].function, trials[0].key, settings, gains[settings])


def code_of(best: Best, multiprocessors: int) -> str:
    """Return Python code to insert into the function `best.function`.

    With this code, the function returns `best.settings` for the arguments `best.key`. For decode_work_list, the code is
    two constants of its file.
    """
    gain = f"# {best.gain:.2f} times as fast as before"
    if best.function == "decode_work_list":
        return f"{gain}\nMIN_PAGES_PER_PART = {best.settings.min_pages_per_part}\nROUNDS = {best.settings.rounds}\n"
    settings = repr(best.settings)
    if best.function == "decode_settings":
        resident = best.settings.resident_programs
        settings = settings.replace(f"resident_programs={resident}",
                                    f"resident_programs={resident // multiprocessors} * limits.multiprocessors")
    names = FUNCTIONS[best.function][1]
    return (f"    {gain}\n    if ({', '.join(names)}) == {best.key!r}:\n        return {settings}\n")


def tile_rows_code(best: Best) -> str:
    """Return the code for `context_tile_rows`, which must agree with `context_settings`."""
    return (f"    if (head_size, element_size_bytes) == {best.key[:2]!r}:\n"
            f"        return {best.settings.rows}\n")


def bests_of(trials: Iterable[Trial]) -> list[Best]:
    """Return the fastest settings for each function and key."""
    groups: dict[tuple[Any, ...], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.function, trial.key), []).append(trial)
    return [best for group in groups.values() if (best := best_of(group)) is not None]


def text_of(trials: Sequence[Trial], device: str, multiprocessors: int) -> str:
    """Return the file with the results, as Markdown: the code for each function, and a table of all trials."""
    lines = [f"# Launch settings, measured on {device}", ""]
    bests = bests_of(trials)
    for function, (file, _) in FUNCTIONS.items():
        found = [best for best in bests if best.function == function]
        if found:
            lines += [f"`{function}` in triton_kernels/{file}:", "", "```python",
                      *(code_of(best, multiprocessors).rstrip() for best in found), "```", ""]
        if found and function == "context_settings":
            lines += ["`context_tile_rows` in triton_kernels/context_work_list.py:", "", "```python",
                      *(tile_rows_code(best).rstrip() for best in found), "```", ""]
    lines += ["| case | settings | time, us | before / this | rate | predicted | |", "|---|---|---|---|---|---|---|"]
    for trial in trials:
        before = next((one for one in trials if one.is_like(trial) and one.is_present), None)
        ratio = before.timing.median / trial.timing.median if before and before.timing and trial.timing else None
        lines.append(" | ".join([
            f"| {trial.case}", trial.text, "-" if trial.microseconds is None else f"{trial.microseconds:.1f}",
            "-" if ratio is None else f"{ratio:.3f}", trial.rate or "-", trial.predicted or "-",
            f"{'present' if trial.is_present else trial.problem} |"]))
    return "\n".join([*lines, ""])
