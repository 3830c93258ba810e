"""GGUF checkpoints load from one file and from shards, with bounded time and memory.

Wrong metadata is refused, and the error names its key.
"""

import builtins
import struct
import time

import gguf
import numpy as np
import pytest
import torch

from batch_manager.errors import ModelLoadError, UnsupportedModelError
from batch_manager.models import load_model, read_spec
from batch_manager.models.end_ids import read_end_ids
from batch_manager.weights.checkpoint import open_checkpoint
from tests.checkpoints.watch import Resources, forget_peak

from .gguf_draft import ARRAY, BOOL, FLOAT32, INT32, TEXT, UINT32, Draft, Entry, Tensor

NUMBERS = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48,
           "attention.head_count": 4, "attention.head_count_kv": 2}
ROWS = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32), "ffn_gate": (48, 32),
        "ffn_up": (48, 32), "ffn_down": (32, 48), "attn_norm": (32,), "ffn_norm": (32,)}
F32, F16, Q8_0 = 0, 1, 8


def tensor(name, *shape, kind=F32):
    data = np.random.default_rng(len(name)).normal(0, 0.2, shape).astype(np.float16 if kind == F16 else np.float32)
    return Tensor(name, list(shape[::-1]), kind, data.tobytes())


def model(architecture="llama", extra=(), **numbers) -> Draft:
    """Return the draft of a GGUF file with all tensors of a small Llama.

    architecture   the architecture that the metadata names
    extra          additional entries of the metadata
    numbers        entries of the metadata in place of those in NUMBERS; None leaves an entry out
    """
    entries = [Entry("general.architecture", TEXT, architecture)]
    entries += [Entry(f"{architecture}.{key}", UINT32, value)
                for key, value in {**NUMBERS, **numbers}.items() if value is not None]
    entries += [Entry(f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT32, 1e-5), *extra]
    tensors = [tensor("token_embd.weight", 10, 32), tensor("output_norm.weight", 32)]
    tensors += [tensor(f"blk.{index}.{name}.weight", *shape) for index in range(2) for name, shape in ROWS.items()]
    return Draft(entries, tensors)


def llama_key(name, kind, value):
    return Entry(f"llama.{name}", kind, value)


def write(folder, draft, name="model.gguf"):
    (folder / name).write_bytes(draft.to_bytes())
    return folder / name


def test_a_whole_model(tmp_path):
    path = write(tmp_path, model())
    spec = read_spec(path)
    assert (spec.architecture, spec.num_layers, spec.vocab_size, spec.head_size) == ("LlamaForCausalLM", 2, 10, 8)
    assert spec.tie_word_embeddings and spec.max_position_embeddings == 64 and spec.dtype == "float32"
    assert load_model(path, device="cpu").weight_bytes > 0
    assert load_model(str(path), device="cpu", load_format="dummy").spec == spec


