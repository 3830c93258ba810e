"""Every obstacle with every form: the table of docs/steps.md, cell by cell.

A plain sequence and one with the bit run in an engine that has the form and `packed`. In each cell, the form runs the
step and gives the tokens of `packed` alone, or leaves it to `packed` with the word of the cell. All forms run in torch:
the attention binds in torch, and a graph calls its closure again.
"""

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batch_manager.config import KvCacheConfig, PeftCacheConfig, TrtGptModelOptionalParams
from batch_manager.decoding import slots
from batch_manager.errors import ConfigError
from batch_manager.handover import (
    AdapterLoad,
    BlockTableUpdates,
    ContextWork,
    GenerationWork,
    LogitsPostProcessor,
    ScheduledBatch,
    SlotSetup,
)
from batch_manager.layers import recording, weight_form
from batch_manager.models.loading import load_model
from batch_manager.runtime import packing
from batch_manager.runtime.adapters.pool import LoraPool
from batch_manager.runtime.adapters.port import LoraPort
from batch_manager.runtime.build_backend import build_native_backend, held_bytes, make_info, make_parts
from batch_manager.runtime.forms import form as form_module
from batch_manager.runtime.forms import table as table_module
from batch_manager.runtime.forms.fixed import inputs as fixed_inputs
from batch_manager.runtime.forms.fixed.shapes import Shape
from batch_manager.runtime.forms.form import (
    CONTEXT_DRAFTS,
    CONTEXTS,
    DRAFTS,
    EMBEDDINGS,
    ORDER,
    PADDING,
    ROWS,
    WORDS,
    Forms,
)
from batch_manager.runtime.forms.table import FORMS, OBSTACLES, Asked, make_forms, wanted_forms
from batch_manager.runtime.kv_pool import make_kv_pool
from batch_manager.runtime.native_backend import NativeBackend
from batch_manager.runtime.operations import Operations
from batch_manager.sampling_config import SamplingConfig
from batch_manager.triton_kernels.cpu.native.library import CannotCompileError, load_library
from batch_manager.triton_kernels.device_limits import DeviceLimits
from tests.harness.adapters import random_content

from .bindable_torch import BindableTorchAttention, CallingGraph

REPOSITORY = Path(__file__).parents[2]
MODEL, CPU, BLOCK, BLOCKS = REPOSITORY / "examples" / "models" / "austen-4m", torch.device("cpu"), 16, 64
PEFT = PeftCacheConfig(num_device_module_layer=1000)
PROMPTS = [[7, 300, 12, 5, 90, 41, 8], [30, 31, 32, 33, 600, 35, 36, 37, 38, 39]]
PROCESSOR = LogitsPostProcessor(1, lambda request_id, logits, token_ids: logits.neg(), lambda: [[1]])
# Word -> the setup of a sequence with the bit of the word.
SETUPS = {
    "stages": SlotSetup(bad_words=((39,), (403,))),
    "sampled": SlotSetup(SamplingConfig(top_k=8, temperature=0.8, random_seed=3)),
    "log-probs": SlotSetup(return_log_probs=True),
    "context logits": SlotSetup(return_context_logits=True),
    "generation logits": SlotSetup(return_generation_logits=True),
    "history": SlotSetup(stop_words=((1000, 1001),)),
    "stop words": SlotSetup(stop_words=((1000,),)),
    "beams": SlotSetup(SamplingConfig(beam_width=2), max_new_tokens=20),
    "post-processor": SlotSetup(logits_post_processor=PROCESSOR),
    "more end ids": SlotSetup(end_id=1000, more_end_ids=(1001,)),
    "top log-probs": SlotSetup(top_log_probs=2),
    "raw log-probs": SlotSetup(return_log_probs=True, raw_log_probs=True),
    "adapter": SlotSetup(adapter_pages=(2, 0)),
}
OF_SIZE = ("rows", "context tokens", "contexts at once", "length", "slots", "not ready")


