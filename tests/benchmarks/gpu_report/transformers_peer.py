"""Goal G6b: the headline workload with transformers' continuous batching, on the same device, with random weights.

With the attention "sdpa", transformers computes every query against the keys of all sequences. It is no serious peer:
this section is the last one.
"""

import time
from collections.abc import Iterator
from typing import Any

from .bench import Bench
from .engines import not_reached
from .headline import COUNT, dry_workload, headline_workload
from .records import DRY, MEASURED, Record
from .shapes import QWEN3_600M, TINY, Shape

SECONDS, LOAD_SECONDS = 45, 15        # the measurement stops when this time is over
WARM_UP_TOKENS = 4


def run(bench: Bench) -> Iterator[Record]:
    case = f"{COUNT} requests, greedily"
    ours = [line["numerator"] or 1.0 for line in bench.lines
            if line["goal"] == "G6" and line["status"] in (MEASURED, DRY)]
    if not ours:
        yield not_reached("G6b", case, "no rate of this package is known; run the section headline in the same report")
        return
    bench.require(SECONDS)
    shape, workload = bench.pick((QWEN3_600M, headline_workload), (TINY, dry_workload))
    rate, note = serve_with_transformers(bench, shape, workload()["requests"], SECONDS - LOAD_SECONDS)
    yield Record("G6b", case, max(ours), rate, "tokens/s", note=note)


def serve_with_transformers(bench: Bench, shape: Shape, requests: list[dict[str, Any]],
                            limit_seconds: float) -> tuple[float, str]:
    """Serve greedily, with outputs of exactly the requested lengths, and return (output tokens/s, note for the report).

    Stops after `limit_seconds`. Tokens of incomplete requests do not count. Raises the errors of
    transformers, and RuntimeError if its generation thread ends or no request completes.
    """
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    path = shape.write(bench.folder)
    attention = "sdpa"
    with torch.device(bench.device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(path), dtype=bench.dtype, attn_implementation=attention).eval()
    config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0,
                              max_new_tokens=max(request["max_tokens"] for request in requests))
    manager = model.init_continuous_batching(generation_config=config, **_sizes(bench))
    manager.start()
    try:
        warm_up = [{"id": f"warm-up {number}", "prompt": [5] * (20 + number), "max_tokens": WARM_UP_TOKENS}
                   for number in range(bench.pick(16, 1))]
        _serve(manager, warm_up, time.monotonic() + limit_seconds)
        began = time.monotonic()
        tokens = _serve(manager, requests, began + limit_seconds)
        seconds = time.monotonic() - began
    finally:
        manager.stop(block=True, timeout=10)
        del model
        bench.clock.forget()
    if not tokens:
        raise RuntimeError(f"transformers finished no request in {limit_seconds:.0f} s")
    asked = sum(request["max_tokens"] for request in requests)
    note = f"transformers {transformers.__version__}, {attention}, other random weights"
    return tokens / seconds, note if tokens == asked else f"{note}; stopped at {tokens:,} of {asked:,} tokens"


def _sizes(bench: Bench) -> dict[str, Any]:
    """Return cache sizes for a dry run. On a GPU, transformers chooses them."""
    if not bench.is_dry:
        return {}
    from transformers import ContinuousBatchingConfig

    # Older releases call the size of a page `block_size`.
    page_size = "page_size" if "page_size" in ContinuousBatchingConfig.__dataclass_fields__ else "block_size"
    return {"continuous_batching_config": ContinuousBatchingConfig(
        **{page_size: 16}, num_blocks=16, max_batch_tokens=32)}


def _serve(manager: Any, requests: list[dict[str, Any]], deadline: float) -> int:
    """Serve until the deadline, and return the number of output tokens of the completed requests.

    deadline   value of time.monotonic()
    """
    for request in requests:
        manager.add_request(request["prompt"], request_id=f"request {request['id']}",
                            max_new_tokens=request["max_tokens"], eos_token_id=-1)
    tokens, num_open = 0, len(requests)
    while num_open and time.monotonic() < deadline:
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise RuntimeError("the generation thread of transformers ended")
        elif result.is_finished():
            if result.error:
                raise RuntimeError(f"transformers: {result.error}")
            tokens, num_open = tokens + len(result.generated_tokens), num_open - 1
    return tokens