WRONG = {
    "an architecture nobody knows": (model("mamba"), UnsupportedModelError,
                                     r"general\.architecture is 'mamba'; expected one of llama, "),
    "no architecture": (Draft([], []), UnsupportedModelError, r"general\.architecture is missing; expected"),
    "another kind of file": (model(extra=[Entry("general.type", TEXT, "adapter")]), ModelLoadError,
                             r"general\.type is 'adapter'; expected 'model'"),
    "old quantisations": (model(extra=[Entry("general.quantization_version", UINT32, 1)]), ModelLoadError,
                          r"general\.quantization_version is 1; expected 2"),
    "no layers said": (model(block_count=None), ModelLoadError, r"llama\.block_count is missing"),
    "many layers": (model(block_count=5000), ModelLoadError, r"llama\.block_count is 5000; expected at most 4,096"),
    "no context said": (model(context_length=None), ModelLoadError, r"llama\.context_length is missing"),
    "a context of nothing": (model(context_length=0), ModelLoadError,
                             r"llama\.context_length is 0; expected an integer"),
    "heads that do not divide": (model(**{"attention.head_count": 5, "attention.head_count_kv": 5}), ModelLoadError,
                                 r"llama\.embedding_length is 32; expected a multiple of the number of attention"),
    "keys that do not divide": (model(**{"attention.head_count_kv": 3}), ModelLoadError,
                                r"llama\.attention\.head_count_kv is 3; expected a divisor of attention"),
    "an odd head": (model(**{"attention.key_length": 7, "attention.value_length": 7}), ModelLoadError,
                    r"llama\.attention\.key_length is 7; expected an even head size, not 7"),
    "heads by layer": (model(extra=[llama_key("attention.head_count_kv", ARRAY, (INT32, [2, 4]))],
                             **{"attention.head_count_kv": None}), ModelLoadError,
                       r"llama\.attention\.head_count_kv is an array of 2 int32; expected a positive integer"),
    "experts": (model(expert_count=8), ModelLoadError, r"llama\.expert_used_count is missing; this architecture req"),
    "too many experts": (model(expert_count=5000, expert_used_count=2), ModelLoadError,
                         r"llama\.expert_count is 5000; expected an integer in 1\.\.4,096"),
    "more experts for a token than there are": (model(expert_count=2, expert_used_count=3), ModelLoadError,
                                                r"llama\.expert_used_count is 3; expected at most the number of exp"),
    "experts that are chosen in another way": (
        model(expert_count=2, expert_used_count=2, expert_gating_func=2), ModelLoadError,
        r"llama\.expert_gating_func is 2; expected only keys that the engine reads"),
    "a window": (model(**{"attention.sliding_window": 16}), ModelLoadError, r"llama\.attention\.sliding_window is 16"),
    "a key nobody knows": (model(surprise=1), ModelLoadError, r"llama\.surprise is 1; expected only keys that"),
    "a part of heads rotated": (model(**{"rope.dimension_count": 4}), ModelLoadError,
                                r"llama\.rope\.dimension_count is 4; expected the head size, 8"),
    "values of another size": (model(**{"attention.key_length": 8, "attention.value_length": 16}), ModelLoadError,
                               r"llama\.attention\.value_length is 16; expected 8, the head size of"),
    "another vocabulary": (model(vocab_size=11), ModelLoadError, r"llama\.vocab_size is 11; expected 10, the number"),
    "a scaling nobody knows": (model(extra=[llama_key("rope.scaling.type", TEXT, "ntk")]), ModelLoadError,
                               r"llama\.rope\.scaling\.type is 'ntk'; expected none, linear, yarn or longrope"),
    "linear without a factor": (model(extra=[llama_key("rope.scaling.type", TEXT, "linear")]), ModelLoadError,
                                r"llama\.rope\.scaling\.factor is missing"),
    "yarn with a factor on attention": (
        model(extra=[llama_key("rope.scaling.type", TEXT, "yarn"), llama_key("rope.scaling.factor", FLOAT32, 4.0),
                     llama_key("rope.scaling.original_context_length", UINT32, 16),
                     llama_key("rope.scaling.yarn_attn_factor", FLOAT32, 1.2)]), ModelLoadError,
        r"llama\.rope\.scaling\.yarn_attn_factor is 1\.2\d*; expected only keys that"),
    "an end id that is a text": (model(extra=[Entry("tokenizer.ggml.eos_token_id", TEXT, "2")]), ModelLoadError,
                                 r"tokenizer\.ggml\.eos_token_id is '2'; expected an integer"),
    "a base of 0": (model(extra=[llama_key("rope.freq_base", FLOAT32, 0.0)]), ModelLoadError,
                    r"llama\.rope\.freq_base is 0\.0; expected a number in 1e-30"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_the_metadata_must_not_say(tmp_path, name):
    draft, error, message = WRONG[name]
    path = write(tmp_path, draft)
    with pytest.raises(error, match=message) as caught:
        load_model(path, device="cpu")
    assert str(path) in str(caught.value)


def replaced(name, *stand_ins):
    draft = model()
    draft.tensors = [other for found in draft.tensors for other in ([found] if found.name != name else stand_ins)]
    return draft


@pytest.mark.parametrize("draft, message", [
    (replaced("token_embd.weight"), r"token_embd\.weight is missing; expected the token embeddings"),
    (replaced("blk.1.ffn_up.weight"), r"has no tensor for 'model\.layers\.1\.mlp\.up_proj\.weight'; "
                                        "expected a tensor of shape"),
    (replaced("blk.1.ffn_up.weight", tensor("blk.1.ffn_up.weight", 32, 48)),
     r"'blk\.1\.ffn_up\.weight' has shape \[32, 48\]; "
     r"expected \[48, 32\] for 'model\.layers\.1\.mlp\.up_proj\.weight'"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("blk.2.ffn_up.weight", 48, 32)),
     r"contains tensor 'blk\.2\.ffn_up\.weight', which the model does not use"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("blk.0.ffn_gate.0.weight", 48, 32)),
     r"contains tensor 'blk\.0\.ffn_gate\.0\.weight'; "
     r"expected only tensors that llama\.cpp's converter writes for llama"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("blk.0.ffn_up_exps.weight", 48, 32)),
     r"'blk\.0\.ffn_up_exps\.weight' has shape \[48, 32\]; expected the matrices of at most 4,096 experts"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("blk.00.ffn_up.weight", 48, 32)),
     r"contains tensor 'blk\.00\.ffn_up\.weight'; expected only tensors"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("blk.0.attn_q.bias", 32)),
     r"has no tensor for 'model\.layers\.0\.self_attn\.k_proj\.bias'"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("rope_freqs.weight", 4, kind=F16)),
     r"'rope_freqs\.weight' has shape \[4\] and type F16; expected one dimension of at most"),
    (replaced("output_norm.weight", tensor("output_norm.weight", 32), tensor("rope_freqs.weight", 3)),
     r"rope_freqs\.weight contains \d+ numbers?: \[.*\]; expected a positive number for each of the 4 frequencies"),
], ids=lambda value: "" if isinstance(value, Draft) else value[:30])
def test_tensors_that_are_not_the_models(tmp_path, draft, message):
    path = write(tmp_path, draft)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(path, device="cpu")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("ids, expected", [({}, ()), ({"eos": 2}, (2,)), ({"eos": 2, "eot": 7, "eom": 2}, (2, 7)),
                                           ({"eot": 7}, (7,)), ({"eos": 500, "eot": 7}, (7,))])
