"""The code in docs/requests.md for several outputs of one prompt gives these outputs."""

import re
from pathlib import Path

import pytest

from batch_manager import InferenceRequest

pytest.importorskip("torch")

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = REPOSITORY / "examples" / "models" / "austen-4m"
PROMPT = list(range(100, 100 + 40))


def documented_samples():
    page = (REPOSITORY / "docs" / "requests.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    (block,) = [block for block in blocks if block.startswith("def samples(")]
    names = {"InferenceRequest": InferenceRequest}
    exec(block, names)
    return names["samples"]


def texts(make_manager, new_client, requests, **options):
    client = new_client()
    client.pending = list(requests)
    manager = make_manager(client, model_path=MODEL, num_threads=1,
                           manager_options={"exclude_input_in_output": True}, **options)
    client.wait_for_finals(*[request.request_id for request in requests])
    assert manager.shutdown()
    return [client.final(request.request_id).tokens() for request in requests], client


def test_samples_differ_and_each_is_what_its_seed_gives_alone(make_manager, new_client):
    samples = documented_samples()
    together, _ = texts(make_manager, new_client, samples(10, PROMPT, 4, request_output_len=12))
    assert len({tuple(text) for text in together}) == 4
    alone, _ = texts(make_manager, new_client, samples(77, PROMPT, 4, request_output_len=12)[2:3])
    assert alone == together[2:3]
