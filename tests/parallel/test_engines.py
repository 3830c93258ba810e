"""Engines of several ranks give the tokens and logits of transformers; stages change no bit.

All engines run in the same four processes, one after the other. Every family has the logits of the whole model in
tests/models/test_ranks.py, with threads as ranks.
"""

import contextlib
import json
import os
import threading
import time
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from batch_manager import ConfigError, KvCacheConfig, PeftCacheConfig, SpeculativeConfig
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.compiled.forward import check_compiled
from batch_manager.runtime.forms.form import NoForm
from batch_manager.runtime.ranks import part
from batch_manager.triton_kernels.cpu.native.library import CannotCompileError
from tests.harness.adapters import tensors_of, with_adapter_of_size
from tests.harness.client import Client
from tests.models.conftest import reference  # noqa: F401
from tests.models.test_ranks import HEADS, MORE, ONE, PROMPTS, TWO
from tests.models.test_same_logits_as_transformers import FAMILIES

from .engines import Job, manager_of, run_alone, run_rank, run_ranks

NEW_TOKENS, WITH_CONTEXT_LOGITS = 4, 1
# (tensor_parallel_size, pipeline_parallel_size) -> cases, and what differs from HEADS in them. The stages of the other
# families are compared in tests/models/test_stages.py.
ADAPTED = [((2, 1), "llama, grouped queries"), ((1, 2), "gpt2")]
DETERMINISTIC = [((2, 1), "olmo 3", TWO), ((4, 1), "llama, grouped queries", TWO)]
# With the draft tokens of the engine and of clients, and without.
DRAFTED = [((4, 1), "llama, grouped queries", TWO), ((2, 1), "gemma 3", HEADS), ((2, 2), "gpt2", {})]
DRAFT_MODEL = [((2, 2), "gpt2"), ((2, 1), "gemma 3")]          # where the whole model drafts, on rank 0
ENGINES = {
    (2, 1): {"llama, one key head per query head, biases": {}, "gemma 3": {}, "gpt2": {},
             "falcon, new, slopes, groups of key heads": {}},
    (4, 1): {"llama, grouped queries": TWO, "olmo 3": ONE},
    (1, 2): {"opt, norms behind, tokens of another size": {}, "bloom": {}},
    (2, 2): {"cohere, norms of heads": {}},
}


@pytest.fixture(scope="module")
def engines(reference, fork_server):  # noqa: F811
    """Return (sizes, case) -> (model of transformers, job, answers)."""
    from .conftest import Processes, free_port

    models, jobs = {}, {}
    for sizes, cases in ENGINES.items():
        for case, heads in cases.items():
            family, options = FAMILIES[case]
            more = MORE.get(family, {**HEADS, **heads})
            if "new_decoder_architecture" in options:
                more = {**more, "num_kv_heads": 4}
            models[sizes, case], folder = reference(family, **{**options, **more})
            requests = [((number, prompt, NEW_TOKENS), {"return_generation_logits": True,
                                                        "return_context_logits": number == WITH_CONTEXT_LOGITS})
                        for number, prompt in enumerate(PROMPTS)]
            jobs[sizes, case] = Job(folder, requests, {"tensor": sizes[0], "stages": sizes[1],
                                                       "enable_trt_overlap": len(jobs) % 2 == 0,
                                                       "deterministic": sizes == (1, 2)})
    for sizes, case, heads in DETERMINISTIC:
        family, options = FAMILIES[case]
        folder = reference(family, **{**options, **heads})[1]
        for most in (1, 8):
            jobs[sizes, case, most] = jobs[(2, 1), "gpt2"]._replace(folder=folder, options={
                "tensor": sizes[0], "deterministic": True, "max_batch_size": most})
    for sizes, case, heads in DRAFTED:
        family, options = FAMILIES[case]
        folder = reference(family, **{**options, **MORE.get(family, heads)})[1]
        for is_drafted in (False, True):
            jobs[sizes, case, "drafted", is_drafted] = drafted_job(folder, sizes, None if not is_drafted else (
                SpeculativeConfig("draft_model", 5, model=folder) if (sizes, case) in DRAFT_MODEL
                else SpeculativeConfig("custom", 5)))
    for sizes, case in ADAPTED:
        family, options = FAMILIES[case]
        model, folder = reference(family, **{**options, **MORE.get(family, HEADS)})
        jobs[sizes, case, "adapters"] = adapted_job(model, folder, sizes)
    answers = run_ranks(Processes(fork_server), free_port(), list(jobs.values()), 4)
    for key, (_, records) in zip(jobs, answers):
        norms_parts = key[1].startswith("olmo") and key[0][0] > 1
        assert json.loads(records[-1])["Packed Steps" if norms_parts else "Compiled Steps"] > 0, key
    return {key: (jobs[key], answer, records) if {"adapters", "drafted"} & {*key}
            else (models.get(key), jobs[key], answer)
            for key, (answer, records) in zip(jobs, answers)}


