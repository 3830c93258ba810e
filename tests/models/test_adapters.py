"""In every model family, packed steps with adapters in device pages give the logits of peft on transformers."""

import json

import numpy as np
import pytest
import torch

from batch_manager import KvCacheConfig, PeftCacheConfig, SchedulerPolicy
from batch_manager.adapter_values import AdapterPart
from batch_manager.decoding.slots import ADAPTER, SlotState
from batch_manager.handover import AdapterLoad
from batch_manager.models import load_model
from batch_manager.runtime.adapters.pool import LoraPool
from batch_manager.runtime.adapters.port import LoraPort
from batch_manager.triton_kernels.cpu.native.library import CannotCompileError, load_library
from tests.harness.adapter_mixture import Mixture
from tests.harness.adapters import (
    RANKS,
    content_of,
    projections_of,
    tensors_of,
    with_adapter,
)

from .conftest import Driver, expected_logits, random_prompts
from .test_ranks import CASES, HEADS, MORE, Threads
from .test_same_logits_as_transformers import FAMILIES

pytest.importorskip("peft")
CACHE = {"peft_cache_config": PeftCacheConfig(num_device_module_layer=20_000)}
PROMPTS = random_prompts([1, 17, 9, 12])


class WithAdapters(Driver):
    """A Driver whose sequences have adapters, in pages that lie apart. The content of other pages is NaN.

    contents   sequence -> content; several sequences may have the same one
    kernels    compute as on a GPU, with the oracles of the two kernels
    """

    def __init__(self, path, contents, *, wanted=None, dtype="float32", compiled=False, kernels=False, **options):
        port = LoraPort(wanted)
        port.uses_kernels = kernels
        split = {"split": options.pop("split")} if "split" in options else {}
        loaded = load_model(path, device="cpu", dtype=dtype, adapters=port, compiled_step=compiled, **split)
        self.port, slots = port, SlotState(16, torch.device("cpu"))
        super().__init__(loaded, compiled=compiled, **options)
        num_pages = 3 + sum(content.num_pages for content in contents.values())
        pool = LoraPool(port.projections, port.entries, num_pages, loaded.dtype, torch.device("cpu"), 128)
        pool.pages.fill_(torch.nan)
        free = np.random.default_rng(0).permutation(num_pages).tolist()
        placed = {}
        for sequence, content in contents.items():
            if id(content) not in placed:
                pages = sorted(free.pop() for _ in range(content.num_pages))
                placed[id(content)] = tuple(pages)
                pool.load(AdapterLoad(sequence, tuple(pages), content))
            slots.adapters[sequence] = placed[id(content)]
            slots.features[sequence] = ADAPTER
        port.bind(pool, slots)

    def forward(self, step, hidden):
        if self.compiled:
            return super().forward(step, hidden)
        self.port.receive([torch.from_numpy(array) for array in self.port.plan(step)])
        with self.port.active():
            return super().forward(step, hidden)


def check(folder, contents, models, prompts=PROMPTS, steps=3):
    """Generate in torch and compiled; compare the sequence with number i with model i. Returns the logits."""
    for compiled in (False, True) if can_compile() else (False,):
        sequences, logits = WithAdapters(folder, contents, compiled=compiled).generate(prompts, steps, chunk=16)
        for index, model in enumerate(models):
            expected = expected_logits(model, [sequences[index]], steps)[:, 0]
            assert expected.abs().max() > 0.3
            assert (logits[:, index] - expected).abs().max() < 1e-4 * max(1, expected.abs().max() / 10), index
            assert torch.equal(logits[:, index].argmax(-1), expected.argmax(-1))
    return logits


def can_compile():
    try:
        load_library()
    except CannotCompileError:
        return False
    return True


@pytest.mark.parametrize("case", CASES)
def test_a_mixture_of_adapters_has_the_logits_of_peft(case, reference):
    """Two adapters of random ranks on random modules, one of them for two sequences that lie apart; and none."""
    family, options = FAMILIES[case]
    model, folder = reference(family, **options)
    (first, parts), (second, others) = with_adapter(model, 1), with_adapter(model, 2, share=0.4)
    contents = {0: content_of(parts), 1: content_of(others)}
    contents[3] = contents[0]
    logits = check(folder, contents, [first, second, model, first])
    base = WithAdapters(folder, {}).prefill(PROMPTS)
    assert (logits[0, [0, 1, 3]] - base[[0, 1, 3]]).abs().amax(-1).min() > 0.01
    assert (logits[0, 2] - base[2]).abs().max() < 1e-4


