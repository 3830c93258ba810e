"""Metadata is in pyproject.toml; the layout of the packages and the compiled library need code.

`triton_kernels/` stands at the top of the repository and is installed as `batch_manager.triton_kernels`: other
projects look for, or register, a top-level module `triton_kernels` of their own, so the bare name is left alone.

Where a C compiler is, a wheel gets the compiled library, for every instruction set of this machine's kind of
processor. It is then a wheel for this platform. Otherwise it is a wheel for all platforms, whose users need a compiler
for compiled steps. An editable installation compiles when an engine starts.
"""

import importlib.util
import shutil
import tempfile
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = "batch_manager.triton_kernels"
NATIVE = Path(__file__).parent / "triton_kernels" / "cpu" / "native"


class WheelWithLibrary(bdist_wheel):
    """Compiles the library before it builds the wheel, because the result decides for which platforms the wheel is."""

    def run(self) -> None:
        specification = importlib.util.spec_from_file_location("build_of_the_library", NATIVE / "build.py")
        build = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(build)
        with tempfile.TemporaryDirectory() as folder:
            try:
                build.build_for_wheel(Path(folder))
            except build.CannotBuildError as error:
                print(f"THE WHEEL HAS NO COMPILED LIBRARY ({error}); its users need a C compiler for a fast engine",
                      flush=True)
            else:
                self.distribution.compiled = sorted(Path(folder).glob("*.so"))
                self.distribution.has_ext_modules = lambda: True
                self.root_is_pure = False
            super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        folder = Path(self.build_lib, *KERNELS.split("."), "cpu", "native", "in_wheels")
        shutil.rmtree(folder, ignore_errors=True)              # of an earlier build in this checkout
        for library in getattr(self.distribution, "compiled", ()):
            self.mkpath(str(folder))
            self.copy_file(str(library), str(folder / library.name))


setup(
    packages=[
        *find_packages(include=["batch_manager", "batch_manager.*"]),
        KERNELS,
        *(f"{KERNELS}.{name}" for name in find_packages("triton_kernels")),
    ],
    package_dir={KERNELS: "triton_kernels"},
    include_package_data=False,    # MANIFEST.in is for the source distribution
    package_data={"batch_manager": ["py.typed", "tools/draw/page/*"],
                  f"{KERNELS}.cpu.native": ["*.c", "*.h"]},
    cmdclass={"bdist_wheel": WheelWithLibrary, "build_py": BuildWithLibrary},
)