def table():
    """Return (word, form) -> "yes" or "no", as docs/steps.md says."""
    lines = (REPOSITORY / "docs" / "steps.md").read_text(encoding="utf-8").splitlines()
    names = next(line for line in lines if line.startswith("| word |")).split("|")[3:-1]
    cells = {}
    for line in lines:
        if found := re.match(r"\| `([a-z -]+)` \| [^|]* \|((?: (?:yes|no) \|){6})$", line):
            cells |= {(found[1], name.strip()): cell.strip() for name, cell in zip(names, found[2].split("|"))}
    return cells


TABLE = table()


@pytest.fixture(scope="module")
def engines():
    """Return name of a form -> an engine with this form and, except in V1, `packed`."""
    made, patch = {}, pytest.MonkeyPatch()
    limits = DeviceLimits(227 * 1024, 132, True)
    patch.setattr("batch_manager.triton_kernels.device_limits.device_limits", lambda: limits)
    patch.setattr(weight_form, "_packed", lambda weight: weight)       # weights are stored as on a GPU
    params = TrtGptModelOptionalParams(device="cpu", max_seq_len=64, num_threads=1, peft_cache_config=PEFT,
                                       kv_cache_config=KvCacheConfig(max_tokens=BLOCK * BLOCKS, tokens_per_block=BLOCK))
    with torch.inference_mode():
        port = LoraPort()
        loaded = load_model(MODEL, device="cpu", adapters=port)
        spec = loaded.spec
        pool = make_kv_pool(spec, BLOCKS, BLOCK, loaded.dtype, CPU)
        parts = make_parts(loaded, BindableTorchAttention(spec, pool), pool, num_slots=4, max_beam_width=2,
                           max_seq_len=64, adapters=port)
        port.bind(LoraPool(port.projections, port.entries, 4, loaded.dtype, CPU), parts.slots)
        launched = make_forms(Asked(params, CPU, packing.packed, False, graph=CallingGraph),
                              {"compiled": "-", "padded": "-"}, parts, loaded, spec, most_rows=2,
                              graph_sizes=frozenset({(8, 64)}))
    patch.undo()
    assert list(launched.steps) == ["graph", "fused", "fixed", "packed"], dict(launched.absent)
    for name, form in zip(launched.steps, launched._forms):
        forms = Forms([*([] if name == "packed" else [form]), launched._forms[-1]], parts, {})
        made[name] = NativeBackend(parts, Operations({}), forms, make_info(parts, loaded, "torch", {}),
                                   held_bytes(parts, loaded))
    try:
        load_library()
        made["compiled"] = build_native_backend(MODEL, params, layout=packing.packed, num_slots=4, max_beam_width=2)
    except CannotCompileError:
        pass
    made["padded"] = build_native_backend(MODEL, replace(params, peft_cache_config=None), layout=packing.padded,
                                          num_slots=4, max_beam_width=2)
    content = random_content(port.modules)
    for backend in made.values():
        if backend._parts.adapters is not None:
            with torch.inference_mode():
                backend._parts.adapters.pool.load(AdapterLoad(7, (2, 0), content))
    return made


