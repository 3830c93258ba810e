"""A draft model: with the key of the requests' model, a scripted one drafts right tokens only if its cache is right."""

import json
import random

import pytest

import batch_manager.build as build
from batch_manager import ConfigError, DeviceLostError, KvCacheConfig, SchedulerPolicy, SpeculativeConfig
from batch_manager.handover import RowFailure, SlotSetup
from batch_manager.kv.audit import audit
from batch_manager.kv.kv_cache_manager import KvCacheManager
from batch_manager.kv.window import AttentionWindow
from batch_manager.loop.draft_model import MOST_GROWN, DraftModel, room_for_drafts
from batch_manager.names import ErrorCode
from batch_manager.requests.llm_request import LlmRequest
from batch_manager.testing.scripted_backend import ScriptedBackend

UNIT, MOST, LENGTH = 8, 5, 1024
SEEN = [random.Random(1).randrange(1000) for _ in range(60)]      # prompts begin with some of these


def drafting(*, blocks=80, reuse=False, window=None, most_tokens=64, length=LENGTH, monotonic=lambda: 0.0, **backend):
    """Return a draft model on a scripted backend, the backend, and the accounting of its cache."""
    model = ScriptedBackend(num_blocks=blocks, tokens_per_block=UNIT, max_seq_len=length, window=window, **backend)
    room = room_for_drafts(AttentionWindow(window or length, length, UNIT))
    kv = KvCacheManager(blocks, UNIT, length, window=window, unread_steps=room.unread_steps,
                        max_draft_len=room.max_draft_len, enable_block_reuse=reuse)
    return DraftModel(model, kv, most_tokens, monotonic), model, kv


def serve(make_world, new_request, drafter, kv, requests, **options):
    """Run all requests, check their tokens, and return the last record."""
    world = make_world(parts={"drafter": drafter}, speculative_config=SpeculativeConfig("custom", MOST), **options)
    world.client.pending = [new_request(i, prompt, count, **({} if seed is None else {
        "temperature": 0.7, "runtime_top_k": 5, "random_seed": seed})) for i, (prompt, count, seed) in requests.items()]
    for _ in range(3000):
        busy = world.step()
        audit(kv)
        if not busy and world.loop.is_empty:
            break
    assert not world.client.pending and kv.used_blocks == 0 and not (drafter._of or drafter._setups or drafter._lost)
    for i, (prompt, count, seed) in requests.items():
        assert world.client.final(i).error == ""
        assert world.client.final(i).tokens()[len(prompt):] == world.expected(prompt, count, random_seed=seed), i
    return json.loads(world.client.stats[-1])


def some_requests(seed, count=11):
    draw = random.Random(seed)
    return {i: (SEEN[:draw.randrange(1, 60)] + [draw.randrange(1000) for _ in range(draw.randrange(30))],
                draw.randrange(1, 50), i if i % 2 else None) for i in range(1, count)}


@pytest.mark.parametrize(("policy", "is_asynchronous"), [*zip(SchedulerPolicy, (False, True))])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("reuse", [False, True])
def test_the_cache_of_a_draft_model_is_right(make_world, new_request, policy, window, reuse, is_asynchronous):
    """Chunks, pauses, reuse, windows; all drafts are right, though others of the same text were rejected before."""
    drafter, model, kv = drafting(reuse=reuse, window=window, is_asynchronous=is_asynchronous)
    engine = {"policy": policy, "backend": {"window": window, "num_blocks": 40}, "max_num_tokens": 48,
              "enable_chunked_context": True, "kv_cache_config": KvCacheConfig(
                  tokens_per_block=UNIT, enable_block_reuse=reuse, max_attention_window=window)}
    record = serve(make_world, new_request, drafter, kv, some_requests(3), **engine)
    assert record["Accepted Draft Tokens"] == record["Draft Tokens"] > 40
    assert "Failed propose Callbacks" not in record and not reuse or kv.usage().reused_blocks > 10

    wrong, model, kv = drafting(reuse=reuse, window=window, is_asynchronous=is_asynchronous)
    model.on_step = lambda batch: setattr(model, "key", model.num_steps % 3 % 2)     # every third step guesses wrongly
    record = serve(make_world, new_request, wrong, kv, some_requests(4), **engine)
    assert 10 < record["Accepted Draft Tokens"] < record["Draft Tokens"]


@pytest.mark.parametrize(("options", "fewest", "most"), [
    ({"blocks": 12}, 1, 250), ({"blocks": 1}, 0, 0), ({"length": 60}, 1, 250), ({"most_tokens": 8}, 1, 250)])
def test_what_does_not_fit_gets_no_drafts(make_world, new_request, options, fewest, most):
    """Too few blocks, texts longer than the draft model takes, prompts that are longer than a step of it."""
    drafter, _, kv = drafting(**options)
    record = serve(make_world, new_request, drafter, kv, some_requests(5))
    assert fewest <= record["Accepted Draft Tokens"] == record["Draft Tokens"] <= most
    assert "Failed propose Callbacks" not in record


