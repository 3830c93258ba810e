"""C13, C18, C21, the constructor and the response tensors, tested with real and damaged models in the file system."""

import inspect
import json
import pathlib
import random
import shutil
import threading
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

MODEL = pathlib.Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
VOCAB = 4096
PROMPT = [5, 100, 31, 2047, 77, 900, 137]
POISON = 3000
NAMES = ["output_ids", "sequence_length", "context_logits", "generation_logits", "output_log_probs", "cum_log_probs",
         "finish_reason"]
WAYS = {
    "packed": {},
    "reuse": {"kv_cache_config": KvCacheConfig(max_tokens=1024, enable_block_reuse=True, tokens_per_block=8)},
    "chunks": {"enable_chunked_context": True, "max_num_tokens": 16,
               "kv_cache_config": KvCacheConfig(max_tokens=1024, tokens_per_block=8)},
    "pauses": {"kv_cache_config": KvCacheConfig(max_tokens=200, tokens_per_block=8)},
    "overlap": {"enable_trt_overlap": True},
    "V1": {"model_type": TrtGptModelType.V1},
}


@pytest.fixture
def real_manager(make_manager):
    def make(client, model_path=MODEL, **options):
        options.setdefault("kv_cache_config", KvCacheConfig(max_tokens=2048))
        return make_manager(client, model_path=model_path, device="cpu", **options)
    return make


def whole(client, request_id):
    """Output tokens, log-probabilities and their sum, put together from all responses of a request."""
    responses = client.responses[request_id]
    assert responses[-1].error == ""
    log_probs = np.concatenate([response.tensors["output_log_probs"][0, 0] for response in responses])
    tokens = [token for response in responses for token in response.tokens()]
    return tokens[-len(log_probs):], log_probs, responses[-1].tensors["cum_log_probs"].item()


def test_every_name_order_and_default_of_the_constructor_and_its_options():
    names = ["model_path", "model_type", "max_beam_width", "scheduler_policy", "get_inference_requests_cb",
             "send_response_cb", "poll_stop_signal_cb", "return_batch_manager_stats_cb", "optional_params",
             "terminate_req_id", "max_draft_tokens", "exclude_input_in_output", "parts", "trt_engine_path"]
    parameters = inspect.signature(GptManager).parameters
    assert list(parameters) == names
    assert {name: parameters[name].default for name in names[6:]} == {
        "poll_stop_signal_cb": None, "return_batch_manager_stats_cb": None,
        "optional_params": TrtGptModelOptionalParams(), "terminate_req_id": None, "max_draft_tokens": None,
        "exclude_input_in_output": False, "parts": Parts(), "trt_engine_path": None}
    assert str(inspect.signature(KvCacheConfig)).count("=") == 17
    assert KvCacheConfig() == KvCacheConfig(
        max_tokens=None, max_attention_window=None, sink_token_length=0, free_gpu_memory_fraction=0.9,
        enable_block_reuse=False, tokens_per_block=64, host_cache_size=0, enable_partial_reuse=True,
        disk_cache_path=None, disk_cache_size=None, disk_cache_read_only=False, disk_io_threads=2, disk_min_tokens=256,
        event_buffer_max_size=0, event_hash_key=None, event_tokens=False, kv_cache_dtype="auto")
    documented = {
        "enable_trt_overlap": False, "run_ahead": None, "enable_chunked_context": False, "normalize_log_probs": True,
        "max_batch_size": 256, "max_num_tokens": 8192, "max_seq_len": None, "device": None, "dtype": "auto",
        "load_format": "auto", "gather_context_logits": True, "gather_generation_logits": True,
        "max_num_sequences": None,
        "max_queued_requests": 1024, "flush_stats_when_idle": False, "deterministic": False, "num_threads": None,
        "cuda_graphs": None, "kv_cache_config": KvCacheConfig()}
    assert {name: getattr(TrtGptModelOptionalParams(), name) for name in documented} == documented
    assert list(inspect.signature(InferenceRequest).parameters) == [
        "request_id", "tensors", "is_streaming", "logits_post_processor", "priority", "deadline_s", "cache_salt",
        "kv_cache_retention_config", "arrival_time", "request_type", "speculation"]
    assert str(inspect.signature(GptManager.shutdown)).startswith("(self, drain: bool = True, timeout: float | None = ")


def test_the_old_name_of_the_model_path_and_any_path_will_do(new_client, new_request):
    client = new_client()
    client.pending = [new_request(1, PROMPT, 2)]
    with GptManager(trt_engine_path=MODEL, model_type=TrtGptModelType.InflightBatching, max_beam_width=1,
                    scheduler_policy=SchedulerPolicy.GUARANTEED_NO_EVICT, get_inference_requests_cb=client.get,
                    send_response_cb=client.send, optional_params=TrtGptModelOptionalParams(
                        device="cpu", kv_cache_config=KvCacheConfig(max_tokens=256))) as manager:
        client.wait_for_finals(1)
        assert manager.num_active_requests == 0
    assert manager.shutdown() and len(client.final(1).tokens()) == len(PROMPT) + 2


