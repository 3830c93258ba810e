"""C12, C13: a prompt computed in one engine is continued by another with the same tokens, whatever happens between."""

import socket
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from batch_manager import (
    ConfigError,
    ContextPhaseParams,
    InvalidRequestError,
    KvCacheConfig,
    KvTransferConfig,
    RequestType,
    TrtGptModelType,
    resume,
)
from batch_manager.parallel import block_exchange
from batch_manager.parallel.channel import _CHECKSUMS, HEADER_SIZE
from batch_manager.requests.context_phase import MOST_BYTES

SIZE = 4
PROMPT = list(range(100, 141))                                     # ten full blocks and one token


class Pair:
    """Two worlds: `prefill` computes prompts, `decode` goes on."""

    def __init__(self, make_world, new_request, prefill=None, decode=None, **options):
        self.trace = trace = []

        def make(role, own):
            kv = {"enable_block_reuse": True, "host_cache_size": 1, **own.pop("kv", {})}
            backend = {"num_blocks": 60, "tokens_per_block": SIZE, "host_blocks": 48, **own.pop("backend", {})}
            transfer = KvTransferConfig(role=role, **own.pop("transfer", {}))
            return make_world(kv_cache_config=KvCacheConfig(**kv), backend=backend, kv_transfer_config=transfer,
                              parts={"trace": trace.append}, **options, **own)
        self.prefill, self.decode = make("producer", prefill or {}), make("consumer", decode or {})
        self.new_request = new_request

    def both(self, is_done):
        """Run both engines until `is_done` returns true."""
        until = time.monotonic() + 30
        while not is_done():
            assert time.monotonic() < until
            if not (self.prefill.step() or self.decode.step()):
                time.sleep(0.001)

    def ask(self, world, request_id, *args, **options):
        world.client.pending.append(self.new_request(request_id, *args, **options))
        self.both(lambda: world.client.responses[request_id] and world.client.responses[request_id][-1].final)
        return world.client.final(request_id)

    def context(self, request_id=1, prompt=PROMPT, count=5, **options):
        final = self.ask(self.prefill, request_id, prompt, count, request_type="context_only", **options)
        assert not final.error and final.tokens() == prompt + self.prefill.expected(prompt, 1)
        assert final.names[-1] == "context_phase_params"
        return final.tensors["context_phase_params"]

    def go_on(self, params, request_id=1, prompt=PROMPT, count=5, **options):
        """Return the number of prompt tokens that the second engine computes."""
        del self.trace[:]
        final = self.ask(self.decode, request_id, prompt, count, request_type="generation_only",
                         context_phase_params=params, **options)
        assert not final.error and final.tokens() == prompt + self.decode.expected(prompt, count)
        return sum(size for iteration in self.trace for *_, size in iteration.context)

    def figures(self):
        return self.prefill.loop.stored.figures(), self.decode.loop.stored.figures()

    def close(self):
        """Nothing is held any more once tickets have lapsed, and both engines are empty."""
        self.prefill.clock.now += 1000
        self.both(lambda: not (self.figures()[0]["Held Transfer Blocks"]
                               or self.decode.loop.stored._num_reserved_for_loads))
        for world in (self.prefill, self.decode):
            world.run()
            assert world.loop.kv.cache.host._reserved == set()
            world.loop.stored.close()


@pytest.fixture
def pair(make_world, new_request):
    pairs = []

    def make(**options):
        pairs.append(Pair(make_world, new_request, **options))
        return pairs[-1]
    yield make
    for each in pairs:
        each.close()


def test_a_prompt_is_computed_in_one_engine_and_continued_in_another(pair):
    both = pair()
    params = both.context()
    where = ContextPhaseParams.of(np.array(params))
    assert where.num_tokens == 40 and where.host == "127.0.0.1"
    assert both.go_on(params) == 1, "the last token is always computed"
    prefill, decode = both.figures()
    assert prefill["Context Only Requests"] == decode["Generation Only Requests"] == 1
    assert decode["KV Transfer Bytes"] >= 10 * SIZE * 4 and decode["KV Transfer Fallbacks"] == 0
    assert (decode["External Lookup Tokens"], decode["External Hit Tokens"]) == (41, 40)
    both.both(lambda: both.figures()[0]["KV Transfer Bytes"] == decode["KV Transfer Bytes"])
    assert both.figures()[0]["Held Transfer Blocks"] == 0
    assert both.go_on(params, 2, [*PROMPT[:20], *PROMPT]) == 41, "other blocks than those of the ticket"
    assert both.figures()[1]["KV Transfer Fallbacks"] == 1
    assert both.go_on(both.context(3), 3) == 1, "all blocks are there, and the ticket is given back"
    both.both(lambda: both.figures()[0]["Held Transfer Blocks"] == 0)
    assert both.go_on(both.context(4, [5, 6, 7]), 4, [5, 6, 7]) == 3, "no full block"
    assert not both.prefill.loop.stored._held._held, "nothing is held for a prompt without a full block"
    mixed = both.ask(both.decode, 5, PROMPT, 3)
    assert mixed.tokens() == PROMPT + both.decode.expected(PROMPT, 3), "ordinary requests go on as ever"


