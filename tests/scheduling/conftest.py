import importlib.util
from pathlib import Path

import pytest

from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.names import LlmRequestState
from batch_manager.requests.llm_request import LlmRequest


@pytest.fixture(scope="session")
def play():
    """Return the class Play of tests/picture/conftest.py, which runs requests to their end."""
    path = Path(__file__).parents[1] / "picture" / "conftest.py"
    spec = importlib.util.spec_from_file_location("picture_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Play


class Line:
    """An ordered list of requests and their KV cache. Requests that generate or are between two chunks hold blocks."""

    def __init__(self, num_blocks: int = 100, tokens_per_block: int = 4) -> None:
        self.kv = KvCacheManager(num_blocks, tokens_per_block, 1000, max_draft_len=8)
        self.requests: list[LlmRequest] = []

    def waiting(self, prompt_len: int = 8, max_new_tokens: int = 8, **options) -> LlmRequest:
        request = LlmRequest(len(self.requests), [0] * prompt_len, max_new_tokens, **options)
        request.seq_slot = request.request_id
        self.requests.append(request)
        return request

    def between_chunks(self, prompt_len: int = 8, max_new_tokens: int = 8, *, computed: int = 4, **options):
        request = self.waiting(prompt_len, max_new_tokens, **options)
        self.kv.claim([request], [])
        request.advance_context(computed)
        request.read_context(request.context_position)
        return request

    def generating(self, prompt_len: int = 8, max_new_tokens: int = 8, *, generated: int = 1, **options):
        request = self.waiting(prompt_len, max_new_tokens, **options)
        if request.beam_width > 1:                             # the block tables hold one beam
            request.context_position = request.context_read = prompt_len
            request.state = LlmRequestState.GENERATION_IN_PROGRESS
            return request
        self.kv.claim([request], [])
        request.advance_context(prompt_len)
        request.read_context(request.context_position)
        request.add_token(0)
        for _ in range(generated - 1):
            self.kv.claim([], [request])
            request.add_token(0)
        return request


@pytest.fixture(scope="session")
def make_line():
    return Line
