"""An engine in bfloat16 agrees with the same model in float32 on the CPU, for a real model and real text.

On a GPU, this is the only test in which a whole engine uses the matrix instructions of its kernels. On a CPU, the test
runs in the CPU's bfloat16, which shows that the test works.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from batch_manager import InferenceRequest, KvCacheConfig

SMALL_MODEL = Path(__file__).parents[2] / "examples" / "models" / "austen-4m"
PROMPTS = ["It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want "
           "of a wife. However little known the feelings or views of such a man may be on his first entering a "
           "neighbourhood, this truth is so well fixed in the minds of the surrounding families",
           "Emma smiled, and", "The evening was", "She had been", "Mr. Darcy drew his chair a little towards her"]
NEW_TOKENS = 24
ALLOWED_ERROR = 0.03            # relative norm of a request's logits; each layer rounds to 8 bits
LEAST_AGREEMENT = 0.95          # least share of equal argmax tokens, while both engines have the same input tokens


def serve(make_manager, new_client, **options):
    """Return (tokens, context logits, generation logits) of greedy requests that are served together."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(SMALL_MODEL / "tokenizer.json"))
    client = new_client()
    prompts = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    client.pending = [InferenceRequest(number, {
        "input_ids": prompt, "request_output_len": NEW_TOKENS, "end_id": -1, "return_context_logits": True,
        "return_generation_logits": True}) for number, prompt in enumerate(prompts)]
    make_manager(client, model_path=SMALL_MODEL, enable_chunked_context=True, max_num_tokens=48,
                 kv_cache_config=KvCacheConfig(max_tokens=1024, tokens_per_block=16),
                 manager_options={"exclude_input_in_output": True}, **options)
    client.wait_for_finals(*range(len(prompts)))
    finals = [client.final(number) for number in range(len(prompts))]
    assert [final.error for final in finals] == [""] * len(finals)
    return [(final.tokens(), final.tensors["context_logits"][0], final.tensors["generation_logits"][0, 0])
            for final in finals]


def error(mine, theirs):
    assert np.isfinite(mine).all() and mine.shape == theirs.shape
    return np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("device", [
    "cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(),
                                                                           reason="needs a CUDA device")])])
def test_bfloat16_is_float32_up_to_its_rounding(make_manager, new_client, device):
    exact = serve(make_manager, new_client, device="cpu", dtype="float32")
    rounded = serve(make_manager, new_client, device=device, dtype="bfloat16")
    same, compared, generated = 0, 0, 0
    for (tokens, context, generation), (their_tokens, their_context, their_generation) in zip(rounded, exact):
        assert error(context, their_context) < ALLOWED_ERROR
        same += int((context.argmax(-1) == their_context.argmax(-1)).sum())
        compared += len(context)
        # Both engines have the same input up to the first token that differs.
        shared = next((n for n, pair in enumerate(zip(tokens, their_tokens)) if pair[0] != pair[1]), NEW_TOKENS - 1) + 1
        assert error(generation[:shared], their_generation[:shared]) < ALLOWED_ERROR
        same += int((generation[:shared].argmax(-1) == their_generation[:shared].argmax(-1)).sum())
        compared, generated = compared + shared, generated + shared
    assert generated > NEW_TOKENS                  # generation steps are compared too, not only contexts
    assert same >= LEAST_AGREEMENT * compared, f"{same} of {compared} tokens are the same"
