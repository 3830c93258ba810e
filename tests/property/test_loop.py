"""Random streams of requests run through the whole loop, with all KV cache options and faults. Each request gets the
output that the oracle expects.

A seed chooses one engine and one stream: `Stream(seed, build_world).run()`. 70 seeds run here.
In its longest run, tests/campaigns/random_streams.py ran 1,715 seeds.
"""

import random
from collections import Counter

import numpy as np
import pytest

from batch_manager import InferenceRequest, KvCacheConfig, SchedulerPolicy, TrtGptModelType
from batch_manager.handover import RowFailure
from batch_manager.names import ErrorCode, FinishReason
from batch_manager.scheduling.interfaces import RequestScheduler, SchedulerOutput
from batch_manager.scheduling.policies import make_scheduler
from batch_manager.testing.scripted_backend import ScriptedBackend

VOCAB = 97
MAX_SEQ_LEN = 96
NATURAL = {FinishReason.END_ID, FinishReason.LENGTH}


class Fickle(RequestScheduler):
    """A scheduler whose plans are valid: another scheduler's plans, with random requests left out or paused."""

    def __init__(self, limits, kv_cache_manager, draw):
        self.scheduler = make_scheduler(limits, kv_cache_manager)
        self.kv, self.draw = kv_cache_manager, draw

    def schedule_request(self, active_requests, inflight_request_ids):
        plan = self.scheduler.schedule_request(active_requests, inflight_request_ids)
        sizes = plan.chunk_sizes
        if sizes is None:
            sizes = [request.remaining_context for request in plan.context_requests]
        rows = [*zip(plan.context_requests, sizes), *((request, 0) for request in plan.generation_requests)]
        kept = [row for row in rows if self.draw.random() < 0.8] or rows[:1]
        running = {request.request_id for request, _ in kept} | {request.request_id for request in plan.paused_requests}
        paused = [request for request in active_requests
                  if self.kv.owns(request) and not request.is_finished and self.draw.random() < 0.03
                  and request.request_id not in running and request.request_id not in inflight_request_ids]
        return SchedulerOutput(
            context_requests=[request for request, size in kept if size],
            generation_requests=[request for request, size in kept if not size],
            paused_requests=[*plan.paused_requests, *paused],
            chunk_sizes=[size for _, size in kept if size])


