"""C13, C18: torch's default dtype and default device, set by the host, change no result."""

import json
import pathlib
import threading

import numpy as np
import pytest
import torch

from batch_manager import KvCacheConfig

MODEL = pathlib.Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
PROMPT = [5, 100, 31, 2047, 77, 900, 137]
REQUESTS = {                                              # one step has rows with and without log-probabilities
    1: {"return_log_probs": True, "return_generation_logits": True},
    2: {"runtime_top_k": 200, "runtime_top_p": 0.5, "random_seed": 1},
    3: {"runtime_top_p": 0.999, "temperature": 3.0, "random_seed": 2, "return_log_probs": True},
    4: {"runtime_top_p": 1.0, "runtime_min_p": 0.01, "repetition_penalty": 1.3, "random_seed": 3},
    5: {"beam_width": 3, "return_log_probs": True},
    6: {"beam_width": 2, "repetition_penalty": 1.2, "temperature": 0.7, "return_log_probs": True},
    7: {"return_context_logits": True, "stop_words_list": [[7]], "bad_words_list": [[5], [6, 7]], "min_length": 3,
        "end_id": 2},
}


@pytest.fixture(autouse=True)
def defaults_as_before():
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def answers(make_manager, new_client, new_request):
    """answers(before, between, on_the_worker, **options) runs REQUESTS and returns id -> tensors of the final response.

    before          called before the manager is made
    between         called after the manager is made and before get returns the requests
    on_the_worker   called on the worker's thread at each get
    """
    def ask(before=None, between=None, on_the_worker=None, **options):
        client, taken = new_client(), new_client.get
        if before is not None:
            before()
        ready = threading.Event()

        def get(max_num_requests):
            if on_the_worker is not None:
                on_the_worker()
            return taken(client, max_num_requests) if ready.is_set() else []

        client.get = get
        manager = make_manager(client, model_path=MODEL, device="cpu", max_beam_width=3,
                               kv_cache_config=KvCacheConfig(max_tokens=2048), **options)
        if between is not None:
            between()
        client.pending = [new_request(i, PROMPT, 6, **tensors) for i, tensors in REQUESTS.items()]
        ready.set()
        manager.notify()
        client.wait_for_finals(*REQUESTS)
        manager.shutdown()
        assert [client.final(i).error for i in REQUESTS] == [""] * len(REQUESTS)
        assert json.loads(client.stats[-1])["Failed Steps"] == 0
        return {i: client.final(i).tensors for i in REQUESTS}

    return ask


def assert_equal(found, expected):
    for request_id, tensors in expected.items():
        for name, tensor in tensors.items():
            assert found[request_id][name].dtype == tensor.dtype, (request_id, name)
            np.testing.assert_array_equal(found[request_id][name], tensor, err_msg=f"{name} of request {request_id}")


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dtype": "bfloat16"}], ids=str)
def test_c13_the_hosts_default_dtype_changes_nothing(answers, options):
    expected = answers(**options)
    for dtype in (torch.bfloat16, torch.float64):
        assert_equal(answers(before=lambda dtype=dtype: torch.set_default_dtype(dtype), **options), expected)
        torch.set_default_dtype(torch.float32)
        assert_equal(answers(between=lambda dtype=dtype: torch.set_default_dtype(dtype), **options), expected)
        assert torch.get_default_dtype() is dtype
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=str)
def test_c13_the_hosts_default_device_changes_nothing(answers, options):
    """Torch's default device changes no result. Each thread has its own, so the test sets it in both threads."""
    expected = answers(**options)
    with torch.device("meta"):
        found = answers(on_the_worker=lambda: torch.set_default_device("meta"), **options)
    assert_equal(found, expected)
