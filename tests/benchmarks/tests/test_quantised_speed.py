"""Engines are compared by their times with the same file, which random_gguf writes in a given shape."""

import pytest

from batch_manager.models import load_model
from tests.benchmarks import random_gguf
from tests.benchmarks.quantised_speed import table


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_a_file_with_random_weights_has_its_shape(architecture, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    random_gguf.write_whole(path, random_gguf.Shape(architecture, 300, 64, 96, 1, heads=4, key_heads=2, head_size=16))
    model = load_model(path, device="cpu", dtype="float32")
    spec = model.spec
    assert (spec.vocab_size, spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.num_heads,
            spec.num_kv_heads, spec.head_size, spec.tie_word_embeddings) == (300, 64, 96, 1, 4, 2, 16, True)


def test_the_table_compares_each_form_of_the_products_with_the_other_engines(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(2_000))
    runs = {engine: [{"step_ms": {"1": ms}, "read_rate": 1e6, "loaded_mb": 1.0, "load_s": 1.0} for ms in times]
            for engine, times in (("none", (4.0, 8.0, 5.0)), ("int8", (2.0, 4.0, 4.0)), ("llama.cpp", (8.0, 8.0, 8.0)))}
    _, _, exact, rounded, *_ = table({str(path): runs}, [1])
    assert exact == "| model.gguf | exact | 1 | 5 (4-8) | 8 (8-8) | 1.6 (1-2) |  |  | 0.4 (0.25-0.5) |"
    assert rounded == "| model.gguf | int8 | 1 | 4 (2-4) | 8 (8-8) | 2 (2-4) |  |  | 0.5 (0.5-1) |"