class Stream:
    """One engine and one stream of requests, chosen by a seed.

    seen   counts of events
    """

    def __init__(self, seed: int, build_world) -> None:
        self.draw = draw = random.Random(seed)
        self.seen: Counter[str] = Counter()
        self.is_static = draw.random() < 0.1
        self.requests = self._requests()
        self.deadlines = {i: draw.uniform(0.1, 5) for i in self.requests if draw.random() < 0.06}
        self.broken = {i for i in self.requests if draw.random() < 0.04}
        self.not_finite = {i: draw.randrange(8) for i in self.requests if draw.random() < 0.06}
        self.stopped: set[int] = set()
        self.owners: dict[int, dict[int, int]] = {}
        self.steps_of: Counter[int] = Counter()
        self.hiccups = draw.choice([0, 0, 0.05, 0.3])
        self.world = self._world(build_world)

    # random choices

    def _requests(self) -> dict[int, dict]:
        """Return requests whose prompts often have common prefixes."""
        draw = self.draw
        trunks = [[draw.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        requests = {}
        for i in range(draw.randrange(3, 26)):
            length = draw.randrange(1, 50)
            shared = min(draw.choice([0, length - 1, length, draw.randrange(length + 1)]), length)
            prompt = draw.choice(trunks)[:shared] + [draw.randrange(VOCAB) for _ in range(length - shared)]
            requests[i] = {
                "prompt": prompt, "count": draw.choice([1, 2, draw.randrange(1, 40)]),
                "seed": draw.choice([None, None, draw.randrange(2**64)]), "end_id": draw.choice([-1, 5, 6]),
                "salt": draw.choice([None, None, None, "a", b"a"]), "streaming": draw.random() < 0.3,
                "logits": draw.random() < 0.1, "priority": draw.choice([0.5, 0.5, 0.5, 0.9, 0.1])}
        return requests

    def _world(self, build_world):
        draw, requests = self.draw, self.requests
        size = draw.choice([1, 2, 3, 4, 8])
        window = draw.choice([None, None, draw.randrange(1, 40)])
        sink = 0 if window is None else draw.choice([0, 0, 1, size, size + 1])
        has_sink = sink > 0
        longest = max(len(r["prompt"]) + r["count"] for r in requests.values())
        worst = -(-longest // size) + (-(-sink // size) + 1 if has_sink else 0)
        chunked = not self.is_static and draw.random() < 0.5
        overlap = not self.is_static and draw.random() < 0.4
        ahead = not self.is_static and not overlap and draw.random() < 0.6
        tokens = draw.choice([size, 2 * size, 3 * size + 1, 40]) if chunked else longest + draw.choice([0, 7, 60])
        reuse = draw.random() < 0.8
        host_blocks = draw.choice([0, 0, 1, 3, 20]) if reuse and not has_sink and not self.is_static else 0
        is_late = draw.random() < 0.6
        # A fault in `finish` spoils blocks when the step is read. A device cannot do that if the next step already ran.
        hooks = ["on_step"] if ahead and not is_late else ["on_step", "on_finish"]
        backend = ScriptedBackend(
            is_asynchronous=is_late, vocab_size=VOCAB, max_seq_len=MAX_SEQ_LEN,
            num_blocks=worst + draw.choice([0, 1, 2, 5, 20, 80]),
            tokens_per_block=size, num_slots=2, window=window, sink=sink,
            **({"host_blocks": host_blocks} if host_blocks else {}),
            **{draw.choice(hooks): self._fault})
        self.backend = backend
        start = backend.start

        def note_owners(batch):
            self.owners.setdefault(batch.iteration, {r.seq_slot: r.request_id for r in self.world.loop.active})
            return start(batch)

        backend.start = note_owners
        parts = {}
        if not self.is_static and draw.random() < 0.25:
            def fickle(limits, kv_cache_manager):
                return Fickle(limits, kv_cache_manager, draw)

            fickle.plans_by_lengths = True
            parts["scheduler"] = fickle
        self.longest, self.chunked = longest, chunked
        return build_world(
            backend=backend, policy=draw.choice(list(SchedulerPolicy)),
            model_type=TrtGptModelType.V1 if self.is_static else TrtGptModelType.InflightFusedBatching,
            max_batch_size=draw.choice([1, 2, 3, 8]), max_num_tokens=max(tokens, size), parts=parts,
            max_num_sequences=draw.choice([None, 1, 4, 16, -1]),
            enable_chunked_context=chunked, enable_trt_overlap=overlap, run_ahead=ahead,
            kv_cache_config=KvCacheConfig(
                enable_block_reuse=reuse, max_attention_window=window, sink_token_length=sink,
                **({"host_cache_size": 1} if host_blocks else {})))

    def _fault(self, batch):
        owners = self.owners[batch.iteration]
        ids = {slot: owners[slot] for slot in batch.slots()}
        if batch.num_sequences > 1 and self.draw.random() < self.hiccups:
            self.seen["hiccups"] += 1
            raise RuntimeError("a step that would do alone")
        if not self.broken.isdisjoint(ids.values()):
            raise RuntimeError("a step that never does")
        planted = {}
        for slot, i in ids.items():
            self.steps_of[i] += 1
            if self.steps_of[i] > self.not_finite.get(i, 10**9):
                planted[slot] = RowFailure(ErrorCode.NON_FINITE_LOGITS, "planted")
        return planted

    # the run

    def run(self) -> None:
        draw, world = self.draw, self.world
        waiting = [self._item(i, r) for i, r in self.requests.items()]
        for _ in range(6000):
            if waiting and draw.random() < 0.5:
                count = draw.randrange(1, len(waiting) + 1)
                world.client.pending += waiting[:count]
                del waiting[:count]
            world.clock.now += draw.choice([0, 0.001, 0.1])
            if draw.random() < 0.03:
                stop = draw.randrange(len(self.requests))
                if not world.client.finals(stop):
                    self.stopped.add(stop)
                world.client.stops = {stop}
            world.step()
            world.client.stops = set()
            if not waiting and world.loop.is_empty and not world.client.pending:
                break
        else:
            raise AssertionError("still busy")
        assert world.loop.kv.used_blocks == 0 and world.loop.failure is None
        for i, r in self.requests.items():
            self._judge(i, r)
        self.seen["reused blocks"] = world.loop.kv.usage().reused_blocks
        self.seen["evicted blocks"] = world.loop.kv.usage().evicted_blocks
        self.seen["discarded tokens"] = world.loop.window.num_discarded_tokens
        self.seen["recomputed tokens"] = world.loop.timings.recomputed_tokens

    def _item(self, i: int, r: dict) -> InferenceRequest:
        tensors = {"input_ids": r["prompt"], "request_output_len": r["count"], "end_id": r["end_id"]}
        if r["seed"] is not None:
            tensors |= {"temperature": 0.7, "runtime_top_k": 5, "random_seed": r["seed"]}
        if r["logits"]:
            tensors["return_context_logits"] = True
        return InferenceRequest(i, tensors, is_streaming=r["streaming"], priority=r["priority"], cache_salt=r["salt"],
                                deadline_s=self.deadlines.get(i))

    def _judge(self, i: int, r: dict) -> None:
        client, prompt = self.world.client, r["prompt"]
        final = client.final(i)
        expected = self.backend.expected(prompt, r["count"], end_id=r["end_id"], random_seed=r["seed"])
        if r["streaming"]:
            got = client.streamed(i)
        else:
            tokens = final.tokens() if not final.error else prompt
            assert tokens[:len(prompt)] == prompt
            got = tokens[len(prompt):]
        assert got == expected[:len(got)], f"request {i}"
        self.seen["tokens"] += len(got)
        self.seen[final.code if final.error else FinishReason(final.finish_reason).name] += 1
        if final.error:
            allowed = {"DEADLINE": self.deadlines, "MODEL_ERROR": self.broken, "NON_FINITE_LOGITS": self.not_finite}
            assert i in allowed.get(final.code, ()), final.error
            return
        reason = FinishReason(final.finish_reason)
        if reason in NATURAL:
            assert got == expected
            assert reason is (FinishReason.LENGTH if len(expected) == r["count"] else FinishReason.END_ID)
            assert i not in self.broken and self.not_finite.get(i, 10**9) >= 1
        else:
            assert i in (self.stopped if reason is FinishReason.CANCELLED else self.deadlines)
        if r["logits"] and reason in NATURAL and not r["streaming"]:
            self.seen["context logits"] += 1
            rows = final.tensors["context_logits"][0]
            follow = [self.backend.expected(prompt[:n], 1, random_seed=r["seed"])[0] for n in range(1, len(prompt) + 1)]
            assert np.argmax(rows, axis=1).tolist() == follow


@pytest.mark.parametrize("seed", range(40))
def test_a_random_stream_gives_everybody_one_final_and_the_oracles_text(make_world, seed):
    Stream(seed, make_world).run()
