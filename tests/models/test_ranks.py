"""Every family, split over 2 and 4 processes, gives the logits of the whole model. The processes are threads here.

Two processes also run it as compiled code.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from batch_manager.errors import ConfigError, ModelLoadError
from batch_manager.layers.recording import NotRecordableError
from batch_manager.models import load_model, read_spec, registry
from batch_manager.models.llama import Llama

from .conftest import TINY, Driver, make_reference, random_prompts
from .gguf_writing import write_gguf
from .test_same_logits_as_transformers import FAMILIES, NO_TOKENS
from .test_stages import Stages

# Heads that 2 and 4 divide, in groups. GPT-2, GPT-J and BLOOM have 4 heads in the reference.
VOCABULARY = {"vocab_size": 160}       # which 2 and 4 divide, too
HEADS = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, **VOCABULARY}
MORE = dict.fromkeys(("GPT2", "GPTJ", "Bloom"), VOCABULARY)
CASES = ["llama, one key head per query head, biases", "mistral, window of 7", "qwen2", "qwen3, tied", "gemma",
         "gemma 2", "gemma 3", "olmo 2", "olmo 3", "phi 3, window, a part of each head rotated, tied", "gpt-neox",
         "gpt-neox, one after the other, no biases, tied", "smollm 3", "stablelm, side by side, biases, more rotated",
         "stablelm, norms of heads", "starcoder 2", "phi, norms of heads, grouped queries, tied",
         "cohere, norms of heads", "cohere 2, other layers, biases", "gpt-j", "granite", "opt",
         "opt, norms behind, tokens of another size", "bloom", "falcon, new, one norm, untied, biases, yarn",
         "falcon, one after the other, slopes", "falcon, new, slopes, groups of key heads", "gpt2"]
# Families in which 4 processes share 2 key heads, or one.
TWO, ONE = ({**HEADS, "num_key_value_heads": count} for count in (2, 1))
SHARED_HEADS = [("llama, grouped queries", TWO), ("llama, one key head, tied", ONE), ("olmo 3", TWO), ("qwen2", ONE),
                ("phi 3, window, a part of each head rotated, tied", TWO), ("stablelm, norms of heads", TWO),
                ("cohere, norms of heads", TWO), ("falcon, one key head", HEADS),
                ("falcon, new, slopes, groups of key heads", {**HEADS, "num_kv_heads": 2})]
PROMPTS = random_prompts([1, 17, 40])


class Threads:
    """What several threads exchange as the processes of a Split."""

    def __init__(self, size):
        self.barrier, self.given = threading.Barrier(size, timeout=60), [None] * size
        self.ranks = [Rank(self, rank, size) for rank in range(size)]

    def run(self, work):
        """Return work(split) of all ranks, each in its thread. The first error ends all."""
        def contained(split):
            try:
                return work(split)
            except BaseException:
                self.barrier.abort()
                raise

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            return list(pool.map(contained, self.ranks))


class Rank:
    def __init__(self, threads, rank, size):
        self.threads, self.rank, self.size = threads, rank, size

    def exchanged(self, x):
        self.threads.given[self.rank] = x
        self.threads.barrier.wait(60)
        given = list(self.threads.given)
        self.threads.barrier.wait(60)
        return given

    def sum(self, x):
        first, *others = self.exchanged(x.clone())
        for other in others:
            first = first + other
        return first

    def gather(self, x):
        return torch.cat(self.exchanged(x), -1)


def check_ranks(path, recordable=True):
    whole = Driver(load_model(path, device="cpu", dtype="float32"))
    sequences, logits = whole.generate(PROMPTS, 3, chunk=16)
    assert logits.abs().max() > 1.0
    for size, compiled in ((4, False), (2, True), *(() if recordable else [(2, False)])):
        def work(split, compiled=compiled):
            loaded = load_model(path, device="cpu", dtype="float32", split=split, compiled_step=compiled)
            assert loaded.spec.num_heads * split.size == whole.loaded.spec.num_heads
            assert loaded.weight_bytes < whole.loaded.weight_bytes
            parts = 1 if loaded.spec.vocab_size % split.size else split.size
            assert loaded.model.head.is_split == (parts > 1)
            assert len(loaded.model.embedding.weight) * parts == loaded.spec.vocab_size
            return Driver(loaded, compiled=compiled, split=split).generate(PROMPTS, 3, chunk=16)

        if compiled and not recordable:
            with pytest.raises(NotRecordableError, match="norms rows of which each rank has a part"):
                Threads(size).run(work)
            continue
        for own_sequences, own_logits in Threads(size).run(work):
            assert (own_logits - logits).abs().max() < 1e-4
            assert own_sequences == sequences


@pytest.mark.parametrize("case", CASES)
def test_ranks_have_the_logits_of_the_whole_model(case, reference):
    family, options = FAMILIES[case]
    more = MORE.get(family, HEADS) | ({"num_kv_heads": 4} if "new_decoder_architecture" in options else {})
    check_ranks(reference(family, **{**options, **more})[1], not family.startswith("Olmo"))


@pytest.mark.parametrize("case, more", SHARED_HEADS)
def test_ranks_that_share_key_heads(case, more, reference):
    family, options = FAMILIES[case]
    check_ranks(reference(family, **{**options, **more})[1], not family.startswith("Olmo"))


def test_no_family_is_missing():
    assert {FAMILIES[case][0] for case in CASES} == {family for family, _ in FAMILIES.values()}


def test_ranks_of_stages(reference):
    folder = reference("Olmo3", **{**FAMILIES["olmo 3"][1], **HEADS})[1]
    expected = Driver(load_model(folder, device="cpu", dtype="float32")).generate(PROMPTS, 3, chunk=16)[1]

    def work(split):
        stages, spec = Stages(folder, 2, split=split), read_spec(folder).share(split)
        whole = SimpleNamespace(spec=spec, model=stages, dtype=torch.float32)
        return Driver(whole, attention_class=stages.make_attention).generate(PROMPTS, 3, chunk=16)[1]

    for logits in Threads(2).run(work):
        assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family, kind, options", [
    ("Llama", "Q8_0", TWO), ("Phi3", "F16", {**HEADS, **NO_TOKENS}), ("GPT2", "F32", {}), ("Bloom", "Q8_0", {})])
def test_ranks_of_a_gguf_file(family, kind, options, tmp_path):
    sizes = {} if family in MORE else {"intermediate_size": 256}
    write_gguf(make_reference(family, **{**options, **sizes}), tmp_path / "model.gguf", family, kind)
    check_ranks(tmp_path / "model.gguf")


@pytest.mark.parametrize("change, options, error, words", [
    ({"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}, {}, ConfigError,
     "the model is split over 4 processes, and num_heads of LlamaForCausalLM is 6; expected a multiple of 4"),
    ({"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 16}, {}, ConfigError,
     "num_kv_heads of LlamaForCausalLM is 3; expected a multiple or a divisor of 4"),
    ({"intermediate_size": 62}, {}, ConfigError, "intermediate_size of LlamaForCausalLM is 62; expected a multiple"),
    ({}, {"model_implementation": "transformers"}, ConfigError, "split over 4 processes, and its class is "),
    ({"architectures": ["OwnForRanks"]}, {}, ConfigError, "split over 4 processes, and its class is Own; expected"),
    ({"quantization_config": {"quant_method": "awq"}}, {}, ModelLoadError, "quantization_config: bits is")])
def test_what_cannot_be_split_is_refused_by_name(change, options, error, words, tmp_path, monkeypatch):
    monkeypatch.setitem(registry._models, "OwnForRanks", type("Own", (Llama,), {}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **TINY, **HEADS, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=words):
        load_model(tmp_path, device="cpu", load_format="dummy", split=Threads(4).ranks[1], **options)
