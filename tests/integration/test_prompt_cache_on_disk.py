"""C12, C13: after a restart on a directory, tokens and log-probabilities are those of an engine without one."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from batch_manager import KvCacheConfig  # noqa: E402
from tests.harness.client import Client  # noqa: E402
from tests.harness.compiled import library_or_skip  # noqa: E402
from tests.harness.requests import request  # noqa: E402
from tests.harness.world import make_manager  # noqa: E402

SIZE, COUNT = 16, 6
DRAW = np.random.default_rng(0)
TRUNK = DRAW.integers(0, 200, 100).tolist()
PROMPTS = [[*TRUNK, *DRAW.integers(0, 200, 9 + number).tolist()] for number in range(3)] + [TRUNK[:40]]


def run(folder, path=None, salts=(None,) * 4, kv=None, **options):
    """Return tokens and log-probs of PROMPTS in an engine, and its last statistics."""
    client = Client()
    disk = {} if path is None else {"disk_cache_path": path, "disk_cache_size": 1 << 30, "disk_min_tokens": SIZE}
    manager = make_manager(client, model_path=folder, max_batch_size=4, flush_stats_when_idle=True,
                           kv_cache_config=KvCacheConfig(**{"enable_block_reuse": True, "tokens_per_block": SIZE,
                                                            "max_tokens": 1024, **disk, **(kv or {})}), **options)
    try:
        for number, (prompt, salt) in enumerate(zip(PROMPTS, salts)):
            client.pending.append(request(number, prompt, COUNT, return_log_probs=True, cache_salt=salt))
            manager.notify()
            client.wait_for_finals(number)
    finally:
        assert manager.shutdown(timeout=60)
    finals = [client.final(number) for number in range(len(PROMPTS))]
    assert not any(final.error for final in finals), finals[0].error
    return ([final.tokens() for final in finals],
            np.stack([np.array(final.tensors["output_log_probs"])[0, 0, :COUNT] for final in finals]),
            json.loads(client.stats[-1]))


@pytest.mark.parametrize("reference", ["llama", "gemma3", "gpt-neox"], indirect=True)
@pytest.mark.parametrize("options", [{}, {"deterministic": True, "cpu_compile": False},
                                     {"cpu_compile": False, "enable_chunked_context": True, "max_num_tokens": 32}],
                         ids=["compiled", "deterministic", "chunks"])
def test_a_restarted_engine_goes_on_where_the_other_ended(reference, options, tmp_path):
    tokens, log_probs, _ = run(reference.folder, **options)
    first = run(reference.folder, tmp_path / "cache", **options)
    again = run(reference.folder, tmp_path / "cache", **options)
    assert again[2]["Store Loaded Blocks"] >= 6 and again[2]["Disk Damaged Files"] == 0
    for others, other_log_probs, _ in (first, again):
        assert others == tokens
        if "deterministic" in options:
            assert other_log_probs.tobytes() == log_probs.tobytes()
        np.testing.assert_allclose(other_log_probs, log_probs, atol=2e-4)
    salted = run(reference.folder, tmp_path / "cache", ("a", "b", "c", "d"), **options)
    assert salted[0] == tokens and salted[2]["Store Loaded Blocks"] == 0


@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_two_engines_share_a_directory_and_other_models_and_dtypes_find_nothing(reference, tmp_path):
    cache = tmp_path / "cache"
    tokens, *_ = run(reference.folder)
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run, reference.folder, cache, cpu_compile=False) for _ in range(2)]:
            assert each.result(60)[0] == tokens
    read = run(reference.folder, cache, kv={"disk_cache_read_only": True}, cpu_compile=False)
    assert read[0] == tokens and read[2]["Store Loaded Blocks"] > 0
    for kv, options in (({}, {"dtype": "bfloat16", "cpu_compile": False}), ({"tokens_per_block": 32}, {}),
                        ({}, {"quantization": "int8"}),
                        ({}, {"quantization": "int8", "quantized_activations": "int8"}),
                        ({"kv_cache_dtype": "fp8"}, {}), ({"max_attention_window": 64}, {"cpu_compile": False})):
        assert run(reference.folder, cache, kv=kv, **options)[2]["Store Loaded Blocks"] == 0
    other = tmp_path / "other"
    other.mkdir()
    for file in reference.folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    assert run(other, cache)[2]["Store Loaded Blocks"] > 0, "a copy of the model is the same model"
    weights = next(other.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    weights.write_bytes(data)
    assert run(other, cache)[2]["Store Loaded Blocks"] == 0, "one bit makes another"


@pytest.mark.parametrize("reference", ["llama"], indirect=True)
def test_a_deterministic_engine_does_not_find_blocks_of_other_compiled_code(reference, tmp_path, monkeypatch):
    for identity, finds in (("one", False), ("other", False), ("one", True)):
        monkeypatch.setattr(library_or_skip(), "identity", identity)
        statistics = run(reference.folder, tmp_path / "cache", deterministic=True, cpu_compile=True)[2]
        assert (statistics["Store Loaded Blocks"] > 0) == finds
