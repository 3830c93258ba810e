import os
import platform

import pytest
import torch

from batch_manager.triton_kernels.cpu.native import build
from batch_manager.triton_kernels.cpu.native import library as library_module
from batch_manager.triton_kernels.cpu.native.library import load_library
from tests.harness.compiled import library_or_skip


@pytest.fixture(scope="session", autouse=True)
def library():
    return library_or_skip()


# Processor that the library is compiled for -> the instruction set that it needs.
MACHINES = {"native": "", "x86-64-v4": "avx512f", "x86-64-v3": "avx2", "x86-64-v2": "sse4_2"}


@pytest.fixture(scope="session")
def machine_caches(tmp_path_factory):
    """The cache folder of the libraries for older processors, each compiled once for all processes of `pytest -n`."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cache of older processors"


@pytest.fixture(scope="module", params=MACHINES)
def machine(request, machine_caches):
    """Load the C library, compiled for this processor ("native") or for an older x86-64 level. Yield that name."""
    if request.param == "native":
        yield request.param
        return
    if platform.machine() != "x86_64" or MACHINES[request.param] not in build._processor().split():
        pytest.skip(f"this processor cannot do what {request.param} has")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(machine_caches))
        patch.setattr(build, "FLAGS", ("-Og", "-DUNROLLED=", f"-march={request.param}", *build.FLAGS[2:]))
        patch.setattr(library_module, "_loaded", [])
        load_library()
        yield request.param


@pytest.fixture
def threads():
    """Yield a function that sets the number of threads of a step. The number is restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
