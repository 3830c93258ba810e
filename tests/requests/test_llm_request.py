"""add_a_token_to_each changes a list of requests in the same way as add_token, called for each request."""

import random

from batch_manager.names import LlmRequestState
from batch_manager.requests.llm_request import LlmRequest, add_a_token_to_each


def _generating(request_id: int, num_tokens_left: int) -> LlmRequest:
    request = LlmRequest(request_id, [1, 2, 3], num_tokens_left)
    request.advance_context(3)
    return request


def test_a_token_for_each_is_add_token_for_each():
    generator = random.Random(5)
    for _ in range(200):
        left = [generator.randint(1, 4) for _ in range(generator.randint(0, 8))]
        one_by_one, together = ([_generating(number, count) for number, count in enumerate(left)] for _ in range(2))
        while one_by_one:
            tokens = [generator.randint(0, 99) for _ in one_by_one]
            ended = [request for request, token in zip(one_by_one, tokens, strict=True) if request.add_token(token)]
            assert [request.request_id for request in add_a_token_to_each(together, tokens)] == [
                request.request_id for request in ended]
            assert [(request.tokens, request.state) for request in together] == [
                (request.tokens, request.state) for request in one_by_one]
            one_by_one, together = ([request for request in requests
                                     if request.state is not LlmRequestState.GENERATION_COMPLETE]
                                    for requests in (one_by_one, together))
