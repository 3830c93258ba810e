"""Metadata is in pyproject.toml; only the layout of the packages needs code.

`triton_kernels/` stands at the top of the repository and is installed as `batch_manager.triton_kernels`: other
projects look for, or register, a top-level module `triton_kernels` of their own, so the bare name is left alone.
"""

from setuptools import find_packages, setup

KERNELS = "batch_manager.triton_kernels"

setup(
    packages=[
        *find_packages(include=["batch_manager", "batch_manager.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("triton_kernels")),
    ],
    package_dir={KERNELS: "triton_kernels"},
    include_package_data=False,    # MANIFEST.in is for the source distribution
    package_data={"batch_manager": ["py.typed", "tools/results/*.jsonl", "tools/samples/*.csv",
                                    "tools/samples/*.jsonl", "tools/draw/page/*"],
                  f"{KERNELS}.cpu.native": ["*.c", "*.h"]},
)
