"""A store of your own for blocks of the prompt cache: a dictionary in another process, which engines share.

    python examples/block_store.py

The first engine computes a prompt, and saves its blocks when the request ends. The second engine, which may run in any
process that reaches the dictionary, finds them, and begins after them. A store in front of Redis or of a file server
has the same six methods.
"""

import json
import sys
import threading
from multiprocessing.managers import BaseManager

from tokenizers import Tokenizer

from batch_manager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    Parts,
    SchedulerPolicy,
    TrtGptModelOptionalParams,
    TrtGptModelType,
)

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 24


class Blocks:
    """The dictionary, in the other process: the newest blocks. Each call of a proxy is a call of a method."""

    def __init__(self, most):
        self._most, self._contents, self._lock = most, {}, threading.Lock()

    def keys(self):
        return {block.key for block in list(self._contents)}

    def get(self, block):
        return self._contents.get(block)    # compares key, parent and tokens

    def put(self, block, content):
        with self._lock:
            self._contents[block] = content
            while len(self._contents) > self._most:
                del self._contents[next(iter(self._contents))]


class SharedStore:
    """A batch_manager.BlockStore. `blocks` is a proxy of Blocks."""

    def __init__(self, blocks):
        self._blocks, self._known = blocks, blocks.keys()

    def count(self, blocks):
        """Called by the worker, so it asks no other process. A block that has gone meanwhile is missed when loaded."""
        return next((place for place, block in enumerate(blocks) if block.key not in self._known), len(blocks))

    def load(self, blocks, buffers):
        for place, (block, buffer) in enumerate(zip(blocks, buffers)):
            content = self._blocks.get(block)
            if content is None or len(content) != len(buffer):
                self._known.discard(block.key)
                return place
            buffer[:] = content
        return len(blocks)

    def save(self, block, content):
        self._blocks.put(block, bytes(content))
        self._known.add(block.key)

    def figures(self):
        return {"Shared Blocks": len(self._known)}

    def close(self):
        pass

    def refresh(self):
        """Called every few seconds: what have other engines saved?"""
        self._known = self._blocks.keys()


class OtherProcess(BaseManager):
    """Starts the process with the dictionary. With an address and an authkey, engines elsewhere connect to it."""


OtherProcess.register("Blocks", Blocks)


def answer(model, store, prompt):
    """Run an engine for one prompt. Returns (tokens of the output, the engine's last statistics)."""
    pending, outputs, statistics = [InferenceRequest(1, {"input_ids": prompt, "request_output_len": 8})], [], []
    ended = threading.Event()

    def get_inference_requests(max_num_requests):
        taken, pending[:] = pending[:], []
        return taken

    def send_response(request_id, tensors, final_response, error_message):
        outputs.append(error_message or tensors[0].array[0, 0, len(prompt):].tolist())
        ended.set()

    with GptManager(model, TrtGptModelType.InflightFusedBatching, 1, SchedulerPolicy.MAX_UTILIZATION,
                    get_inference_requests, send_response, None, statistics.append,
                    TrtGptModelOptionalParams(kv_cache_config=KvCacheConfig(
                        enable_block_reuse=True, tokens_per_block=32, host_cache_size=64 << 20),
                        flush_stats_when_idle=True), parts=Parts(block_store=store)):
        ended.wait(120)
    return outputs[0], json.loads(statistics[-1])


def main():
    model = sys.argv[1] if len(sys.argv) > 1 else f"{sys.path[0]}/models/austen-4m"
    prompt = Tokenizer.from_file(f"{model}/tokenizer.json").encode(PROMPT).ids
    with OtherProcess() as process:
        blocks = process.Blocks(10_000)
        for name in ("first", "second"):
            output, figures = answer(model, SharedStore(blocks), prompt)
            num_loaded = figures["External Hit Tokens"]
            print(f"{name} engine: {len(prompt)} tokens, of which {num_loaded} came from the store. "
                  f"It has {len(blocks.keys())} blocks now. Output: {output}")


if __name__ == "__main__":
    main()