def run(backend, setup, *, word="", steps=6):
    """Run a plain sequence and one with `setup`. Return (tokens by step, the choices of the steps).

    The prompt of the second sequence is computed in two chunks. Every other generation step is launched while the one
    before is still to be read; then its second half runs again.
    """
    width, count, found, choices = setup.sampling.beam_width, len(PROMPTS), [], []
    padded = 3 * (backend._forms._forms[0].name == "padded")
    rows = np.repeat(np.arange(2 * count, dtype=np.int32), 4)
    pages = np.tile(np.arange(4, dtype=np.int32), 2 * count)
    updates = BlockTableUpdates(rows, pages, np.arange(len(rows), dtype=np.int32) + 1)
    setups = [SlotSetup(prompt_length=len(PROMPTS[0])), setup]
    chunks = [np.array(prompt, np.int32) for prompt in PROMPTS]
    embeddings = None
    if word == "embeddings":
        chunks[1][1] = backend.info.vocab_size
        embeddings = np.full((1, backend.info.hidden_size), 0.1, np.float32)
    if width > 1:                                    # a step has one beam width: the second sequence runs alone
        first = [ContextWork(1, chunks[1], 0, True, setups[1].continuing(PROMPTS[1]))]
        batches = [ScheduledBatch(0, context=tuple(first), block_table_updates=updates, max_beam_width=2)]
    else:
        first = [ContextWork(0, chunks[0], 0, True, setups[0].continuing(PROMPTS[0])),
                 ContextWork(1, chunks[1][:4], 0, False, setups[1].continuing(PROMPTS[1]), embeddings)]
        second = ContextWork(1, chunks[1][4:], 4, True)
        generation = GenerationWork(np.zeros(1, np.int32), np.array([len(PROMPTS[0])], np.int32))
        batches = [ScheduledBatch(0, context=tuple(first), block_table_updates=updates, max_beam_width=2),
                   ScheduledBatch(1, context=(second,), generation=generation, max_beam_width=2,
                                  num_padded_rows=padded)]
    for batch in batches:
        pending = backend.start(batch)
        choices.append(pending.choice)
        found.append(outcome(pending.finish()))
    in_flight = None
    for step in range(steps):
        if width > 1:
            work = GenerationWork(np.ones(1, np.int32), np.array([len(PROMPTS[1]) + step], np.int32), width)
        else:
            work = GenerationWork(np.arange(2, dtype=np.int32), np.array(
                [len(PROMPTS[0]) + 1 + step, len(PROMPTS[1]) + step], np.int32))
        batch = ScheduledBatch(step + 2, generation=work, max_beam_width=2, num_padded_rows=padded)
        pending = backend.start(batch)
        choices.append(pending.choice)
        if in_flight is not None:
            found.append(outcome(in_flight.finish()))
        in_flight = pending
        if width > 1 or step % 2:                        # the tokens of beams come from the host
            found.append(outcome(in_flight.finish()))
            in_flight = None
        if width == 1 and step % 2:                      # the half of a step runs again, maybe in another form
            assert outcome(backend.start(batch.take([1])).finish())[0] == found[-1][0][1:]
    return found, choices


def outcome(output):
    assert not output.failures
    return output.tokens.ravel().tolist(), [] if output.log_probs is None else output.log_probs.ravel().tolist()


def same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, others) in zip(found, expected):
        np.testing.assert_allclose(ours, others, atol=1e-4)


def test_the_table_has_every_word_and_every_form():
    assert {word for word, _ in TABLE} | set(OF_SIZE) == set(WORDS.values())
    assert {name for _, name in TABLE} == set(ORDER) and len(TABLE) == 6 * (len(WORDS) - len(OF_SIZE))
    of_batches = {"contexts", "drafts", "context drafts", "embeddings", "padding"}
    assert set(SETUPS) | of_batches == {word for word, _ in TABLE}


@pytest.mark.parametrize("name", ORDER)
def test_the_bits_that_a_form_serves_are_those_of_the_table(engines, name):
    """Each bit alone. A bit without a word, or without a row of the table, is served by no form."""
    if name not in engines:
        pytest.skip("no C compiler")
    form = engines[name]._forms._forms[0]
    served = {word for bits, word in WORDS.items() if bits & form.serves}
    assert served == {word for word, of in TABLE if of == name and TABLE[word, of] == "yes"}
    assert form.serves & ~sum(WORDS) == 0 and all(
        bits & form.serves in (0, bits) for bits in WORDS), "a part of the stages"


