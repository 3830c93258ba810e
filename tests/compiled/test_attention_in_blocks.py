"""Attention in C gives the same results for many rows at once, with AMX or AVX-512 BF16, as for one row at a time.

On a machine with AVX-512 BF16 but without AMX, the instructions of AMX are executed in C, see emulated_tiles.h.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from batch_manager.triton_kernels.cpu.native import build

PROGRAM = Path(__file__).with_name("attention_in_blocks.c")
INSTRUCTION_SETS = build._processor().split()


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A C program, compiled for AMX as a library in a wheel."""
    compiler, path = shutil.which("gcc"), tmp_path_factory.mktemp("program") / "attention_in_blocks"
    if compiler is None or "avx512_bf16" not in INSTRUCTION_SETS:
        pytest.skip("there is no gcc, or this processor has no AVX-512 for bfloat16")
    name, options, _ = build.LEVELS["x86_64"][0]
    assert name == "amx"
    made = subprocess.run([compiler, "-Og", *options, "-ffp-contract=fast", "-w",
                           "-include", PROGRAM.with_name("emulated_tiles.h"), f"-I{build.HERE}", "-o", path, PROGRAM,
                           "-lm", "-pthread"], capture_output=True, text=True, timeout=300)
    if made.returncode and "mamx-tile" in made.stderr:
        pytest.skip("this compiler does not know AMX")
    assert not made.returncode, made.stderr
    return path


@pytest.mark.parametrize("unit", ["AMX", "vectors"])
def test_blocks_of_rows_find_what_rows_find_one_by_one(unit, program):
    """The program finds no difference for many sizes of heads, blocks and groups, and for windows, sinks and caps.

    The cache holds NaN after the last token.
    """
    is_emulated = unit == "AMX" and "amx_bf16" not in INSTRUCTION_SETS
    environment = dict(os.environ, **({"NO_TILES": "1"} if unit == "vectors" else {}))
    result = subprocess.run([program, "47" if is_emulated else "1"], capture_output=True, text=True, timeout=300,
                            env=environment)
    assert (result.returncode, result.stdout) == (0, f"{unit}, 0 wrong, 0 wrong bits\n"), result.stderr