def test_a_text_that_has_grown_by_far_starts_again(new_request):
    drafter, _, kv = drafting(reuse=True)
    oracle, prompt = ScriptedBackend(), SEEN[:30]
    text = prompt + oracle.expected(prompt, 2 * MOST_GROWN)

    request = LlmRequest(1, prompt, 3 * MOST_GROWN)
    request.seq_slot = 0
    drafter.set_up(request, SlotSetup())
    for length in (30, 33, 40, 41, 41 + MOST_GROWN, 50 + 2 * MOST_GROWN, 57 + 2 * MOST_GROWN):
        request.tokens = [text[:length]]
        for _ in range(5):                               # the draft model's steps have 64 tokens
            drafts, = drafter.propose([request], [4])
            if drafts:
                break
        assert list(drafts) == oracle.expected(text[:length], 4), length
        audit(kv)


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("fault", ["launch", "row", "poison"])
def test_a_failure_costs_drafts_and_no_request(make_world, new_request, fault, is_asynchronous):
    drafter, model, kv = drafting(is_asynchronous=is_asynchronous, reuse=True)
    failed = []

    def fail(batch):
        if model.num_steps % 7 or batch.num_sequences == 0:
            return None
        failed.append(batch)
        model.num_steps += 1
        if fault == "launch":
            raise MemoryError("planted")
        code = ErrorCode.NON_FINITE_LOGITS if fault == "poison" else ErrorCode.MODEL_ERROR
        return {batch.slots()[0]: RowFailure(code, "planted")}

    model.num_steps, model.on_step = 1, fail
    record = serve(make_world, new_request, drafter, kv, some_requests(6, 20), max_num_sequences=4)
    assert len(failed) > 1 and record.get("Failed propose Callbacks", 0) == (len(failed) if fault == "launch" else 0)
    assert record["Accepted Draft Tokens"] == record["Draft Tokens"] > 20
    assert record["Failed Steps"] == 0


def test_prompts_with_embeddings_of_their_own_get_no_drafts(make_world, new_client, new_request):
    drafter, _, kv = drafting()
    requests = [LlmRequest(i, [3, 4, token], 9) for i, token in enumerate((5, 1000))]
    for slot, request in enumerate(requests):
        request.seq_slot = slot
        drafter.set_up(request, SlotSetup())
    drafts = drafter.propose(requests, [3, 3])
    assert [len(found) for found in drafts] == [3, 0] and kv.held_blocks(requests[1]) == 0


def test_drafts_get_shorter_where_the_draft_model_is_slow(make_world, new_request):
    """Each step of both models advances the clock."""
    tokens = {}
    for seconds in (0.01, 0.7, 2.0):
        world = make_world(backend={"num_blocks": 80})
        drafter, model, kv = drafting(monotonic=world.clock.monotonic)
        world = make_world(clock=world.clock, parts={"drafter": drafter}, backend={"num_blocks": 80},
                           speculative_config=SpeculativeConfig("custom", MOST))
        for each, duration in ((model, seconds), (world.backend, 1.0)):
            each.on_step = lambda batch, clock=world.clock, more=duration: setattr(clock, "now", clock.now + more)
        world.client.pending = [new_request(1, [1, 2, 3], 200)]
        world.run()
        record = json.loads(world.client.stats[-1])
        assert world.client.final(1).tokens()[3:] == world.expected([1, 2, 3], 200)
        tokens[seconds] = record["Draft Tokens"]
        assert sum(json.loads(each)["Draft Time Microseconds"] for each in world.client.stats) > 0
    assert tokens[0.01] > tokens[0.7] > 20 > tokens[2.0] > 0


CONFIG = SpeculativeConfig("draft_model", MOST, model="somewhere")


@pytest.fixture
def two_models(monkeypatch):
    """make(model, draft model): what the engines of the test load, in place of checkpoints."""
    def make(model, draft):
        def load(arguments, parts, part=None):
            found = draft if arguments.model_path == "somewhere" else model
            if isinstance(found, Exception):
                raise found
            return found
        monkeypatch.setattr(build, "make_local_backend", load)
        monkeypatch.setattr(build, "_arguments_of_draft_model", lambda arguments, config: build.replace(
            arguments, model_path=config.model, max_draft_tokens=0,
            optional_params=build.replace(arguments.optional_params, speculative_config=None)))
        return model, draft
    return make


def test_the_draft_model_is_closed_with_the_engine(make_manager, new_client, new_request, two_models):
    for broken in (False, True):
        def lose(batch):
            raise DeviceLostError("planted", "lost", "")
        model, draft = two_models(ScriptedBackend(on_step=lose if broken else None), ScriptedBackend())
        client = new_client()
        client.pending = [new_request(1, [1, 2, 3], 30)]
        manager = make_manager(client, backend=model, speculative_config=CONFIG)
        client.wait_for_finals(1)
        assert not draft.closed
        manager.shutdown()
        assert draft.closed and model.closed
        if not broken:
            record = json.loads(client.stats[-1])
            assert record["Accepted Draft Tokens"] == record["Draft Tokens"] > 0
            assert record["Runtime CPU Memory Usage"] == 2 * model.memory_usage().cpu


@pytest.mark.parametrize(("model", "draft", "says"), [
    (ConfigError("planted", "error"), ScriptedBackend(), "planted"),
    (ScriptedBackend(), ConfigError("planted", "error"), "the draft model: planted; error"),
    (ScriptedBackend(), ScriptedBackend(vocab_size=999),
     "the draft model has 999 token ids and the model 1,000; a draft is a token of both; use a draft model of the")])
def test_an_engine_that_cannot_be_made_closes_its_draft_model(make_world, two_models, model, draft, says):
    two_models(model, draft)
    with pytest.raises(ConfigError, match=says):
        make_world(speculative_config=CONFIG, parts={"backend": None})
    assert [each.closed for each in (model, draft) if isinstance(each, ScriptedBackend)] == [
        not isinstance(draft, Exception)] * (1 + (says.find("999") > 0))