def test_end_ids(tmp_path, ids, expected):
    extra = [Entry(f"tokenizer.ggml.{name}_token_id", UINT32, number) for name, number in ids.items()]
    assert read_end_ids(open_checkpoint(write(tmp_path, model(extra=extra))), 10) == expected


def test_what_changes_nothing_is_allowed(tmp_path):
    extra = [Entry("general.name", TEXT, "A name"), Entry("quantize.imatrix.file", TEXT, "x"),
             Entry("somebody.quantized_by", TEXT, "somebody"), llama_key("rope.scaling.type", TEXT, "none"),
             llama_key("expert_count", UINT32, 0), llama_key("attention.causal", BOOL, True),
             llama_key("rope.dimension_count", UINT32, 8), llama_key("vocab_size", UINT32, 10),
             llama_key("attention.sliding_window", UINT32, 64), llama_key("expert_used_count", ARRAY, (INT32, [0, 0])),
             llama_key("rope.scaling.yarn_attn_factor", FLOAT32, 1.0)]
    assert read_spec(write(tmp_path, model(extra=extra))) == read_spec(write(tmp_path, model(), "plain.gguf"))


@pytest.mark.parametrize("architecture, kind, dtype", [
    ("llama", F32, "float32"), ("llama", F16, "float16"), ("llama", 30, "bfloat16"), ("gemma", F16, "bfloat16")])
def test_what_a_gpu_keeps_the_weights_in(tmp_path, architecture, kind, dtype):
    draft = model(architecture)
    draft.tensors = [Tensor("token_embd.weight", [32, 10], kind, bytes(320 * (4 if kind == F32 else 2))),
                     *draft.tensors[1:2]]
    assert read_spec(write(tmp_path, draft)).dtype == dtype


def shards(count=3, **changed) -> dict[str, Draft]:
    """Return a model in shards, with the metadata in the first one."""
    whole = model()
    parts = {}
    for index in range(count):
        own = [Entry("split.no", 2, index), Entry("split.count", 2, count),
               Entry("split.tensors.count", INT32, len(whole.tensors))]
        parts[f"m-{index + 1:05}-of-{count:05}.gguf"] = Draft([*(whole.entries if index == 0 else []), *own],
                                                              whole.tensors[index::count])
    return parts


