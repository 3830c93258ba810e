from dataclasses import replace

import pytest

from batch_manager.adapter_values import AdapterModules
from batch_manager.config import Limits
from batch_manager.errors import InvalidRequestError, RequestError
from batch_manager.names import ContextChunkingPolicy, SchedulerPolicy
from batch_manager.requests.adapter_content import checked_adapter
from batch_manager.requests.admission import Admission
from batch_manager.requests.inference_request import InferenceRequest

LIMITS = Limits(max_batch_size=8, max_num_tokens=64, max_seq_len=64, max_beam_width=4, max_num_requests=8,
                max_num_sequences=8, unbounded_sequences=False, vocab_size=100, num_blocks=16, tokens_per_block=8,
                enable_chunked_context=False, context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED,
                scheduler_policy=SchedulerPolicy.MAX_UTILIZATION, hidden_size=8, max_adapter_size=4, max_draft_tokens=4)
MODULES = AdapterModules({"attn_qkv": ((3, 9),) * 2, "attn_dense": ((3, 3),) * 2})


@pytest.fixture
def admission_with():
    """admission_with(num_blocks=4, max_request_bytes=100) -> Admission over a vocabulary of 100 and 64 positions."""
    def build(**changes):
        options = {name: changes.pop(name) for name in list(changes) if name not in Limits.__slots__}
        return Admission(replace(LIMITS, **changes), **options)
    return build


@pytest.fixture
def admit(admission_with):
    """admit(temperature=2.0) -> Admitted of a request with this tensor and a prompt of 3 tokens. None: no tensor."""
    def build(item=None, *, limits=None, flags=None, **tensors):
        if item is None:
            item = InferenceRequest(7, {"input_ids": [1, 2, 3], "request_output_len": 5} | tensors, **(flags or {}))
        return admission_with(**(limits or {})).admit(item)
    return build


@pytest.fixture
def refusal(admit):
    """refusal(temperature=-1) -> the text of the refusal. Fails if the request is admitted and its adapter is right."""
    def text(*args, **kwargs):
        with pytest.raises(RequestError) as caught:
            admitted = admit(*args, **kwargs)
            if admitted.adapter is not None:                        # the engine checks it beside the worker
                try:
                    checked_adapter(admitted.adapter, MODULES, 4)
                except InvalidRequestError as error:
                    raise InvalidRequestError(f"request 7: {error.fact}", error.expectation, error.fix) from None
        return caught.value.response_text()
    return text
