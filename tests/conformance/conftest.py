import pytest

from tests.conformance import adapter as the_adapter


@pytest.fixture(scope="session")
def adapter():
    """Return the module that runs cases with the engine's own classes."""
    return the_adapter