@pytest.mark.parametrize("case", ["qwen2", "gpt2", "phi 3, longrope"])
def test_each_projection_alone(case, reference):
    family, options = FAMILIES[case]
    model, folder = reference(family, **options)
    names = [name for name in projections_of(model) if ".1." in name]
    assert len(names) >= 4
    made = [with_adapter(model, index, chosen=[name], ranks=RANKS[2:5]) for index, name in enumerate(names)]
    check(folder, {index: content_of(parts) for index, (_, parts) in enumerate(made)},
          [model for model, _ in made], random_prompts([7] * len(made)), steps=2)


@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_an_adapter_is_its_matrices_added_to_the_weights(case, reference, tmp_path):
    """Merged by peft and loaded as a checkpoint. The tensor attn_qkv stands for the three of a family without it."""
    family, options = FAMILIES[case]
    model, folder = reference(family, **options)
    with_peft, parts = with_adapter(model, 5, chosen=[name for name in projections_of(model) if "c_attn" in name
                                                      or "q_proj" in name or "k_proj" in name or "v_proj" in name])
    if case == "qwen2":
        parts = [stacked([part for part in parts if part.layer == layer]) for layer in range(3)]
    with_peft.merge_and_unload().save_pretrained(tmp_path)
    expected = WithAdapters(tmp_path, {}).generate(PROMPTS[:1], 3)
    sequences, logits = WithAdapters(folder, {0: content_of(parts)}).generate(PROMPTS[:1], 3)
    assert sequences == expected[0] and (logits - expected[1]).abs().max() < 1e-4


def stacked(parts):
    """Return one part for q, k and v, whose A has the rows of theirs, one after another."""
    order = [next(part for part in parts if part.module == f"attn_{name}") for name in "qkv"]
    b = np.zeros((sum(len(part.b) for part in order), sum(part.size for part in order)), np.float32)
    row = column = 0
    for part in order:
        b[row : row + len(part.b), column : column + part.size] = part.b
        row, column = row + len(part.b), column + part.size
    return AdapterPart("attn_qkv", order[0].layer, np.concatenate([part.a for part in order]), b)


def test_the_kernels_of_a_gpu(reference):
    model, folder = reference("Qwen2")
    contents = {index: content_of(with_adapter(model, index)[1]) for index in (0, 2)}
    contents[3] = contents[0]
    sequences, logits = WithAdapters(folder, contents).generate(PROMPTS, 3, chunk=16)
    found = WithAdapters(folder, contents, kernels=True).generate(PROMPTS, 3, chunk=16)
    assert found[0] == sequences and (found[1] - logits).abs().max() < 1e-4


def test_rows_without_an_adapter_keep_their_bits(reference):
    model, folder = reference("Qwen2")
    contents = {index: content_of(with_adapter(model, index)[1]) for index in (0, 2)}
    for compiled in (False, True) if can_compile() else (False,):
        base = WithAdapters(folder, {}, compiled=compiled).prefill(PROMPTS[:4])
        adapted = WithAdapters(folder, contents, compiled=compiled).prefill(PROMPTS[:4])
        assert torch.equal(adapted[[1, 3]], base[[1, 3]]) and not torch.equal(adapted[[0, 2]], base[[0, 2]])


@pytest.mark.parametrize("case", ["llama, one key head per query head, biases", "phi 3, longrope", "gpt-j", "gpt2",
                                  "granite", "cohere, norms of heads", "falcon, new, slopes, groups of key heads"])
def test_ranks_have_their_part_of_an_adapter(case, reference):
    """Two processes, which are threads here, give the logits of one."""
    family, options = FAMILIES[case]
    more = MORE.get(family, HEADS) | ({"num_kv_heads": 4} if "new_decoder_architecture" in options else {})
    model, folder = reference(family, **{**options, **more})
    contents = {index: content_of(with_adapter(model, index, share=1.0, ranks=RANKS[:4])[1]) for index in (0, 2)}
    sequences, logits = WithAdapters(folder, contents).generate(PROMPTS[:3], 2)
    for own_sequences, own_logits in Threads(2).run(
            lambda split: WithAdapters(folder, contents, split=split).generate(PROMPTS[:3], 2)):
        assert own_sequences == sequences
        assert (own_logits - logits).abs().max() < 1e-4 * max(1, logits.abs().max() / 10)


@pytest.mark.parametrize("case", ["qwen2", "gpt2", "phi 3, longrope", "falcon, new, slopes, groups of key heads",
                                  "granite"])