def adapted_job(model, folder, sizes):
    """Return a job of requests with one of four adapters, or with none, in pages for two or three adapters."""
    tensors = {task: tensors_of(with_adapter_of_size(model, task, rank))
               for task, rank in enumerate([0, 1, 3, 2, 4]) if rank}
    num_projections = len(tensors[1]["lora_config"])
    requests = [((number, [*PROMPTS[number % len(PROMPTS)], number], NEW_TOKENS),
                 {"return_generation_logits": True, **({"lora_task_id": task, **tensors[task]} if task else {})})
                for number, task in enumerate([0, 1, 2, 1, 3, 0, 4, 2, 1, 0, 3])]
    return Job(folder, requests, {"tensor": sizes[0], "stages": sizes[1], "max_batch_size": 3, "peft_cache_config":
                                  PeftCacheConfig(max_adapter_size=4, num_device_module_layer=6 * num_projections),
                                  "kv_cache_config": KvCacheConfig(tokens_per_block=16, max_tokens=640)})


def drafted_job(folder, sizes, config):
    """Return a job of greedy and sampled requests, with drafts of clients and as `config` says, or without if None."""
    requests = []
    for number in range(6):
        more = {"return_log_probs": True, "return_generation_logits": True, "return_context_logits": number == 3}
        if number % 2:
            more |= {"temperature": 0.7, "random_seed": number, "repetition_penalty": 1.2}
        requests.append(((number, [*PROMPTS[number % 3], number], 12), more))
    return Job(folder, requests, {
        "tensor": sizes[0], "stages": sizes[1], "deterministic": True, "max_batch_size": 3, "max_num_sequences": 6,
        "enable_chunked_context": True, "max_num_tokens": 32, "enable_trt_overlap": sizes == (4, 1),
        "kv_cache_config": KvCacheConfig(tokens_per_block=16, max_tokens=640),
        "speculative_config": config})


def greedy(model, prompt):
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            logits = model(torch.tensor([tokens])).logits[0]
            tokens.append(int(logits[-1].argmax()))
    return tokens, logits.numpy()


@pytest.mark.parametrize("sizes, case", [(sizes, case) for sizes, cases in ENGINES.items() for case in cases])
def test_engines_have_the_tokens_and_logits_of_transformers(sizes, case, engines):
    model, job, answers = engines[sizes, case]
    for number, prompt in enumerate(PROMPTS):
        tokens, all_logits = greedy(model, prompt)
        answer, logits = answers[number], all_logits[len(prompt) - 1:]
        assert answer.tokens[-1] == tokens and not answer.error
        assert np.abs(answer.tensors["generation_logits"].reshape(logits.shape) - logits).max() < 1e-4
        if number == WITH_CONTEXT_LOGITS:
            logits = all_logits[:len(prompt)]
            assert np.abs(answer.tensors["context_logits"].reshape(logits.shape) - logits).max() < 1e-4
    if sizes == (1, 2):
        options = {name: value for name, value in job.options.items() if name not in ("tensor", "stages")}
        alone, _ = run_alone(job._replace(options={**options, "device": "cpu"}))
        check_bits(answers, alone)


def check_bits(answers, expected):
    for number, answer in answers.items():
        assert np.array_equal(answer.tensors["generation_logits"], expected[number].tensors["generation_logits"])


@pytest.mark.parametrize("sizes, case", [(sizes, case) for sizes, case, _ in DETERMINISTIC])
def test_with_deterministic_the_bits_of_a_request_do_not_depend_on_others(sizes, case, engines):
    check_bits(engines[sizes, case, 8][2], engines[sizes, case, 1][2])


@pytest.mark.parametrize("sizes, case", [(sizes, case) for sizes, case, _ in DRAFTED])
def test_drafts_change_no_bit(sizes, case, engines):
    (_, expected, _), (_, answers, records) = (engines[sizes, case, "drafted", drafts] for drafts in (False, True))
    for number, answer in answers.items():
        assert not answer.error and answer.tokens[-1] == expected[number].tokens[-1]
        for name in ("output_log_probs", "generation_logits", "context_logits"):
            if name in expected[number].tensors:
                assert np.array_equal(answer.tensors[name], expected[number].tensors[name]), (number, name)
    figures = json.loads(records[-1])
    assert figures["Draft Tokens"] > figures["Accepted Draft Tokens"] > 20