@pytest.mark.parametrize("word", SETUPS)
@pytest.mark.parametrize("name", ORDER)
def test_a_sequence_with_the_bit_gets_the_same_tokens_or_the_named_word(engines, name, word):
    if name not in engines:
        pytest.skip("no C compiler")
    if name == "padded" and TABLE[word, name] == "no":               # there is no other form
        with pytest.raises(form_module.UnservedBatchError, match=f"{name}: {word}"):
            run(engines[name], SETUPS[word])
        return
    expected, _ = run(engines["packed"], SETUPS[word], word=word)
    found, choices = run(engines[name], SETUPS[word], word=word)
    same(found, expected)
    of_generation = choices[-1]
    if TABLE[word, name] == "yes" or word == "context logits":       # after the prompt, context logits do not count
        assert of_generation == (name, [])
    else:
        assert of_generation.form == "packed" and of_generation.obstacles == {name: word}
    served_while_generating = ("sampled", "log-probs", *(["adapter"] if name != "fused" else []))
    if name == "graph" and word in served_while_generating:
        assert [choice.form for choice in choices[:2]] == ["graph", "graph"]
    elif name in ("fused", "fixed") and word in served_while_generating:
        assert choices[1].obstacles == {name: "contexts"}
    if name == "graph" and word == "context logits":
        assert choices[0].obstacles == {name: word}


@pytest.mark.parametrize("name", ORDER)
def test_prompt_tuning_tokens(engines, name):
    if name not in engines:
        pytest.skip("no C compiler")
    plain = SlotSetup()
    expected, _ = run(engines["packed"], plain, word="embeddings")
    found, choices = run(engines[name], plain, word="embeddings")
    same(found, expected)
    assert expected != run(engines["packed"], plain)[0]
    if TABLE["embeddings", name] == "no":
        assert EMBEDDINGS in (bits & EMBEDDINGS for _, bits in choices[0].passed)


@pytest.mark.parametrize("name", ORDER)
def test_drafts_and_padding_are_refused_by_word_where_no_form_serves_them(engines, name):
    if name not in engines:
        pytest.skip("no C compiler")
    backend, one = engines[name], np.ones(1, np.int32)
    run(backend, SlotSetup(), steps=1)
    drafts = ScheduledBatch(9, generation=GenerationWork(0 * one, 9 * one, num_drafts=one, draft_tokens=one))
    if name == "padded":
        with pytest.raises(form_module.UnservedBatchError, match="drafts"):
            backend.start(drafts)
    else:
        choice = backend.start(drafts).choice
        assert choice.form == name if name == "compiled" else choice.form == "packed" and choice.obstacles == (
            {} if name == "packed" else {name: "drafts"})
    padded = ScheduledBatch(9, generation=GenerationWork(0 * one, 9 * one), max_beam_width=2, num_padded_rows=2)
    if name == "padded":
        assert backend.start(padded).choice == ("padded", [])
    else:
        with pytest.raises(form_module.UnservedBatchError, match="padding"):
            backend.start(padded)


def test_a_step_that_is_too_large_for_a_form_says_which_size(engines):
    def obstacle(name, batch):
        return engines[name]._forms._forms[0].misfit(batch)

    def rows(count, length=5):
        return ScheduledBatch(0, generation=GenerationWork(np.arange(count, dtype=np.int32),
                                                           np.full(count, length, np.int32)))

    def contexts(count, tokens):
        return ScheduledBatch(0, context=tuple(ContextWork(0, np.zeros(tokens, np.int32), 0, True)
                                               for _ in range(count)))

    words = {(name, WORDS.get(obstacle(name, batch), "")) for name, batch in (
        ("graph", rows(600)), ("graph", rows(2, 64)), ("graph", contexts(1, 65)), ("graph", contexts(33, 1)),
        ("fixed", rows(2, 64)), ("fixed", rows(600)), ("fused", rows(600)), ("packed", rows(600)))}
    assert words == {("graph", "rows"), ("graph", "length"), ("graph", "context tokens"),
                     ("graph", "contexts at once"), ("fixed", "length"), ("fixed", ""), ("fused", "rows"),
                     ("packed", "")}


