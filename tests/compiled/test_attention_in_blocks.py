"""Attention in C gives the same results for many rows at once, with AMX or AVX-512 BF16, as for one row at a time.

On a machine with AVX-512 BF16 but without AMX, the code for AMX runs on tiles in C, see emulated_tiles.h.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from batch_manager.triton_kernels.cpu.native import build

PROGRAM = Path(__file__).with_name("attention_in_blocks.c")
KINDS = {"native": [], "emulated AMX": ["-include", PROGRAM.with_name("emulated_tiles.h")]}
if "amx_bf16" in build._processor().split():                   # elsewhere the native code is the one without AMX
    KINDS["without AMX"] = ["-mno-amx-bf16"]


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_blocks_of_rows_find_what_rows_find_one_by_one(options, tmp_path):
    """A C program finds no difference for many sizes of heads, blocks and groups, and for windows, sinks and caps.

    The cache holds NaN after the last token.
    """
    instruction_sets, compiler = build._processor().split(), shutil.which("gcc")
    if compiler is None or "avx512_bf16" not in instruction_sets:
        pytest.skip("there is no gcc, or this processor has no AVX-512 for bfloat16")
    program = tmp_path / "attention_in_blocks"
    made = subprocess.run([compiler, "-O1", "-march=native", "-ffp-contract=fast", *options, "-w",
                           f"-I{build.HERE}", "-o", str(program), str(PROGRAM), "-lm", "-pthread"],
                          capture_output=True, text=True, timeout=300)
    if made.returncode and "mno-amx-bf16" in made.stderr:
        pytest.skip("this compiler does not know AMX")
    assert not made.returncode, made.stderr
    one_of = "13" if "-include" in options else "1"
    result = subprocess.run([program, one_of], capture_output=True, text=True, timeout=100)
    with_amx = "-include" in options or "amx_bf16" in instruction_sets and not options
    expected = f"{'AMX' if with_amx else 'vectors'}, 0 wrong, 0 wrong bits\n"
    assert (result.returncode, result.stdout) == (0, expected), result.stderr