@pytest.mark.parametrize("sizes, case", ADAPTED)
def test_requests_with_adapters_and_without_are_as_in_one_process(sizes, case, engines):
    job, answers, records = engines[sizes, case, "adapters"]
    options = {name: value for name, value in job.options.items() if name not in ("tensor", "stages")}
    alone, _ = run_alone(job._replace(options={**options, "device": "cpu", "max_batch_size": 1}))
    for number, answer in answers.items():
        assert not answer.error and answer.tokens == alone[number].tokens
        difference = answer.tensors["generation_logits"] - alone[number].tensors["generation_logits"]
        assert np.abs(difference).max() < 1e-3
    figures = json.loads(records[-1])
    assert figures["LoRA Device Pages"] == 6 and figures["LoRA Evictions"] > 0


def run_where_rank_1_cannot_compile(port, rank, job, name):
    """Return the answers, and on rank 0 why its steps are not compiled."""
    if rank:
        with mock.patch.object(part if name == "check_compiled" else table, name, partial(cannot_compile, name)):
            return run_rank(port, rank, [job])
    managers = []
    answers, _ = run_alone(job, lambda client: managers.append(manager_of(port, 0, job, client)) or managers[0])
    return answers, managers[0].info.absent["compiled"]


def cannot_compile(name, *given):
    if name == "load_library":
        raise CannotCompileError("no compiler here")
    check_compiled(*given)                             # takes part in what the ranks exchange
    raise NoForm("differs from the layers", is_wrong=True)


@pytest.mark.parametrize("name, reason", [
    ("load_library", "on rank 1, no compiler here"),
    ("check_compiled", "Llama cannot be compiled: on rank 1, differs from the layers")])
def test_no_step_is_compiled_if_one_rank_cannot(name, reason, reference, processes, port):  # noqa: F811
    job = Job(reference("Llama", num_hidden_layers=2, **HEADS)[1], [((0, PROMPTS[0], 3), {})], {"tensor": 2})
    (answers, absent), _ = processes.run(run_where_rank_1_cannot_compile, [(port, rank, job, name) for rank in (0, 1)])
    assert absent == reason
    assert answers[0].tokens == run_alone(job._replace(options={"device": "cpu"}))[0][0].tokens and not answers[0].error


def refusal(port, rank, job):
    with pytest.raises(ConfigError) as raised:
        manager_of(port, rank, job, Client() if rank == 0 else None)
    return str(raised.value)


@pytest.mark.parametrize("sizes, says", [
    ((3, 1), "the model is split over 3 processes, and num_heads of LlamaForCausalLM is 8"),
    ((1, 4), "the model is divided into 4 stages; expected at most 2, the number of its layers")], ids=str)
def test_a_size_that_does_not_divide_is_named_on_every_rank(reference, processes, port, sizes, says):  # noqa: F811
    folder = reference("Llama", num_hidden_layers=2, **HEADS)[1]
    job = Job(folder, [], {"tensor": sizes[0], "stages": sizes[1]})
    errors = processes.run(refusal, [(port, rank, job) for rank in range(sizes[0] * sizes[1])])
    assert all(says in error for error in errors), errors


def open_here():
    """Return the names of the threads of this process, and its open sockets."""
    sockets = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):             # that of this listing
            sockets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {thread.name for thread in threading.enumerate()}, {name for name in sockets if name.startswith("socket")}


def fail_then_start(port, rank, job, empty):
    """Start without the model's folder on rank 1, then with it. Returns the error, and what was left after it."""
    before, folder = open_here(), os.path.dirname(job.folder)
    os.chdir(empty if rank else folder)
    with pytest.raises(ConfigError) as raised:
        manager_of(port, rank, job._replace(folder=os.path.basename(job.folder)), Client() if rank == 0 else None)
    error, deadline = str(raised.value), time.monotonic() + 5
    del raised
    while (left := [now - then for now, then in zip(open_here(), before)]) != [set(), set()]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    os.chdir(folder)
    return error, left, run_rank(port, rank, [job])


def test_a_model_that_is_missing_on_one_rank_is_told_to_all_and_a_failed_start_leaves_nothing(
        reference, processes, port, tmp_path):  # noqa: F811
    """No thread and no socket is left, and the ranks start again at the same address."""
    folder = reference("Llama", num_hidden_layers=2, **HEADS)[1]
    job = Job(str(folder), [((0, PROMPTS[0], 3), {})], {"tensor": 2})
    answers = processes.run(fail_then_start, [(port, rank, job, str(tmp_path)) for rank in (0, 1)])
    for error, left, _ in answers:
        assert f"rank 1 found no checkpoint at {os.path.basename(folder)}" in error
        assert left == [set(), set()]
    ((answer, _),) = answers[0][2]
    assert not answer[0].error
