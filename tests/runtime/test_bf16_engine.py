"""An engine in bfloat16 agrees with the same model in float32 on the CPU, for a real model and real text.

On a GPU, these are the only tests in which a whole engine uses the matrix instructions of its kernels. On a CPU, they
run in the CPU's bfloat16, which shows that the tests work.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.fixed import fused as fused_step
from batch_manager.runtime.forms.graph.form import GraphForm
from tests.deterministic.differential import CONFIGS, make_checkpoint
from tests.harness.gpu import GPU, IS_REHEARSAL, in_torch, needs_gpu
from tests.harness.world import build_world
from tests.integration import engine_modes

SMALL_MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
PROMPTS = ["It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want "
           "of a wife. However little known the feelings or views of such a man may be on his first entering a "
           "neighbourhood, this truth is so well fixed in the minds of the surrounding families",
           "Emma smiled, and", "The evening was", "She had been", "Mr. Darcy drew his chair a little towards her"]
NEW_TOKENS = 8 if IS_REHEARSAL else 24
ALLOWED_ERROR = 0.03            # relative norm of a request's logits; each layer rounds to 8 bits
LEAST_AGREEMENT = 0.95          # least share of equal argmax tokens, while both engines have the same input tokens


DEVICES = ["cpu", pytest.param(GPU, marks=[pytest.mark.gpu, needs_gpu], id="cuda")]
TWO_BYTES = "float16" if IS_REHEARSAL else "bfloat16"           # products in bfloat16 are wrong in Triton's interpreter
LOG_PROB_ERROR = 0.15           # largest error of a log-prob; torch in bfloat16 on a CPU has 0.033, on average 0.009
MEAN_LOG_PROB_ERROR = 0.03


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return (folder of a model, prompts as token ids): in a rehearsal, a model of one layer with random weights."""
    if IS_REHEARSAL:
        CONFIGS["llama"] |= engine_modes.SMALL | {"num_hidden_layers": 1}
        return make_checkpoint("llama", tmp_path_factory.mktemp("model")), [[5, 9, 3], [7, 8, 21, 2, 40], [11]]
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    return SMALL_MODEL, [tokenizer.encode(prompt).ids for prompt in PROMPTS]


def requests_of(client, prompts, **options):
    """Give the client greedy requests for NEW_TOKENS tokens each, with these options."""
    client.pending = [InferenceRequest(number, {
        "input_ids": prompt, "request_output_len": NEW_TOKENS, "end_id": -1, **options})
        for number, prompt in enumerate(prompts)]
    return client


ENGINE = {"enable_chunked_context": True, "max_num_tokens": 48, "max_batch_size": 8,
          "kv_cache_config": KvCacheConfig(max_tokens=1024, tokens_per_block=16)}


def finals_of(client, prompts):
    finals = [client.final(number) for number in range(len(prompts))]
    assert [final.error for final in finals] == [""] * len(finals)
    return finals


def serve(make_manager, new_client, model, **options):
    """Return (tokens, context logits, generation logits) of greedy requests that are served together."""
    folder, prompts = model
    client = requests_of(new_client(), prompts, return_context_logits=True, return_generation_logits=True)
    make_manager(client, model_path=folder, manager_options={"exclude_input_in_output": True}, **ENGINE, **options)
    client.wait_for_finals(*range(len(prompts)))
    return [(final.tokens(), final.tensors["context_logits"][0], final.tensors["generation_logits"][0, 0])
            for final in finals_of(client, prompts)]


def serve_plain_steps(new_client, model, **options):
    """Return (tokens, log-probs) of greedy requests that ask for log-probs only, so that their steps are plain."""
    folder, prompts = model
    world = build_world(client=requests_of(new_client(), prompts, return_log_probs=True), model_path=folder,
                        exclude_input=True, **ENGINE, **options)
    try:
        world.run(200)
    finally:
        world.backend.close()
    return [(final.tokens(), final.tensors["output_log_probs"][0, 0]) for final in finals_of(world.client, prompts)]


def error(mine, theirs):
    assert np.isfinite(mine).all() and mine.shape == theirs.shape
    return np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)


