import pytest

from batch_manager.requests.llm_request import LlmRequest


def make(slot: int, prompt_len: int, max_new_tokens: int = 16, **options) -> LlmRequest:
    request = LlmRequest(1000 + slot, [0] * prompt_len, max_new_tokens, **options)
    request.seq_slot = slot
    return request


@pytest.fixture(scope="session")
def make_request():
    """make_request(slot, prompt_len, max_new_tokens=16, ...) -> a request in this slot"""
    return make


@pytest.fixture(scope="session")
def start():
    """start(kv, request) -> the request, after its context was claimed and computed and it got its first token"""

    def run(kv, request):
        kv.claim([request], [])
        request.advance_context(request.prompt_len)
        request.read_context(request.context_position)
        request.add_token(0)
        return request

    return run
