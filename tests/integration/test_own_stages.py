"""Tokens, log-probs and beams follow the logits as changed by a user's stages (Parts.stages)."""

import re

import numpy as np
import pytest

from batch_manager import ConfigError, KvCacheConfig, LogitsStage, Parts, TrtGptModelType

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

FUSED, SPLIT, V1 = TrtGptModelType.InflightFusedBatching, TrtGptModelType.InflightBatching, TrtGptModelType.V1
COUNT, PROMPTS = 10, {1: [5, 6, 7, 7], 2: [8, 9], 3: [4, 100, 3, 100, 100, 7, 12, 50, 51], 4: [11]}
WAYS = {"fused": dict(model_type=FUSED), "split": dict(model_type=SPLIT), "V1": dict(model_type=V1),
        "deterministic": dict(model_type=FUSED, deterministic=True)}


class OnlyMultiples(LogitsStage):
    """A stage that bans the newest token of a request, and all ids that are not multiples of the request's divisor.

    divisors   request id -> divisor; the stage does not apply to other requests
    """

    def __init__(self, divisors):
        self.divisors, self.of_slot, self.largest_call = divisors, {}, 0

    def is_active(self, setup):
        return setup.request_id in self.divisors

    def needs_history(self, setup):
        return True

    def set_up(self, slot, setup):
        self.of_slot[slot] = self.divisors.get(setup.request_id)

    def apply(self, logits, rows, active):
        tokens, row, length = rows.history()
        self.largest_call = max(self.largest_call, len(rows))
        for i in np.nonzero(active)[0].tolist():
            last = int(tokens[row[i], length[i] - 1])
            assert int(length[i]) == rows.positions[i]
            logits[i, torch.arange(logits.shape[1]) % self.of_slot[int(rows.slots[i])] != 0] = -torch.inf
            logits[i, last] = -torch.inf


class AsProcessor(transformers.LogitsProcessor):
    """The same rule as OnlyMultiples, for transformers."""

    def __init__(self, divisor):
        self.divisor = divisor

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, torch.arange(scores.shape[1]) % self.divisor != 0] = -torch.inf
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def expected(reference, prompt, divisor, width=1):
    with torch.inference_mode():
        found = reference.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), num_beams=width,
            num_return_sequences=width, do_sample=False, max_new_tokens=COUNT, length_penalty=0.0, eos_token_id=None,
            pad_token_id=0, logits_processor=[] if divisor is None else [AsProcessor(divisor)])
    return found.tolist()


def serve(make_manager, client, requests, reference, stages, **options):
    client.pending = list(requests)
    make_manager(client, model_path=reference.folder, num_threads=1, parts={"stages": stages},
                 kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=1024), **options)
    client.wait_for_finals(*(request.request_id for request in requests))


@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_log_probs_are_those_of_the_changed_logits(make_manager, new_client, new_request, llama_reference,
                                                              way):
    stage, client = OnlyMultiples({1: 3, 2: 7, 3: 2}), new_client()
    serve(make_manager, client, [new_request(i, prompt, COUNT, return_log_probs=True) for i, prompt in PROMPTS.items()],
          llama_reference, [stage], **WAYS[way])
    for i, prompt in PROMPTS.items():
        tokens = client.final(i).tokens()
        assert client.final(i).error == "" and [tokens] == expected(llama_reference, prompt, stage.divisors.get(i))
        logits = torch.from_numpy(llama_reference.logits(tokens))[len(prompt) - 1 : -1]
        if i in stage.divisors:
            processor, ids = AsProcessor(stage.divisors[i]), torch.tensor(tokens)
            logits = processor(ids[len(prompt) - 1 : -1, None], logits)
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[len(prompt):])[:, None])[:, 0]
        np.testing.assert_allclose(client.final(i).tensors["output_log_probs"][0, 0], log_probs.numpy(), atol=1e-4)
    assert stage.largest_call == (1 if way == "deterministic" else 4)


@pytest.mark.parametrize("way", WAYS)
def test_beams_compete_with_what_stages_leave_of_them(make_manager, new_client, new_request, llama_reference, way):
    stage, client = OnlyMultiples({1: 3, 2: 7, 3: 2}), new_client()
    serve(make_manager, client, [new_request(i, prompt, COUNT, beam_width=3) for i, prompt in PROMPTS.items()],
          llama_reference, lambda num_slots, device: (stage,), max_beam_width=3, **WAYS[way])
    for i, prompt in PROMPTS.items():
        beams = [client.final(i).tokens(beam) for beam in range(3)]
        assert beams == expected(llama_reference, prompt, stage.divisors.get(i), width=3)