def shared_length(tokens, others):
    """Return the number of tokens that two engines sampled after the same tokens."""
    return next((n for n, pair in enumerate(zip(tokens, others)) if pair[0] != pair[1]), NEW_TOKENS - 1) + 1


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_is_float32_up_to_its_rounding(make_manager, new_client, model, device):
    with in_torch():
        exact = serve(make_manager, new_client, model, device="cpu", dtype="float32")
    rounded = serve(make_manager, new_client, model, device=device, dtype=TWO_BYTES)
    same, compared, generated = 0, 0, 0
    for (tokens, context, generation), (their_tokens, their_context, their_generation) in zip(rounded, exact):
        assert error(context, their_context) < ALLOWED_ERROR
        same += int((context.argmax(-1) == their_context.argmax(-1)).sum())
        compared += len(context)
        shared = shared_length(tokens, their_tokens)
        assert error(generation[:shared], their_generation[:shared]) < ALLOWED_ERROR
        same += int((generation[:shared].argmax(-1) == their_generation[:shared].argmax(-1)).sum())
        compared, generated = compared + shared, generated + shared
    assert generated > NEW_TOKENS                  # generation steps are compared too, not only contexts
    assert same >= LEAST_AGREEMENT * compared, f"{same} of {compared} tokens are the same"


def assert_same_up_to_rounding(found, expected):
    errors, same, compared = [], 0, 0
    for (tokens, log_probs), (their_tokens, their_log_probs) in zip(found, expected):
        shared = shared_length(tokens, their_tokens)
        agreed = sum(map(int.__eq__, tokens[:shared], their_tokens[:shared]))
        errors.append(np.abs(log_probs[:agreed] - their_log_probs[:agreed]))      # the last token may be another one
        same, compared = same + agreed, compared + shared
    errors = np.concatenate(errors)
    assert compared > NEW_TOKENS and same >= LEAST_AGREEMENT * compared, f"{same} of {compared} tokens are the same"
    assert errors.max() < LOG_PROB_ERROR and errors.mean() < MEAN_LOG_PROB_ERROR, (errors.max(), errors.mean())


def test_plain_steps_on_a_cpu_in_bfloat16_are_those_in_float32_up_to_rounding(new_client, model):
    exact = serve_plain_steps(new_client, model, device="cpu", dtype="float32")
    assert_same_up_to_rounding(serve_plain_steps(new_client, model, device="cpu", dtype="bfloat16"), exact)


@pytest.mark.gpu
@needs_gpu
def test_plain_steps_one_by_one_fused_and_as_graphs_are_the_same_up_to_rounding(new_client, model, monkeypatch):
    """On one GPU in bfloat16, launches without fused products, with them, and replayed graphs give the same results.

    Each also gives the results of float32 on the CPU.
    """
    run, replay, counts = fused_step.FusedBody.run, GraphForm.start, Counter()

    def counted(name, function):
        return lambda *given, **named: counts.update([name]) or function(*given, **named)

    monkeypatch.setattr(fused_step.FusedBody, "run", counted("fused", run))
    monkeypatch.setattr(GraphForm, "start", counted("replayed", replay))
    with in_torch():
        exact = serve_plain_steps(new_client, model, device="cpu", dtype="float32")
    assert not counts
    with monkeypatch.context() as without_fusion:
        without_fusion.setattr(table, "make_fused_body", lambda *given: None)
        separate = serve_plain_steps(new_client, model, device=GPU, dtype=TWO_BYTES, cuda_graphs=False)
    assert not counts
    fused = serve_plain_steps(new_client, model, device=GPU, dtype=TWO_BYTES, cuda_graphs=False)
    assert counts["fused"] >= NEW_TOKENS - 1 and not counts["replayed"]
    replayed = serve_plain_steps(new_client, model, device=GPU, dtype=TWO_BYTES, cuda_graphs=True)
    assert counts["replayed"] >= NEW_TOKENS - 1
    for found in (separate, fused, replayed):
        assert_same_up_to_rounding(found, exact)
    assert_same_up_to_rounding(fused, separate)
    assert_same_up_to_rounding(replayed, fused)
