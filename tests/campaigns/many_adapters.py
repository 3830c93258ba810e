"""T22: ten thousand adapters through one manager of a small model; its memory must not grow.

Each adapter comes with a request, or by `load_adapter` followed by `forget_adapter`. The caches have room for a few. A
copy of the first adapter comes again and again under new ids, and its request must get the same tokens each time.
"""

import gc
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from .registry import Options, Summary

ENOUGH = {"Q": 500, "F": 10_000, "C": 100_000}              # adapters
WAVE, SETTLED = 16, 2_000                                   # adapters at a time; before the first measurement
MAY_GROW = {"objects": 300, "bytes": 8 * 2**20}             # from the first measurement to the last
PROMPT = [5, 17, 40, 33, 8, 60, 2]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measured() -> dict[str, int]:
    gc.collect()
    return {"objects": len(gc.get_objects()), "bytes": resident_bytes()}


def run(options: Options) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        return pass_through(Path(folder), ENOUGH[options.tier], options.first_seed)


def pass_through(folder: Path, count: int, seed: int) -> Summary:
    import torch

    from batch_manager import KvCacheConfig, PeftCacheConfig
    from tests.harness.adapters import tensors_of, with_adapter_of_size
    from tests.harness.client import Client
    from tests.harness.requests import request
    from tests.harness.world import make_manager
    from tests.models.conftest import make_reference

    torch.set_num_threads(1)
    model, client, failures, texts, before = make_reference("Qwen2"), Client(), [], {}, {}
    model.save_pretrained(folder)
    own = tensors_of(with_adapter_of_size(model, seed, 2))
    projections = len(own["lora_config"])
    manager = make_manager(client, model_path=folder, num_threads=1, max_batch_size=WAVE, kv_cache_config=KvCacheConfig(
        tokens_per_block=16, max_tokens=64 * 16, enable_block_reuse=True), peft_cache_config=PeftCacheConfig(
        max_adapter_size=4, num_device_module_layer=80 * projections, host_cache_size=3 * WAVE * own[
            "lora_weights"].nbytes))
    for first in range(0, count, WAVE):
        if SETTLED <= first < SETTLED + WAVE:
            before = measured()
        wave, loaded = range(first, min(first + WAVE, count)), []
        for number in wave:
            adapter = own if number % WAVE == 0 else tensors_of(
                with_adapter_of_size(model, seed + 1 + number, 1 + number % 3))
            if number % 4 == 1:
                loaded.append(manager.load_adapter(number, adapter).task_id)
                adapter = {}
            client.pending.append(request(number, PROMPT, 3, lora_task_id=number, **adapter))
        client.wait_for_finals(*wave)
        for number in loaded:
            manager.forget_adapter(number)
        for number in wave:
            final = client.final(number)
            text = "error" if final.error else str(final.tokens())
            texts.setdefault("same" if number % WAVE == 0 else "other", set()).add(text)
            if final.error:
                failures.append(f"request {number}: {final.error}")
        last = json.loads(client.stats[-1])
        client.responses.clear()
        for kept in (client.stats, client.events, client.asked):
            kept.clear()
    failures += manager._loop.adapters.faults()
    after, limit = measured(), 3 * WAVE * own["lora_weights"].nbytes
    assert manager.shutdown(timeout=60)
    if len(texts["same"]) != 1:
        failures.append(f"the same adapter gave {len(texts['same'])} texts")
    grown = {name: after[name] - before.get(name, after[name]) for name in after}
    failures += [f"{number:,} {name} more than after {SETTLED:,} adapters; at most {MAY_GROW[name]:,}"
                 for name, number in grown.items() if number > MAY_GROW[name]]
    if last["Used LoRA Host Cache Bytes"] > limit or last["LoRA Adapters On Host"] > 6 * WAVE:
        failures.append(f"the host cache has {last['LoRA Adapters On Host']} adapters at the end")
    return Summary(
        f"T22: {count:,} adapters from seed {seed}, a quarter by load_adapter: {last['LoRA Loads']:,} loads, "
        f"{last['LoRA Evictions']:,} evictions, {len(texts['other']):,} texts; from adapter {SETTLED:,} on "
        f"{grown['bytes'] / 2**20:.1f} MiB and {grown['objects']:,} objects more; "
        f"{last['LoRA Adapters On Host']} adapters on the host at the end",
        failures, [] if before else ["too few adapters to measure growth"])
