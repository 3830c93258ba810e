"""A request's state changes by the table of transitions alone, and tokens are added alike one by one and together."""

import ast
import inspect
import random

import pytest

from batch_manager.loop.advance import add_a_token_to_each
from batch_manager.names import LlmRequestState
from batch_manager.requests import llm_request
from batch_manager.requests.llm_request import TRANSITIONS, LlmRequest


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


def test_only_the_table_changes_a_state_and_each_of_its_events_happens():
    tree = ast.parse(inspect.getsource(llm_request))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    writers = {method.name for method in methods for node in ast.walk(method)
               if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store)}
    assert writers == {"__init__", "_note"}
    events = {text.value for method in methods for call in ast.walk(method)
              if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "_note"
              for text in ast.walk(call) if isinstance(text, ast.Constant) and isinstance(text.value, str)}
    assert events == {event for _, event in TRANSITIONS}
    with pytest.raises(KeyError, match="CONTEXT_INIT.*no token is left"):
        LlmRequest(1, [1], 1).add_token(5)
