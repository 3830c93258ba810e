"""The same model through the Triton kernels, in triton's interpreter, in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
import torch

SCRIPT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("helpers", sys.argv[1])
helpers = importlib.util.module_from_spec(spec)
sys.modules["helpers"] = helpers
spec.loader.exec_module(helpers)
from batch_manager.attention.registry import make_attention

run = helpers.Driver(helpers.load_model(sys.argv[2], device="cpu", dtype="float32"), shuffled=True,
                     attention_class=make_attention)
assert run.attention.dispatch == "triton"
first, second = json.loads(sys.argv[3])
logits = [run.run([(0, first[:16], False), (1, second, True)]), run.run([(0, first[16:], True)], [(1, 5)]),
          run.run([], [(0, 6), (1, 7)])]
print(json.dumps([row.tolist() for rows in logits for row in rows]))
"""


@pytest.mark.parametrize("family, options", [
    ("Mistral", {"num_hidden_layers": 1, "sliding_window": 11}),
    ("Qwen3", {"num_hidden_layers": 1, "head_dim": 16}),
    ("GPT2", {"n_layer": 1}),
])
def test_the_kernels_give_the_logits_of_transformers(family, options, reference, prompts):
    pytest.importorskip("triton", reason="triton is not installed")
    model, folder = reference(family, **options)
    first, second = prompts([20, 3])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    helpers = os.path.join(os.path.dirname(__file__), "conftest.py")
    done = subprocess.run([sys.executable, "-c", SCRIPT, helpers, str(folder), json.dumps([first, second])],
                          env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = torch.tensor(json.loads(done.stdout))
    sequences = [second, first, [*second, 5], [*first, 6], [*second, 5, 7]]
    with torch.inference_mode():
        expected = torch.stack([model(torch.tensor([tokens])).logits[0, -1] for tokens in sequences])
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
