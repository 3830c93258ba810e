import pytest

from batch_manager.requests.llm_request import LlmRequest


def make(slot: int, prompt_len: int, max_new_tokens: int = 16, **options) -> LlmRequest:
    request = LlmRequest(1000 + slot, [0] * prompt_len, max_new_tokens, **options)
    request.seq_slot = slot
    return request


@pytest.fixture(scope="session")
def make_request():
    """Return the function `make_request(slot, prompt_len, max_new_tokens=16, ...)`, which returns a new request."""
    return make


@pytest.fixture(scope="session")
def start():
    """Return the function `start(kv, request)`.

    It claims the blocks of the request's context, computes the context, adds the first token and returns the request.
    """

    def run(kv, request):
        kv.claim([request], [])
        request.advance_context(request.prompt_len)
        request.read_context(request.context_position)
        request.add_token(0)
        return request

    return run