@pytest.mark.parametrize("options", [
    {"cache_salt": "a"}, {"input_token_extra_ids": [7] * 41}, {"streaming": True}, {"return_log_probs": True},
    {"return_perf_metrics": True}, {"priority": 1.0}], ids=lambda options: next(iter(options)))
def test_options_of_requests(pair, options):
    both = pair()
    if "streaming" in options:
        final = both.ask(both.prefill, 1, PROMPT, 5, request_type=RequestType.CONTEXT_ONLY, **options)
        params = final.tensors["context_phase_params"]
        final = both.ask(both.decode, 1, PROMPT, 5, request_type=RequestType.GENERATION_ONLY,
                         context_phase_params=params, **options)
        parts = [part.tokens() for part in both.decode.client.responses[1]]
        assert sum(parts, []) == both.decode.expected(PROMPT, 5), "the first token is streamed, too"
        return
    assert both.go_on(both.context(**options), **options) == 1
    other = {"cache_salt": "b", "input_token_extra_ids": [8] * 41}
    changed = {name: other[name] for name in options if name in other}
    if changed:
        assert both.go_on(both.context(2, **options), 2, **changed) == 41, "not its blocks"


@pytest.mark.parametrize("prefill, decode, computed", [
    ({"backend": {"host_blocks": 8}}, {}, 41 - 4 * SIZE),                      # half of them wait for consumers
    ({}, {"backend": {"host_blocks": 6}}, 41 - 3 * SIZE),
    ({"backend": {"key": 5}}, {}, 41), ({}, {"transfer": {"peers": ("example.org",)}}, 41),
    ({"transfer": {"timeout_s": 1}}, {}, 41)], ids=["room here", "room there", "model", "peer", "lapsed"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_does_not_come_is_computed_or_fails_the_request(pair, prefill, decode, computed, policy):
    transfer = {"load_failure_policy": policy, **decode.get("transfer", {})}
    both = pair(prefill={**prefill}, decode={**decode, "transfer": transfer})
    params = both.context() if "key" not in prefill.get("backend", {}) else both.ask(
        both.prefill, 1, PROMPT, 5, request_type="context_only").tensors["context_phase_params"]
    both.prefill.clock.now += 2
    both.prefill.step()
    if policy == "recompute":
        assert both.go_on(params) == computed
    else:
        final = both.ask(both.decode, 1, PROMPT, 5, request_type="generation_only", context_phase_params=params)
        assert final.code == "KV_TRANSFER_FAILED" and " of 10 blocks of the prompt are here: th" in final.error
        assert len(both.decode.client.responses[1]) == 1
    assert both.figures()[1]["KV Transfer Fallbacks"] == 1


def test_a_ticket_works_once_and_the_oldest_lapse_when_there_is_no_room(pair):
    both = pair(prefill={"backend": {"host_blocks": 24}})
    first, second = both.context(1), both.context(2, PROMPT[::-1])
    assert both.figures()[0]["Held Transfer Blocks"] == 10, "two do not fit into half of 24"
    assert both.go_on(second, 2, PROMPT[::-1]) == 1 and both.go_on(first, 1) == 41
    assert both.go_on(second, 3, [1, *PROMPT[::-1]]) == 42
    assert both.figures()[1]["KV Transfer Fallbacks"] == 2


def test_requests_that_begin_alike_get_their_blocks_at_once(pair):
    both = pair(decode={"transfer": {"load_failure_policy": "fail"}})
    prompts = [PROMPT, [*PROMPT[:21], 1, 2, 3, 4, 5], PROMPT[:30]]
    params = [both.context(number, prompt) for number, prompt in enumerate(prompts)]
    client = both.decode.client
    client.pending += [both.new_request(number, prompt, 5, request_type="generation_only",
                                        context_phase_params=params[number]) for number, prompt in enumerate(prompts)]
    both.both(lambda: all(client.finals(number) for number in range(3)))
    for number, prompt in enumerate(prompts):
        final = client.final(number)
        assert not final.error and final.tokens() == prompt + both.decode.expected(prompt, 5)


def test_a_stopped_and_a_late_request_end_while_their_blocks_are_fetched(pair):
    both = pair(decode={"transfer": {"load_timeout_s": 3}})
    params = both.context()
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        elsewhere = replace(ContextPhaseParams.of(np.array(params)), port=silent.getsockname()[1]).to_array()
        client = both.decode.client
        for number, options in ((1, {}), (2, {"deadline_s": 1.0}), (3, {})):
            client.pending.append(both.new_request(number, PROMPT, 5, request_type="generation_only",
                                                   context_phase_params=elsewhere, **options))
        both.decode.step(2)
        assert both.decode.loop.health()["queued_requests"] == 3
        client.stops = {1}
        both.decode.clock.now += 1.5
        both.decode.step()
        assert client.final(1).finish_reason == 5 and client.final(2).code == "DEADLINE"
        both.decode.clock.now += 2
        both.decode.run()
        assert client.final(3).tokens() == PROMPT + both.decode.expected(PROMPT, 5), "it does not wait any longer"
        began = time.monotonic()
        both.decode.loop.stored.close()
        assert time.monotonic() - began < 2, "nobody waits for the silent engine"


@contextmanager
def altered(change):
    """Every byte string that an engine sends passes through `change(data)`, which may raise."""
    send = block_exchange._Timed.send

    def sent(transport, data):
        send(transport, change(data))
        return len(data)
    block_exchange._Timed.send = sent
    try:
        yield
    finally:
        block_exchange._Timed.send = send


FAULTS = ("cut", "closed", "flipped header", "flipped content", "twice")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("frame", [0, 1, 4, 10, 11])                # FETCH, the first, a middle and the last BLOCK, END
def test_a_fault_in_any_frame_costs_the_rest_of_the_blocks_and_no_token(pair, monkeypatch, fault, frame):
    monkeypatch.setattr(block_exchange, "SECONDS_TO_ASK", 0.2)
    both = pair()
    params, count = both.context(), []

    def change(data):
        count.append(1)
        if len(count) != frame + 1:
            return data
        if fault == "closed":
            raise BrokenPipeError
        if fault == "cut":
            return data[:len(data) // 2]
        if fault == "twice":
            return data * 2
        place = len(data) - 1 if fault == "flipped content" and len(data) > HEADER_SIZE else _CHECKSUMS.size
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1:]

    with altered(change):
        computed = both.go_on(params)
    assert 1 <= computed <= 41 if frame or fault == "twice" else computed == 41
    assert both.figures()[1]["KV Transfer Fallbacks"] == (computed > 1)
    assert both.go_on(both.context(2, PROMPT[::-1]), 2, PROMPT[::-1]) == 1, "the next one is whole"


def test_guesses_and_strangers_get_nothing(pair):
    both = pair()
    where = ContextPhaseParams.of(np.array(both.context()))
    assert both.go_on(replace(where, ticket=bytes(16)).to_array()) == 41
    for data in (b"", b"GET / HTTP/1.0\r\n\r\n", b"BMrk" + bytes(60), np.random.default_rng(0).bytes(5000)):
        with socket.create_connection((where.host, where.port)) as stranger:
            stranger.sendall(data)
            stranger.settimeout(5)
            stranger.shutdown(socket.SHUT_WR)
            try:
                assert not stranger.recv(1000)
            except ConnectionResetError:
                continue
    assert both.go_on(where.to_array(), 2, PROMPT) == 1 and both.figures()[1]["KV Transfer Fallbacks"] == 1


def test_silent_connections_hold_nobody_up(pair):
    both = pair()
    where = ContextPhaseParams.of(np.array(both.context()))
    with ExitStack() as silent:
        for _ in range(3 * block_exchange.MOST_CONNECTIONS):
            silent.enter_context(socket.create_connection((where.host, where.port)))
        assert both.go_on(where.to_array()) == 1 and both.figures()[1]["KV Transfer Fallbacks"] == 0


def test_context_phase_params_of_any_bytes_are_a_refusal(new_request):
    good = ContextPhaseParams("10.0.0.1", 65535, bytes(range(16)), 2**32 - 1)
    array = good.to_array()
    assert ContextPhaseParams.of(array) == good == ContextPhaseParams.of_json(good.to_json() | {"other": 1})
    draw = np.random.default_rng(0)
    wrong = [array[:end] for end in range(len(array))] + [np.append(array, 0), np.zeros(MOST_BYTES + 1, np.uint8)]
    for place in range(len(array)):
        wrong.append(array.copy())
        wrong[-1][place] ^= 1 << draw.integers(8)
    wrong += [draw.integers(0, 256, draw.integers(1, MOST_BYTES)) for _ in range(200)]
    wrong += [array.astype(np.int64) + 256, -array.astype(np.int64)]
    for values in wrong:
        with pytest.raises(InvalidRequestError, match="context_phase_params"):
            ContextPhaseParams.of(values)
    for values, fact in ((None, "of type NoneType"), (array.tolist(), "of type list"), (5, "5"),
                         (array.tobytes(), "of type bytes and length 4"), (array.astype(float), "an array of float64")):
        with pytest.raises(InvalidRequestError, match=f"context_phase_params is {fact}"):
            ContextPhaseParams.of(values)
    for values in (None, [], "x", 5):
        with pytest.raises(InvalidRequestError, match="kv_transfer_params are .*; expected a mapping"):
            ContextPhaseParams.of_json(values)
    for name, value in (("host", ""), ("host", "é"), ("host", "a" * 256), ("host", 5), ("port", 0), ("port", 65536),
                        ("port", True), ("port", "80"), ("ticket", b"x"), ("ticket", bytes(17)), ("ticket", "x" * 16),
                        ("num_tokens", -1), ("num_tokens", 2**32), ("num_tokens", 1.0)):
        with pytest.raises(InvalidRequestError, match=f"ContextPhaseParams.{name} is .*; expected ") as raised:
            replace(good, **{name: value})
        assert "xxx" not in str(raised.value) and r"\x00" not in str(raised.value), "a ticket is secret"
    for name, value in (("remote_host", ""), ("remote_host", "é"), ("remote_host", 5), ("remote_port", 0),
                        ("remote_port", True), ("remote_port", "80"), ("remote_request_id", "AB" * 16),
                        ("remote_request_id", "ab"), ("remote_request_id", " ".join(["ab"] * 16)),
                        ("remote_request_id", None), ("remote_num_tokens", -1), ("remote_num_tokens", 2**40)):
        with pytest.raises(InvalidRequestError, match="kv_transfer_params"):
            ContextPhaseParams.of_json(good.to_json() | {name: value})


PARAMS = ContextPhaseParams("127.0.0.1", 1, bytes(16), 0).to_array()


@pytest.mark.parametrize("role, options, text", [
    (None, {"request_type": "context_only"}, "this engine has no kv_transfer_config"),
    ("consumer", {"request_type": "context_only"}, "the role 'consumer'"),
    ("producer", {"request_type": "generation_only", "context_phase_params": PARAMS}, "the role 'producer'"),
    ("both", {"request_type": "generation_only"}, "context_phase_params is missing"),
    ("both", {"context_phase_params": PARAMS}, "'context_and_generation' and context_phase_params is set"),
    ("both", {"request_type": "context_only", "context_phase_params": PARAMS}, "context_phase_params is set"),
    ("both", {"request_type": "context_only", "return_context_logits": True}, "return_context_logits"),
    ("both", {"request_type": "context-only"}, "it must be one of context_and_generation, context_only"),
    ("both", {"request_type": 1}, "request_type is of type int")])
def test_requests_that_are_refused(make_world, new_request, role, options, text):
    transfer = None if role is None else KvTransferConfig(role=role)
    world = make_world(kv_cache_config=KvCacheConfig(enable_block_reuse=True, host_cache_size=1),
                       backend={"tokens_per_block": SIZE, "host_blocks": 8}, kv_transfer_config=transfer)
    world.client.pending.append(new_request(1, PROMPT, 5, **options))
    world.run()
    final = world.client.final(1)
    assert final.code == "INVALID_REQUEST" and text in final.error
    if world.loop.stored is not None:
        world.loop.stored.close()


@pytest.mark.parametrize("options, text", [
    ({"kv_transfer_config": "producer"}, "kv_transfer_config is of type str"),
    ({"kv_cache_config": KvCacheConfig()}, "enable_block_reuse=False"),
    ({"kv_cache_config": KvCacheConfig(enable_block_reuse=True, max_attention_window=8, sink_token_length=4)},
     "sink_token_length=4"),
    ({"backend": {"host_blocks": 0}, "kv_cache_config": KvCacheConfig(enable_block_reuse=True)},
     "kv_transfer_config is set; the backend has no blocks in host memory"),
    ({"model_type": TrtGptModelType.V1}, "kv_transfer_config is set with TrtGptModelType.V1"),
    ({"kv_transfer_config": KvTransferConfig(host="203.0.113.7")}, "no one can listen there")])
def test_engines_that_are_refused(make_world, options, text):
    with pytest.raises(ConfigError, match=text):
        make_world(**{"kv_cache_config": KvCacheConfig(enable_block_reuse=True, host_cache_size=1),
                      "backend": {"host_blocks": 4}, "kv_transfer_config": KvTransferConfig(), **options})


def test_a_request_of_another_engine_is_resumed_as_an_ordinary_one(new_request):
    asked = new_request(1, PROMPT, 5, request_type="generation_only", context_phase_params=PARAMS)
    assert resume(asked, []).request_type == "generation_only"
    left = resume(asked, [4, 5])
    assert left.request_type is RequestType.CONTEXT_AND_GENERATION and left.context_phase_params is None


@pytest.mark.parametrize("seed", range(2))
def test_under_pressure_each_request_has_one_final_and_its_tokens(pair, monkeypatch, seed):
    """Little room in both engines, stops, lost and damaged frames, tickets that lapse and that are used twice."""
    monkeypatch.setattr(block_exchange, "SECONDS_TO_ASK", 0.05)
    monkeypatch.setattr(block_exchange, "SECONDS_WITHOUT_PROGRESS", 0.05)
    draw = Random(seed)
    own = {"backend": {"num_blocks": 24, "host_blocks": 22, "is_asynchronous": seed > 0}}
    both = pair(prefill={**own, "transfer": {"timeout_s": 3}},
                decode={**own, "transfer": {"load_timeout_s": 1}}, max_batch_size=3)
    trunks = [[number] * 16 for number in range(4)]
    prompts = [[*draw.choice(trunks), *[draw.randrange(50) for _ in range(draw.randrange(1, 24))]] for _ in range(30)]
    lengths, stopped = [draw.randrange(1, 9) for _ in prompts], set()

    def damaged(data):
        kind = draw.random()
        if kind < 0.01:
            raise BrokenPipeError
        place = draw.randrange(len(data))
        return data if kind > 0.03 else data[:place] + bytes([data[place] ^ 1]) + data[place + 1:]

    def ask(world, number, kind, **options):
        world.client.pending.append(both.new_request(number, prompts[number], lengths[number], request_type=kind,
                                                     **options))
    params, asked, num_begun = [], set(), 0
    with altered(damaged):
        until = time.monotonic() + 60
        while len(both.decode.client.responses) < len(prompts):
            assert time.monotonic() < until
            if num_begun < len(prompts) and num_begun - len(both.decode.client.responses) < 5:
                ask(both.prefill, num_begun, "context_only")
                num_begun += 1
            both.prefill.step()
            both.decode.step()
            both.prefill.clock.now += 0.002
            both.decode.clock.now += 0.002
            time.sleep(0.001 if len(both.decode.loop.stored) else 0)
            for number in both.prefill.client.responses.keys() - asked:
                params.append(both.prefill.client.final(number).tensors["context_phase_params"])
                asked.add(number)
                ask(both.decode, number, "generation_only",
                    context_phase_params=draw.choice(params) if draw.random() < 0.2 else params[-1])
                if draw.random() < 0.2:
                    stopped.add(number)
                    both.decode.client.stops = set(stopped)
        both.decode.run()
    for number, prompt in enumerate(prompts):
        responses = both.decode.client.responses[number]
        final = responses[-1]
        assert len(responses) == 1 and final.final and not final.error
        tokens = final.tokens()
        assert tokens == prompt + both.decode.expected(prompt, len(tokens) - len(prompt))
        assert len(tokens) == len(prompt) + lengths[number] or number in stopped and final.finish_reason == 5