def test_deterministic_samples_are_the_same_bits_alone_and_among_others(make_manager, new_client, new_request,
                                                                        llama_reference):
    class Sharpen(LogitsStage):
        """A stage with one operation on all rows. The last bits of its results may depend on the number of rows."""

        reads = ("temperature",)

        def is_active(self, setup):
            return True

        def apply(self, logits, rows, active):
            logits.add_(logits.softmax(1) / rows.column("temperature")[:, None])

    def asked():
        return [new_request(i, prompt, COUNT, return_log_probs=True, runtime_top_p=0.95, temperature=0.7 + i / 10,
                            random_seed=i) for i, prompt in PROMPTS.items()]

    def found(requests):
        client = new_client()
        serve(make_manager, client, requests, llama_reference, [Sharpen()], model_type=FUSED, deterministic=True)
        return {request.request_id: (client.final(request.request_id).tokens(), client.final(
            request.request_id).tensors["output_log_probs"].tolist()) for request in requests}

    together = found(asked())
    for request in asked():
        assert found([request])[request.request_id] == together[request.request_id]


@pytest.mark.parametrize("where", ["is_active", "set_up", "apply"])
@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_what_a_stage_raises_ends_the_request_it_raises_for(make_manager, new_client, new_request, llama_reference,
                                                            where, error):
    class Raises(OnlyMultiples):
        pass

    def raising(self, *given):
        concerned = (2 in [self.of_slot[slot] for slot in given[1].slots.tolist()] if where == "apply"
                     else given[-1].request_id == 3)
        if concerned:
            raise error("of the user's")
        return getattr(OnlyMultiples, where)(self, *given)

    setattr(Raises, where, raising)
    stage, client = Raises({1: 3, 2: 7, 3: 2}), new_client()
    serve(make_manager, client, [new_request(i, prompt, COUNT) for i, prompt in PROMPTS.items()], llama_reference,
          [stage], model_type=FUSED)
    assert client.final(3).code == "MODEL_ERROR" and error.__name__ in client.final(3).error
    for i in (1, 2, 4):
        assert [client.final(i).tokens()] == expected(llama_reference, PROMPTS[i], stage.divisors.get(i))


@pytest.mark.parametrize("tokens, left", [(slice(None), -torch.inf), (5, torch.inf), (5, torch.nan)])
@pytest.mark.parametrize("width", [1, 3])
def test_a_stage_that_leaves_no_token_or_spoils_one_ends_its_request_by_name(
        make_manager, new_client, new_request, llama_reference, tokens, left, width):
    class Spoils(OnlyMultiples):
        def apply(self, logits, rows, active):
            logits[torch.from_numpy(active), tokens] = left

    client = new_client()
    serve(make_manager, client, [new_request(i, prompt, COUNT, beam_width=width if i == 2 else 1)
                                 for i, prompt in PROMPTS.items()], llama_reference, [Spoils({2: 1})], model_type=FUSED,
          max_beam_width=3)
    assert client.final(2).code == "NON_FINITE_LOGITS"
    assert re.search("Parts.stages of this request ban all .* tokens of the vocabulary, or leave a NaN or .inf; ",
                     client.final(2).error)
    assert [client.final(1).tokens()] == expected(llama_reference, PROMPTS[1], None)


@pytest.mark.parametrize("where", ["is_active", "set_up", "apply"])
def test_a_stage_that_raises_for_the_sequence_of_the_warm_up_is_named(make_manager, new_client, llama_reference, where):
    class KnowsItsRequests(OnlyMultiples):
        def is_active(self, setup):
            return True

    def raising(self, *given):
        raise KeyError("who is 0")

    setattr(KnowsItsRequests, where, raising)
    with pytest.raises(ConfigError, match="the stage KnowsItsRequests of Parts.stages raised KeyError: 'who is 0' in "
                       "the warm-up; .*request id 0 and prompt .0.; ") as caught:
        make_manager(new_client(), model_path=llama_reference.folder,
                     parts={"stages": [LogitsStage(), KnowsItsRequests({})]})
    assert isinstance(caught.value.__cause__, KeyError)


class NoApply:
    reads, is_active, needs_history, set_up = (), bool, bool, print


class ReadsTheUnknown(LogitsStage):
    reads = ("top_p", "warmth")


@pytest.mark.parametrize("stages, told", [
    (OnlyMultiples({}), "Parts.stages is of type OnlyMultiples"), ("stages", "Parts.stages is of type str"),
    ([OnlyMultiples], "contains the class OnlyMultiples"), ([NoApply()], "a stage of type NoApply, which lacks apply"),
    ([object()], "which lacks is_active, needs_history, set_up, apply, reads"),
    ([ReadsTheUnknown()], "ReadsTheUnknown in Parts.stages holds 'warmth'"),
    (lambda num_slots, device: None, "the factory in Parts.stages returned a value of type NoneType"),
    (type("None_", (), {}), "Parts.stages is the class None_; expected a list of LogitsStages; pass [None_(...)]"),
    ([LogitsStage()] * 17, "Parts.stages has 17 stages; expected at most 16"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_no_stage_is_refused_by_name_when_the_manager_is_made(make_manager, new_client, llama_reference, stages,
                                                                      told):
    with pytest.raises(ConfigError) as caught:
        make_manager(new_client(), model_path=llama_reference.folder, parts={"stages": stages})
    assert told in str(caught.value)


def test_a_backend_of_ones_own_has_no_stages(make_manager, new_client):
    with pytest.raises(ConfigError, match="Parts.stages and Parts.backend are both set"):
        make_manager(new_client(), parts={"stages": [LogitsStage()]})
    assert Parts(stages=()).stages == ()
