"""NVIDIA Dynamo's indexer of KV events follows the prefix cache of an engine, as it follows vLLM's.

    python -m venv DYNAMO && DYNAMO/bin/pip install --no-deps ai-dynamo-runtime
    python -m tests.campaigns.foreign_subscriber --python DYNAMO/bin/python [--requests 400] [--layout mixed]

The indexer is a program of its own (`python -m dynamo.indexer`), on a CPU. It registers when the engine has served some
requests, so it has to ask for the batches before. The engine has few blocks and host blocks: blocks move to the host,
come back and are evicted. Every 20 requests the indexer must have the blocks of `kv_snapshot`, in the pool
and on the host, and find as much of a prompt as the engine does. Exit status 1: it had not within 20 seconds.
"""

import argparse
import json
import subprocess
import sys
import time
from random import Random
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

SIZE, TIERS = 16, {0: "device", 1: "host_pinned"}
LOCAL = "tcp://127.0.0.1:*"


class Indexer:
    """The program, and what it says."""

    def __init__(self, python: str) -> None:
        from tests.harness.ports import free_port

        port = free_port()
        self._address = f"http://127.0.0.1:{port}"
        self._process = subprocess.Popen([python, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"],
                                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(self._address + path, data, {"content-type": "application/json"}), timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def is_up(self) -> bool:
        try:
            self.ask("/health")
        except URLError:
            return False
        return True

    def blocks(self) -> set[tuple[str, int]]:
        """Return (tier, name) of all blocks that it knows."""
        return {(event["storage_tier"], block["block_hash"])
                for event in self.ask("/dump")["m:default"]["events"]
                for block in event["event"]["data"]["stored"]["blocks"]}

    def num_found(self, prompt: list[int]) -> int:
        found = self.ask("/query", {"token_ids": prompt, "model_name": "m"})["instances"]
        return found["1"]["longest_matched"] if found else 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> int:
    from batch_manager import KvCacheConfig, kv_block_hashes
    from batch_manager.extras.kv_events import KvEventPublisher
    from tests.harness.client import Client
    from tests.harness.requests import request
    from tests.harness.waiting import until
    from tests.harness.world import make_manager

    parser = argparse.ArgumentParser()
    parser.add_argument("--python", required=True, help="an interpreter with ai-dynamo-runtime")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--layout", default="arrays", help="arrays or mixed; it does not read maps")
    options, draw, client, key = parser.parse_args(), Random(0), Client(), b"key"
    publisher = KvEventPublisher(LOCAL, replay_endpoint=LOCAL, layout=options.layout)
    manager = make_manager(client, backend={"tokens_per_block": SIZE, "num_blocks": 40, "host_blocks": 12},
                           parts={"kv_events": publisher}, kv_cache_config=KvCacheConfig(
                               enable_block_reuse=True, host_cache_size=1, event_hash_key=key, event_tokens=True))
    indexer, prompts, num_known, num_compared = Indexer(options.python), [], 0, 0
    trunks = [[draw.randrange(1000) for _ in range(120)] for _ in range(6)]
    try:
        until(indexer.is_up)
        for number in range(options.requests):
            prompts.append([*draw.choice(trunks)[:draw.randrange(120)],
                            *[draw.randrange(1000) for _ in range(draw.randrange(1, 60))]])
            client.pending.append(request(number, prompts[-1], draw.randrange(1, 30)))
            manager.notify()
            client.wait_for_finals(number)
            if number == 5:
                indexer.ask("/register", {"instance_id": 1, "endpoint": publisher.addresses[0], "block_size": SIZE,
                                          "replay_endpoint": publisher.addresses[1], "model_name": "m"})
                time.sleep(1)                                       # a subscription takes a moment
            if number % 20 != 19:
                continue
            known = {(TIERS[block.cache_level], block.block_hash)
                     for event in manager.kv_snapshot() for block in event.blocks if block.is_full}
            until(lambda known=known: indexer.blocks() == known, 20)
            names = {name for _, name in known}
            for prompt in prompts[-20:]:
                hashes = kv_block_hashes(prompt, SIZE, event_hash_key=key)
                num_right = next((place for place, name in enumerate(hashes) if name not in names), len(hashes))
                found = indexer.num_found(prompt)
                in_pool = next((place for place, name in enumerate(hashes) if ("device", name) not in known),
                               len(hashes))
                assert found in (in_pool * SIZE, num_right * SIZE), f"{found} tokens, not {num_right} blocks"
                num_compared += 1
            num_known += len(known)
    finally:
        indexer.close()
        manager.shutdown(timeout=20)
        publisher.close()
    print(f"{options.requests} requests, {publisher._next} batches: {num_known:,} blocks in "
          f"{options.requests // 20} comparisons and {num_compared} prompts, all as the engine has them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