@pytest.mark.parametrize("exclude", [False, True])
def test_the_tensors_of_every_kind_of_response_are_those_of_the_table(real_manager, new_client, exclude):
    client, kinds = new_client(), {}
    for streaming in (False, True):
        for flags in range(8):
            for beams in (1, 3) if not streaming else (1,):
                asked = [bool(flags & bit) for bit in (1, 2, 4)]
                kinds[len(kinds)] = (streaming, beams, *asked)
                client.pending.append(InferenceRequest(len(kinds) - 1, {
                    "input_ids": PROMPT, "request_output_len": 4, "beam_width": beams, "return_log_probs": asked[0],
                    "return_context_logits": asked[1], "return_generation_logits": asked[2]}, is_streaming=streaming))
    sent, record = [], client.send
    client.send = lambda request_id, tensors, *rest: (sent.extend(tensors), record(request_id, tensors, *rest))
    real_manager(client, max_beam_width=3, max_batch_size=64,
                 manager_options={"exclude_input_in_output": exclude})
    client.wait_for_finals(*kinds)

    for request_id, (streaming, beams, log_probs, context_logits, generation_logits) in kinds.items():
        for number, response in enumerate(client.responses[request_id]):
            new = 1 if streaming else 4
            rows = new if streaming or exclude else len(PROMPT) + new
            shapes = {
                "output_ids": (1, beams, rows), "sequence_length": (1, beams),
                "context_logits": (1, len(PROMPT), VOCAB) if context_logits and number == 0 else (1, 1, 1),
                "generation_logits": (1, beams, new, VOCAB) if generation_logits else (1, 1, 1, 1),
                "output_log_probs": (1, beams, new), "cum_log_probs": (1, beams), "finish_reason": (1, beams)}
            assert response.names == NAMES
            assert {name: tensor.shape for name, tensor in response.tensors.items()} == shapes, kinds[request_id]
            assert (response.tensors["sequence_length"] == rows).all()
            assert (response.tensors["finish_reason"] == (3 if response.final else 0)).all()
            scores = response.tensors["cum_log_probs"][0]
            assert response.tensors["output_log_probs"].any() == log_probs == bool(scores.any())
            assert list(scores) == sorted(scores, reverse=True)
        assert len(client.responses[request_id]) == (4 if streaming else 1)
    assert all(type(named.tensor) is torch.Tensor and named.tensor.device.type == "cpu" and named.tensor.dtype == (
        torch.float32 if named.name.endswith(("logits", "probs")) else torch.int32) for named in sent)


@pytest.fixture(scope="module")
def model_with_a_poisoned_token(tmp_path_factory):
    """A model whose logits are not finite for a prompt with the token POISON.

    The output embedding is a separate copy with finite values, so the logits of other prompts stay finite.
    """
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(MODEL, folder)
    weights = {name: tensor.clone() for name, tensor in load_file(MODEL / "model.safetensors").items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(weights, folder / "model.safetensors")
    config = json.loads((MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    return folder


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_c21_c12_a_poisoned_embedding_ends_who_reads_it_and_nobody_else(
        real_manager, new_client, new_request, model_with_a_poisoned_token, way):
    shared = [3] * 20
    good = [(1, PROMPT, {}), (2, [*shared, *[7] * 20], {"runtime_top_k": 20, "random_seed": 4}),
            (3, [*shared, *[9] * 9], {"streaming": True})]
    bad = [(11, [*PROMPT, POISON]), (12, [*shared, POISON, *shared]), (13, [*shared, POISON, *shared])]

    def run(prompts, way, **options):
        client = new_client()
        client.pending = [new_request(request_id, prompt, 6, return_log_probs=True, **tensors)
                          for request_id, prompt, tensors in prompts]
        manager = real_manager(client, model_with_a_poisoned_token, **way, **options)
        client.wait_for_finals(*(request_id for request_id, _, _ in prompts))
        assert manager.health()["state"] == "RUNNING"
        manager.shutdown()
        return client

    alone = run(good, WAYS["packed"], max_num_sequences=1)
    mixed = run([item for pair in zip(good, ((*item, {}) for item in bad)) for item in pair], way)
    for request_id, _ in bad:
        assert mixed.final(request_id).code == "NON_FINITE_LOGITS"
    for request_id, _, _ in good:
        tokens, log_probs, total = whole(alone, request_id)
        assert whole(mixed, request_id)[0] == tokens
        np.testing.assert_allclose(whole(mixed, request_id)[1], log_probs, atol=1e-3)
        assert whole(mixed, request_id)[2] == pytest.approx(total, abs=1e-2)


def test_c13_the_same_samples_alone_and_in_every_way(real_manager, new_client, new_request):
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randrange(3, 60))] for _ in range(6)]

    def run(**options):
        client = new_client()
        client.pending = [new_request(i, prompt, 10, streaming=i % 2 == 0, runtime_top_k=40, temperature=0.9,
                                      random_seed=i, return_log_probs=True, repetition_penalty=1.2)
                          for i, prompt in enumerate(prompts)]
        manager = real_manager(client, **options)
        client.wait_for_finals(*range(len(prompts)))
        manager.shutdown()
        return [whole(client, i) for i in range(len(prompts))], json.loads(client.stats[-1])["Recomputed Tokens"]

    alone, _ = run(max_num_sequences=1)
    for name, way in WAYS.items():
        outputs, recomputed = run(**way)
        assert (recomputed > 0) == (name == "pauses")
        for (tokens, log_probs, total), expected in zip(outputs, alone, strict=True):
            assert tokens == expected[0], name
            np.testing.assert_allclose(log_probs, expected[1], atol=1e-3, err_msg=name)
            assert total == pytest.approx(expected[2], abs=1e-2), name