def write_shards(folder, parts):
    for name, draft in parts.items():
        write(folder, draft, name)
    return folder / "m-00001-of-00003.gguf"


def test_shards_are_one_model(tmp_path):
    first = write_shards(tmp_path, shards())
    whole = write(tmp_path, model())
    device = torch.device("cpu")
    names = [("model.layers.1.self_attn.q_proj.weight", (32, 32)), ("model.norm.weight", (32,))]
    found, expected = (open_checkpoint(path).weights(device, torch.float32) for path in (first, whole))
    for name, shape in names:
        assert torch.equal(found.tensor(name, shape), expected.tensor(name, shape))
    assert found.num_weights == expected.num_weights
    load_model(first, device="cpu")


def test_shards_that_do_not_fit(tmp_path):
    def refusal(parts, name="m-00001-of-00003.gguf"):
        for old in tmp_path.iterdir():
            old.unlink()
        write_shards(tmp_path, parts)
        with pytest.raises(ModelLoadError) as caught:
            open_checkpoint(tmp_path / name)
        return str(caught.value)

    parts = shards()
    assert "is shard 2 of 3; expected the first shard, which has the metadata; pass 'm-00001-of-00003.gguf'" in refusal(
        parts, "m-00002-of-00003.gguf")
    del parts["m-00003-of-00003.gguf"]
    assert "'m-00003-of-00003.gguf' (named by" in refusal(parts)
    parts = shards()
    parts["m-00002-of-00003.gguf"] = parts["m-00003-of-00003.gguf"]
    assert ("m-00002-of-00003.gguf: split.no is 2 and split.count is 3; expected 1 and 3, as in the file's name"
            in refusal(parts))
    parts = shards()
    parts["m-00003-of-00003.gguf"].tensors.append(tensor("token_embd.weight", 10, 32))
    assert "'token_embd.weight' is in" in refusal(parts)
    parts = shards()
    parts["m-00003-of-00003.gguf"].tensors.pop()
    assert "split.tensors.count is 20; expected 19, the number of tensors in the shards" in refusal(parts)
    parts = shards()
    parts["renamed.gguf"] = parts.pop("m-00001-of-00003.gguf")
    assert "is shard 1 of 3, by split.no and split.count; expected a name that ends in -00001-of-00003.gguf" in refusal(
        parts, "renamed.gguf")
    parts = shards()
    parts["m-00001-of-00003.gguf"].entries[-2].value = 60_000
    assert "split.count is 60,000; expected at most 1,000 shards" in refusal(parts)


def test_a_shard_that_leads_out_of_the_folder_is_refused(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    first = write_shards(inside, shards())
    (inside / "m-00002-of-00003.gguf").rename(tmp_path / "elsewhere.gguf")
    (inside / "m-00002-of-00003.gguf").symlink_to(tmp_path / "elsewhere.gguf")
    with pytest.raises(ModelLoadError, match="is a link that leads out of the folder"):
        open_checkpoint(first)


def test_a_folder_of_gguf_files_names_one(tmp_path):
    write(tmp_path, model(), "b.gguf")
    with pytest.raises(ModelLoadError, match="but 1 GGUF file; .*; pass the path of the file, such as 'b.gguf' in"):
        read_spec(tmp_path)
    write(tmp_path, model(), "a.gguf")
    with pytest.raises(ModelLoadError, match="but 2 GGUF files; .*; pass the path of the file, such as 'a.gguf'"):
        read_spec(tmp_path)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelLoadError, match="notes.txt is neither a folder nor a .gguf file"):
        read_spec(tmp_path / "notes.txt")