GPU, V1 = {"device": torch.device("cuda", 0), "has_triton": True}, {"layout": packing.padded}
WHERE = {"graph": GPU, "fused": GPU, "fixed": GPU, "compiled": {}, "packed": {}, "padded": V1}     # an engine has it
# Word of OBSTACLES -> what then differs, and the reason.
IN_THE_WAY = {
    "ranks": ({"num_ranks": 2}, "2 ranks exchange hidden states between layers"),
    "no GPU": ({"device": CPU}, "the device is cpu"),
    "GPU": (GPU, "the device is cuda:0"),
    "no triton": ({"has_triton": False}, "triton is not installed"),
    "no kernels": ({"device": CPU, "has_triton": False}, "the device is cpu"),
    "triton": ({"has_triton": True}, "TRITON_INTERPRET is set"),
    "deterministic": ({"deterministic": True}, "deterministic is set"),
    "own attention": ({"has_attention": True}, "Parts.attention is set"),
    "V1": (V1, "TrtGptModelType.V1 pads steps to their static batch"),
    "not V1": ({"layout": packing.packed}, "TrtGptModelType.V1 alone pads steps"),
    "block size": ({"kv_cache_config": KvCacheConfig(tokens_per_block=8)},
                   "tokens_per_block is 8, not a multiple of 16 up to 256"),
    "no compiler": ({}, "no compiler here"),
}


@pytest.mark.parametrize("word, name", [(word, name) for word, (names, _) in OBSTACLES.items() for name in names])
def test_what_is_in_the_way_of_a_form_is_told_and_refused_where_the_form_is_asked_for(monkeypatch, word, name):
    def absent(changes, **options):
        asked = {"device": CPU, "layout": packing.packed, "has_triton": False, **WHERE[name], **changes}
        given = {key: asked.pop(key) for key in list(asked) if key not in Asked._fields}
        return wanted_forms(Asked(TrtGptModelOptionalParams(**given, **options), **asked))

    def load():
        if word == "no compiler":
            raise CannotCompileError("no compiler here")

    option, (changes, reason) = FORMS[name].option, IN_THE_WAY[word]
    monkeypatch.setattr(table_module, "load_library", lambda check=None: None)
    assert name not in absent({})
    monkeypatch.setattr(table_module, "load_library", lambda check=None: load())
    assert absent(changes)[name] == reason
    if option:
        assert absent(changes, **{option: False})[name] == f"{option} is False"
        with pytest.raises(ConfigError, match=f"^{option} is True, but {reason}; "):
            absent(changes, **{option: True})
    if name == "fixed":                                          # an attention of the user's may bind
        assert (name in absent(changes | {"has_attention": True})) == (word != "no kernels")


# Mutants: each is a fault that the tests above, or those named, must find.


def test_mutant_graphs_that_serve_stages(engines, monkeypatch):
    graph = engines["graph"]._forms._forms[0]
    expected, _ = run(engines["packed"], SETUPS["stages"])
    assert expected != run(engines["packed"], SlotSetup())[0]
    monkeypatch.setattr(graph, "serves", graph.serves | slots.STAGES | slots.HISTORY)
    with pytest.raises(AssertionError):
        same(run(engines["graph"], SETUPS["stages"])[0], expected)


def test_mutant_compiled_steps_without_the_adapters_that_they_serve(engines, monkeypatch):
    """A recording that leaves adapters out: the comparison finds it, and so does the table."""
    if "compiled" not in engines:
        pytest.skip("no C compiler")
    expected, _ = run(engines["packed"], SETUPS["adapter"])
    assert expected != run(engines["packed"], SlotSetup())[0]
    monkeypatch.setattr(recording.Recording, "adapt", lambda *given: None)
    params = TrtGptModelOptionalParams(device="cpu", max_seq_len=64, num_threads=1, peft_cache_config=PEFT,
                                       kv_cache_config=KvCacheConfig(max_tokens=BLOCK * BLOCKS, tokens_per_block=BLOCK))

    def build():
        return build_native_backend(MODEL, params, layout=packing.packed, num_slots=4, max_beam_width=2)

    assert "made-up adapter" in build().info.absent["compiled"]
    monkeypatch.setattr(LoraPort, "trying", lambda self: contextlib.nullcontext())
    backend = build()
    load = AdapterLoad(7, (2, 0), random_content(backend.info.adapter_modules))
    with torch.inference_mode():
        backend._parts.adapters.pool.load(load)
    found, choices = run(backend, SETUPS["adapter"])
    assert choices[-1] == ("compiled", [])
    with pytest.raises(AssertionError):
        same(found, expected)


