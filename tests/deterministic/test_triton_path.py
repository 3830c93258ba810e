"""The Triton kernels are deterministic too: chunks, pauses and layouts do not change a request's bits.

The kernels run in Triton's interpreter, in a separate process. The interpreter uses numpy's matrix products, which sum
in an order that depends on the element. The test replaces them with products that sum all elements in the same order,
as a GPU's matrix unit does.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """
import importlib.util, json, random, sys
from pathlib import Path

def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

from batch_manager.attention import triton_paged
from batch_manager.decoding.decoder import GptDecoder
from batch_manager.runtime.device.running import CapturedGraph
from batch_manager.runtime.forms import table
from batch_manager.runtime.forms.form import Forms
from tests.runtime.bindable_torch import CallingGraph
# The warm-up and the comparison of graphs with launches take half of the time, and other tests cover them.
table.warm_up, table.difference_of_graphs = lambda *_: None, lambda *_, **__: None
differential = load("differential", sys.argv[1])
worker = load("interpreter_worker", sys.argv[2])
parent = Path(sys.argv[3])
triton_paged.FIXED_PART_KEYS = 8                 # so that prompts of 17 tokens have several parts
merge, merged = triton_paged.paged_attention_context.__globals__["paged_attention_merge"], []
triton_paged.paged_attention_context.__globals__["paged_attention_merge"] = lambda *given: (
    merged.append(len(given[2])), merge(*given))[1]
draw = random.Random(0)
answers = []
with worker.dots_in_one_order(None, True):
    for family, dtype, small, circumstances in [
        ("qwen3", "float32", {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "head_dim": 16},
         differential.Circumstances(chunk=16, pauses={1: {1}}, overlap=True)),
        ("gpt2", "float16", {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_inner": 40},
         differential.Circumstances(layout="padded", static=True)),
    ]:
        differential.CONFIGS[family] |= {**small, "vocab_size": 40}
        lab = differential.Laboratory(differential.make_checkpoint(family, parent), dtype=dtype)
        assert lab.backend("fused").info.dispatch == "triton"
        asks = {1: differential.Ask(tuple(draw.randrange(40) for _ in range(17)), 3),
                2: differential.Ask(tuple(draw.randrange(40) for _ in range(8)), 4, (("runtime_top_k", 9),))}
        answers.append([family, lab.differences(asks, circumstances), lab.num_pauses, len(merged) > 0])
        merged.clear()

    # Steps at fixed addresses, without logits that are returned, against steps that are calls of the model.
    alone, graphs, launches = (differential.Laboratory(parent / "qwen3", graph=graph, most=3, most_tokens=64)
                               for graph in (CapturedGraph, CallingGraph, CapturedGraph))
    calls = alone.backend("fused")
    calls._forms = Forms([calls._forms._forms[-1]], calls._parts, {})
    given = (("return_generation_logits", False),)
    asks = {number: differential.Ask(tuple(draw.randrange(40) for _ in range(length)), 4, (*sampling, *given), False)
            for number, (length, sampling) in enumerate([(21, ()), (7, (("runtime_top_k", 9),)), (12, ())])}
    for lab in (graphs, launches):
        lab.reference = alone
        found = lab.differences(asks, differential.Circumstances(chunk=16, arrivals={1: 1, 2: 3}))
        answers.append([dict(lab.backend("fused")._forms.steps), found])
    answers.append([dict(calls._forms.steps), calls.info.absent])

    # A planted fault, by which the bits of a row in these steps depend on whether it is alone.
    sample_plain = GptDecoder.sample_plain
    GptDecoder.sample_plain = lambda decoder, logits, *others: sample_plain(
        decoder, logits * (1 + 2**-16) if len(logits) > 1 else logits, *others)
    answers.append([lab.differences({1: asks[1], 2: asks[2]}, differential.Circumstances())
                    for lab in (graphs, launches)])
print(json.dumps(answers))
"""


def test_company_chunks_pauses_and_layouts_do_not_show_in_the_kernels_either(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    worker = HERE.parent / "kernels" / "interpreter_worker.py"
    done = subprocess.run(
        [sys.executable, "-m", "tests.quick_interpreter", "-c", SCRIPT, HERE / "differential.py", worker, tmp_path],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}, capture_output=True, text=True,
        timeout=300, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    *first, (with_graphs, found), (launched, others), (called, absent), planted = answers
    assert first == [["qwen3", {}, 1, True], ["gpt2", {}, 0, True]]
    assert (found, others, called.keys()) == ({}, {}, {"packed"}), (found, others)
    assert with_graphs.keys() == {"graph", "fixed", "packed"} and with_graphs["graph"] > 6, with_graphs
    assert launched.keys() == {"fixed", "packed"} and min(launched.values()) > 1, launched
    assert absent == {"graph": "the device is cpu", "fused": "deterministic is set",
                      "compiled": "TRITON_INTERPRET is set", "padded": "TrtGptModelType.V1 alone pads steps"}
    assert all("log_probs" in names for found in planted for names in found.values()) and all(planted), planted
