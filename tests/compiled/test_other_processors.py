"""The C code of products and attention, compiled for NEON and by Clang, agrees with sums in float64.

Quantised products have the same bits on both. The other tests here run what GCC compiles for SSE, AVX2 and AVX-512.

The NEON test needs QEMU and a cross compiler (Debian: qemu-user-static, gcc-aarch64-linux-gnu). Without them it is
skipped.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from batch_manager.triton_kernels.cpu.native import build

PROGRAM = Path(__file__).with_name("products_and_attention.c")
NUM_NUMBERS = 261_172
BITS = "4a282824"                  # of the quantised products, the same everywhere
# name -> (compiler, options, emulator, float32 lanes of a vector)
PROCESSORS = {
    "AVX2 by Clang": ("clang", ["-march=x86-64-v3"], None, 8),
    "NEON": ("aarch64-linux-gnu-gcc", ["-static"], "qemu-aarch64-static", 4),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_products_and_attention_are_sums_of_float64(name, tmp_path):
    compiler, options, emulator, lanes = PROCESSORS[name]
    for program in filter(None, (compiler, emulator)):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    if emulator is None and platform.machine() != "x86_64":
        pytest.skip("this processor is of another architecture")
    if lanes == 8 and "avx2" not in build._processor().split():
        pytest.skip("this processor has no AVX2")
    program = tmp_path / "products_and_attention"
    subprocess.run([compiler, "-Og", "-DUNROLLED=", *options, "-ffp-contract=fast", "-fno-math-errno", "-w",
                    f"-I{build.HERE}", "-o", program, PROGRAM, "-lm", "-pthread"], check=True, timeout=300)
    result = subprocess.run([*filter(None, [emulator]), program], capture_output=True, text=True, timeout=300)
    assert result.stdout == (f"{lanes} lanes, {NUM_NUMBERS} numbers, 0 wrong, bits of quantised products {BITS}\n"
                             ), result.stderr