def test_c18_a_real_model_changes_nothing_of_the_process(real_manager, new_client, new_request, capfd):
    def settings():
        return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(),
                torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
                torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(),
                torch.are_deterministic_algorithms_enabled(), np.geterr(), warnings.filters[:]]

    before = settings()
    client = new_client()
    client.pending = [new_request(1, PROMPT, 4, runtime_top_p=0.9, random_seed=3),
                      new_request(2, PROMPT, 4, beam_width=2)]
    manager = real_manager(client, max_beam_width=2, deterministic=True)
    client.wait_for_finals(1, 2)
    assert manager.shutdown()
    assert client.final(1).error == client.final(2).error == ""
    assert settings() == before
    assert capfd.readouterr().out == ""


def test_c18_two_managers_with_threads_of_their_own_leave_the_hosts_number_alone(
        real_manager, new_client, new_request):
    def of_a_new_thread():
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(60)

    before, seen, clients = torch.get_num_threads(), [], [new_client(), new_client()]
    for number, client in enumerate(clients, 1):
        client.pending = [new_request(number, PROMPT, 60, streaming=True)]
        client.on_send = lambda *response: of_a_new_thread()
        real_manager(client, num_threads=before + number)      # made while steps of the first run
    for number, client in enumerate(clients, 1):
        client.wait_for_finals(number)
        assert client.final(number).error == ""
    assert torch.get_num_threads() == before and len(seen) >= 2 and set(seen) == {before}


@pytest.mark.parametrize("change", ["resized", "other data", "sparse"])
def test_a_post_processor_that_returns_what_it_got_in_another_shape_ends_its_own_request(
        real_manager, new_client, new_request, change):
    def processor(request_id, logits, token_ids):
        if change == "resized":
            return logits.resize_(1, 1, 5)
        if change == "sparse":
            return logits.to_sparse()
        logits.data = torch.full((1, 1, VOCAB), -1.0).index_fill(2, torch.tensor([42]), 1.0)
        return logits

    client = new_client()
    first = new_request(1, PROMPT, 3)
    first.logits_post_processor = processor
    client.pending = [first, new_request(2, PROMPT, 3)]
    real_manager(client)
    client.wait_for_finals(1, 2)
    assert client.final(2).error == ""
    if change == "other data":
        assert client.final(1).tokens()[-3:] == [42, 42, 42]
    else:
        assert client.final(1).code == "MODEL_ERROR" and "logits post-processor" in client.final(1).error


def test_c7_tensors_of_a_model_in_bfloat16_may_come_in_bfloat16(real_manager, new_client, new_request):
    draw = torch.Generator().manual_seed(3)
    table = torch.randn(3, 256, generator=draw).bfloat16()
    bias = torch.zeros(VOCAB, dtype=torch.bfloat16)
    bias[42] = 1000.0
    broken = table.clone()
    broken[1, 2] = float("inf")
    rows = {1: {"prompt_embedding_table": table}, 2: {"prompt_embedding_table": table.float()},
            3: {"prompt_embedding_table": table.t().contiguous().t()[None]}, 4: {"prompt_embedding_table": broken}}
    client = new_client()
    client.pending = [new_request(i, [VOCAB + 2, 5, VOCAB], 6, prompt_vocab_size=3, **row) for i, row in rows.items()]
    client.pending += [new_request(5, PROMPT, 3, embedding_bias=bias),
                       new_request(6, table[0], 3), new_request(7, PROMPT, 3, runtime_top_k=bias[:1]),
                       new_request(8, PROMPT, 3, temperature=bias[:1])]
    real_manager(client)
    client.wait_for_finals(*range(1, 9))
    assert client.final(8).error == ""
    assert client.final(1).tokens() == client.final(2).tokens() == client.final(3).tokens()
    assert client.final(5).tokens()[-3:] == [42, 42, 42]
    assert [client.final(i).code for i in (4, 6, 7)] == ["INVALID_REQUEST"] * 3
    assert "is not finite at position 258" in client.final(4).error