def test_mutant_fixed_addresses_without_the_tiles_of_adapters(engines):
    expected, _ = run(engines["packed"], SETUPS["adapter"])
    for name in ("graph", "fixed"):
        inputs = engines[name]._forms._forms[0]._inputs
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(inputs, "_tiles", lambda *given: fixed_inputs.NO_TILES)
            with pytest.raises(AssertionError):
                same(run(engines[name], SETUPS["adapter"])[0], expected)


def test_mutant_table_changes_that_only_steps_of_the_form_note(engines, monkeypatch):
    """Changes of block tables that come with a step in another form reach the copy on the device."""
    backend = engines["fixed"]
    expected, _ = run(engines["packed"], SlotSetup())
    found, choices = run(backend, SlotSetup())
    assert choices[0].form == "packed" and choices[-1].form == "fixed"        # the first step brought all the blocks
    same(found, expected)
    tables, packed = backend._parts.tables, backend._forms._forms[-1]
    start = packed.start
    with torch.inference_mode():
        backend._forms._forms[0]._inputs.block_tables.zero_()
    monkeypatch.setattr(packed, "start", lambda batch, traits: tables.forget_changes() or start(batch, traits))
    with pytest.raises(AssertionError):
        same(run(backend, SlotSetup())[0], expected)


def test_mutant_a_section_without_padding(engines, monkeypatch):
    """Every entry of every array is written in each step: nothing of the step before is left in the padding."""
    backend = engines["graph"]
    run(backend, SlotSetup(), steps=0)
    inputs, old = backend._forms._forms[0]._inputs, 77
    generation = GenerationWork(np.arange(2, dtype=np.int32), np.array([5, 6], np.int32))
    context = ContextWork(0, np.zeros(3, np.int32), 0, True)
    batches = [(ScheduledBatch(3, generation=generation, max_beam_width=2), Shape(4, False, True)),
               (ScheduledBatch(4, context=(context,), generation=generation.take([1]), max_beam_width=2),
                Shape(8, False, True, 64, 32))]

    def left():
        found = set()
        for batch, shape in batches:
            for array in inputs.of(shape).arrays.values():
                array.view(np.uint8)[:] = old
            shape = inputs.write(batch, shape)
            found |= {name for name, array in inputs.of(shape).arrays.items()
                      if (array.view(np.uint8).reshape(-1, array.itemsize) == old).all(1).any()}
        return found

    assert left() == set()

    def fill(targets, given):
        for (array, _), values in zip(targets, given):
            array[: len(values)] = values

    monkeypatch.setattr(fixed_inputs, "_fill", fill)
    assert {"kv_lengths", "slots", "pool_slots"} <= left()


def test_mutant_a_form_that_falls_back_by_itself(engines, monkeypatch):
    """A form that fails raises. No other form runs the step."""
    backend = engines["fixed"]
    run(backend, SlotSetup(), steps=1)
    fixed, before = backend._forms._forms[0], dict(backend._forms.steps)

    def fails(shape):
        raise RuntimeError("injected")

    monkeypatch.setattr(fixed, "_launches", SimpleNamespace(launch=fails))
    generation = GenerationWork(np.zeros(1, np.int32), np.array([8], np.int32))
    with pytest.raises(RuntimeError, match="injected"):
        backend.start(ScheduledBatch(9, generation=generation, max_beam_width=2))
    assert backend._forms.steps == before


def test_mutant_a_bit_without_a_case():
    """A bit of decoding/slots.py or of form.py without a word, or a word without a row of the table."""
    bits = [value for name, value in vars(slots).items() if name.isupper() and isinstance(value, int) and value >> 31]
    assert sum(bits) | CONTEXTS | DRAFTS | EMBEDDINGS | PADDING | CONTEXT_DRAFTS | sum(
        1 << bit for bit in range(56, 62)) == sum(WORDS) and ROWS == 1 << 56