def test_quantised_tensors_without_the_library(tmp_path, monkeypatch):
    draft = model()
    draft.tensors[0] = Tensor("token_embd.weight", [32, 10], Q8_0, bytes(340))
    quantised, plain = write(tmp_path, draft), write(tmp_path, model(), "plain.gguf")
    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *rest: (_ for _ in ()).throw(ImportError("none"))
                        if name.startswith("gguf") else real(name, *rest))
    load_model(plain, device="cpu")
    with pytest.raises(ModelLoadError, match=r'of type Q8_0, and the gguf library.*pip install "batch-manager\['):
        load_model(quantised, device="cpu")


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path = write(tmp_path, model())
    weights = open_checkpoint(path).weights(torch.device("cpu"), torch.float32)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match=r"model\.gguf has changed since its header was read"):
        weights.tensor("model.layers.1.post_attention_layernorm.weight", (32,))


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q6_K"])
def test_loading_holds_one_copy_and_a_few_rows(tmp_path, kind):
    rows, columns = 16384, 1024
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 60, rows * columns // block * size, np.uint8).tobytes()
    draft = model(embedding_length=columns, **{"attention.head_count": 4})
    draft.tensors = [Tensor("token_embd.weight", [columns, rows], number.value, data),
                     Tensor("blk.0.attn_q.weight", [columns, rows], number.value, data)]
    path = write(tmp_path, draft)
    del data, draft
    weights = open_checkpoint(path).weights(torch.device("cpu"), torch.float32)
    weights.tensor("model.embed_tokens.weight", (rows, columns))     # allocate and import what is needed once
    forget_peak()
    before = Resources.now().resident
    made = weights.tensor("model.embed_tokens.weight", (rows, columns))
    beyond = Resources.now().peak - before - made.nbytes
    assert made.nbytes == 2**26 and beyond < 2**23, f"{beyond / 2**20:.1f} MiB beside the tensor"


def test_a_header_of_many_tensors_is_read_in_a_moment(tmp_path):
    draft = model(extra=[Entry("tokenizer.ggml.tokens", ARRAY, (TEXT, ["token"] * 100_000))])
    draft.tensors += [Tensor(f"x{number}", [1], F32, struct.pack("<f", 0)) for number in range(5000)]
    path = write(tmp_path, draft)
    began = time.thread_time()
    with pytest.raises(ModelLoadError, match="contains tensor 'x0'"):
        load_model(path, device="cpu")
    assert time.thread_time() - began < 2


def of(architecture, *keys, tensors=(), **numbers):
    """Return a function (tmp_path) that writes a GGUF file of this architecture and reads its ModelSpec.

    keys      additional entries of the metadata: (name without the architecture, kind, value)
    tensors   tensors of the file besides the embedding
    """
    def read(tmp_path):
        draft = model(architecture, [Entry(f"{architecture}.{name}", kind, value) for name, kind, value in keys],
                      **numbers)
        draft.entries.append(Entry(f"{architecture}.attention.layer_norm_epsilon", FLOAT32, 1e-5))
        draft.tensors = [tensor("token_embd.weight", 10, 32), *tensors]
        return read_spec(write(tmp_path, draft))
    return read


WINDOW = ("attention.sliding_window", UINT32, 16)
HEAD = {"attention.key_length": 16, "attention.value_length": 16}
PHI3 = (("rope.scaling.original_context_length", UINT32, 64), WINDOW)
STRETCHED = (("rope.scaling.original_context_length", UINT32, 32), WINDOW)
YARN = (("rope.scaling.type", TEXT, "yarn"), ("rope.scaling.factor", FLOAT32, 4.0),
        ("rope.scaling.original_context_length", UINT32, 16))


