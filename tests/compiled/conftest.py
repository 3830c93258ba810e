import pytest
import torch

from batch_manager.triton_kernels.cpu.native.library import CannotCompileError, load_library


@pytest.fixture(scope="session", autouse=True)
def library():
    try:
        return load_library()
    except CannotCompileError as error:
        pytest.skip(str(error))


@pytest.fixture
def threads():
    """threads(count) sets on how many threads a step computes; put back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
