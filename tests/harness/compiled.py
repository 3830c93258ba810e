"""The compiled library, for tests that have nothing to do without it."""

import pytest


def library_or_skip():
    """Return the compiled library; skip the test where it cannot be built, such as without a C compiler."""
    from batch_manager.triton_kernels.cpu.native.library import CannotCompileError, load_library

    try:
        return load_library()
    except CannotCompileError as error:
        pytest.skip(str(error))