@pytest.mark.parametrize("read, expected", [
    (of("gemma2", WINDOW, **HEAD), {"scale": 16**-0.5, "windows": [16, None], "logits_softcap": 30.0, "softcap": 50.0}),
    (of("gemma2", WINDOW, **HEAD, block_count=46), {"scale": 8**-0.5, "windows": [16, None] * 23}),
    (of("gemma3", WINDOW, **HEAD, block_count=7), {"scale": 16**-0.5, "windows": [16] * 5 + [None, 16],
                                                   "logits_softcap": None}),
    (of("gemma3", WINDOW, **HEAD, block_count=62), {"scale": 8**-0.5}),
    (of("gemma3", WINDOW, ("attention.sliding_window_pattern", UINT32, 2)), {"windows": [16, None]}),
    (of("gemma3", WINDOW, ("attention.sliding_window_pattern", ARRAY, (BOOL, [False, True]))), {"windows": [None, 16]}),
    (of("cohere2", WINDOW, ("logit_scale", FLOAT32, 0.5), block_count=5), {"windows": [16, 16, 16, None, 16],
                                                                           "logit_scale": 0.5}),
    (of("phi3", *PHI3), {"windows": [16, 16], "max_position_embeddings": 64}),
    (of("phi3", PHI3[0], ("attention.sliding_window", UINT32, 0)), {"windows": [None, None]}),
    (of("phi3", *STRETCHED, tensors=[tensor(f"rope_factors_{which}.weight", 4) for which in ("short", "long")]),
     "long_factor is .*; expected a list of numbers"),
    (of("phi3", *STRETCHED, tensors=[tensor("rope_factors_long.weight", 4)]),
     r"contains rope_factors_long\.weight; expected the tensors rope_factors_short\.weight and rope_"),
    (of("phi3", *STRETCHED), r"contains no rope factors; expected the tensors rope_factors_short\.weight and rope_"),
    (of("phi3"), r"phi3\.attention\.sliding_window is missing"),
    (of("phi3", block_count=32, context_length=4096), {"windows": [2047] * 32}),
    (of("phi3", block_count=32, context_length=131072), r"phi3\.attention\.sliding_window is missing"),
    (of("qwen2", *YARN), {"max_position_embeddings": 64}),
    (of("olmo2"), {"architecture": "Olmo2ForCausalLM", "windows": [None, None]}),
    (of("olmo2", WINDOW, block_count=4), {"architecture": "Olmo3ForCausalLM", "windows": [16, 16, 16, None]}),
    (of("granite", ("logit_scale", FLOAT32, 4.0)), {"scale": 8**-0.5, "logits_divisor": 4.0, "residual_scale": 1.0}),
    (of("granite", ("logit_scale", FLOAT32, 4.0), ("rope.scaling.finetuned", BOOL, False)),
     r"granite\.rope\.scaling\.finetuned is False; expected true"),
    (of("granite"), r"granite\.logit_scale is missing"),
    (of("command-r"), r"command-r\.logit_scale is missing"),
    (of("gptneox", ("rope.dimension_count", UINT32, 4), ("use_parallel_residual", BOOL, False),
        **{"attention.head_count_kv": None}), {"rotary_size": 4, "is_parallel": False}),
    (of("gptneox", **{"attention.head_count_kv": None}), r"gptneox\.use_parallel_residual is missing"),
    (of("gptneox", ("use_parallel_residual", BOOL, True)), r"gptneox\.attention\.head_count_kv is 2; expected 4"),
    (of("stablelm", ("rope.dimension_count", UINT32, 6)), {"rotary_size": 6, "is_parallel": True}),
    (of("stablelm", ("rope.dimension_count", UINT32, 10)), r"stablelm\.rope\.dimension_count is 10; expected at most"),
    (of("stablelm", **HEAD), r"stablelm\.attention\.key_length is 16; expected 8, embedding_length"),
    (of("falcon", ("tensor_data_layout", TEXT, "other")), r"falcon\.tensor_data_layout is 'other'; expected 'jploski'"),
    (of("falcon", ("tensor_data_layout", TEXT, "jploski")), {"num_kv_heads": 2, "has_own_norms": False}),
    (of("bloom", **{"attention.head_count_kv": 4}), r"bloom\.feed_forward_length is 48; expected 128, four times"),
    (of("smollm3", block_count=5), {"rotates": (True, True, True, False, True)}),
], ids=lambda value: "" if callable(value) else str(value)[:40])
def test_what_an_architectures_own_keys_become(tmp_path, read, expected):
    if isinstance(expected, str):
        with pytest.raises(ModelLoadError, match=expected):
            read(tmp_path)
        return
    spec = read(tmp_path)
    first = spec.attention[0]
    own = {"scale": first.scale, "softcap": first.softcap, "windows": [layer.window for layer in spec.attention]}
    assert {name: own[name] if name in own else getattr(spec, name) for name in expected} == expected