def test_a_folder_of_peft_through_a_manager(case, reference, make_manager, new_client, new_request, tmp_path):
    """Greedy tokens and logits of a request with the adapter and of one without, which share their steps."""
    family, options = FAMILIES[case]
    model, folder = reference(family, **options)
    with_peft, _ = with_adapter(model, 3)
    with_peft.save_pretrained(tmp_path)
    client = new_client()
    manager = make_manager(client, model_path=folder, num_threads=1, max_num_tokens=24, enable_chunked_context=True,
                           kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=20 * 16), **CACHE)
    info = manager.load_adapter(2**64 - 1, tmp_path)
    assert info.adapter_size in RANKS
    client.pending = [new_request(number, PROMPTS[1], 6, return_context_logits=True, **ids)
                      for number, ids in enumerate([{}, {"lora_task_id": -1}, {}])]
    client.wait_for_finals(0, 1, 2)
    for number, expected in enumerate([model, with_peft, model]):
        final = client.final(number)
        tokens, logits = final.tokens(), torch.as_tensor(final.tensors["context_logits"]).float()
        with torch.inference_mode():
            computed = expected(torch.tensor([tokens])).logits[0]
        assert tokens[len(PROMPTS[1]):] == computed[len(PROMPTS[1]) - 1 : -1].argmax(-1).tolist()
        difference = (logits.view(-1, 97) - computed[: len(PROMPTS[1])]).abs().max()
        assert difference < 1e-4 * max(1, computed.abs().max() / 10)
    assert client.final(1).tokens() != client.final(0).tokens()
    last = json.loads(client.stats[-1])
    assert last["LoRA Loads"] == 1 and last["Packed Steps" if "Compiled Steps" not in last else "Compiled Steps"]


def test_adapters_of_a_prefetch_folder_are_there_from_the_first_request_on(reference, make_manager, new_client,
                                                                           new_request, tmp_path):
    """One as peft writes it, one as the original's converter does. The requests name them by their ids alone."""
    model, folder = reference("Qwen2")
    models = {None: model}
    for task in (12, 2**64 - 1):
        models[task], parts = with_adapter(model, task)
        if task == 12:
            models[task].save_pretrained(tmp_path / "12")
        else:
            (tmp_path / str(task)).mkdir()
            for name, array in tensors_of(parts).items():
                np.save(tmp_path / str(task) / f"model.{name}.npy", array)
    client = new_client()
    client.pending = [new_request(number, PROMPTS[1], 6, **({} if task is None else {"lora_task_id": task}))
                      for number, task in enumerate(models)]
    make_manager(client, model_path=folder, num_threads=1,
                 peft_cache_config=PeftCacheConfig(num_device_module_layer=20_000, lora_prefetch_dir=tmp_path))
    client.wait_for_finals(0, 1, 2)
    for number, expected in enumerate(models.values()):
        tokens = client.final(number).tokens()
        with torch.inference_mode():
            logits = expected(torch.tensor([tokens])).logits[0, len(PROMPTS[1]) - 1 : -1]
        assert tokens[len(PROMPTS[1]):] == logits.argmax(-1).tolist()
    assert json.loads(client.stats[-1])["LoRA Adapters On Host"] == 2


@pytest.fixture(scope="module")
def mixture(reference):
    """Return (120 requests of forty adapters and none, the tokens of each alone)."""
    made = Mixture(*reference("Qwen2"), seed=1, count=120, by_peft=8)
    return made, made.run_alone()


@pytest.mark.parametrize("form, options", [
    ("packed", {"policy": SchedulerPolicy.GUARANTEED_NO_EVICT, "enable_trt_overlap": True}),
    ("compiled", {"policy": SchedulerPolicy.MAX_UTILIZATION, "max_num_tokens": 16, "enable_chunked_context": True})])
def test_requests_of_forty_adapters_in_caches_for_five_are_as_alone(form, options, mixture):
    """With block reuse: prompts of several adapters begin alike, and a block of another content is not found.

    tests/campaigns/adapters.py does this with every family.
    """
    if form == "compiled" and not can_compile():
        pytest.skip("no C compiler")
    requests, alone = mixture
    pauses = options["policy"] is SchedulerPolicy.MAX_UTILIZATION
    found, records = requests.run(cpu_compile=None if form == "compiled" else False, kv_cache_config=KvCacheConfig(
        tokens_per_block=16, max_tokens=(10 if pauses else 16) * 16, enable_block_reuse=True), **options)
    assert requests.different(found, alone)[0] == []
    wrong, _, compared = requests.different_from_peft(found)
    assert wrong == [] and compared > 15
    assert len({tuple(tokens[-8:]) for tokens in alone}) > len(alone) / 2
    assert records[-1]["LoRA Evictions"] > 5 and records[-1]["LoRA Device Pages"] == 20
    assert records[-1][f"{form.capitalize()} Steps"] > 0
    assert max(record["Active Request Count"] for record in records) > 2
    assert pauses == any(record["Paused Requests"] for record in records)


def test_deterministic_steps_with_adapters_have_the_bits_of_requests_alone(reference):
    requests = Mixture(*reference("Qwen2"), seed=2, count=12, adapters=6, by_peft=0)
    found, _ = requests.run(deterministic=True, policy=SchedulerPolicy.MAX_UTILIZATION,
                            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=160))
    assert found == requests.run_alone(deterministic=True)
