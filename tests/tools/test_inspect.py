"""inspect_model reports the settings and sizes of an engine, and refuses the models that an engine refuses."""

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import batch_manager  # noqa: E402
from batch_manager import ConfigError, InsufficientMemoryError, KvCacheConfig, TrtGptModelOptionalParams  # noqa: E402
from batch_manager.models.loading import load_model  # noqa: E402
from batch_manager.runtime import packing  # noqa: E402
from batch_manager.runtime.build_backend import build_native_backend  # noqa: E402
from batch_manager.tools import __main__ as dispatcher  # noqa: E402
from batch_manager.tools.inspect import OPTION_OF, REWORDED, advice_of, main  # noqa: E402
from batch_manager.tools.model_facts import described, inspect_model  # noqa: E402
from tests.harness import forked  # noqa: E402
from tests.tools.test_shared_options import parser_of  # noqa: E402

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "austen-4m"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    from tests.extras.gguf_files import write_model

    return write_model(tmp_path_factory.mktemp("inspect") / "model.gguf")


@pytest.mark.parametrize(("kind", "dtype", "quantization", "kv"), [
    *((kind, dtype, None, {}) for kind in ("folder", "gguf") for dtype in ("auto", "bfloat16", "float16")),
    ("folder", "bfloat16", "int8", {}), ("folder", "float32", "int4", {"quantized_activations": "int8"}),
    ("folder", "bfloat16", None, {"kv_cache_dtype": "fp8"}),
    *(("folder", dtype, None, {"tokens_per_block": 8}) for dtype in ("auto", "bfloat16"))])       # steps in torch
def test_it_says_what_an_engine_then_has(kind, dtype, quantization, kv, request):
    path = MODEL if kind == "folder" else request.getfixturevalue("gguf_file")
    activations = kv.get("quantized_activations")
    options = {"device": "cpu", "dtype": dtype, "max_seq_len": 256, "quantization": quantization,
               "quantized_activations": activations}
    kv = KvCacheConfig(**{name: value for name, value in kv.items() if name != "quantized_activations"})
    facts = inspect_model(path, kv=kv, **options)
    params = TrtGptModelOptionalParams(kv_cache_config=kv, **options)
    backend = build_native_backend(path, params, layout=packing.packed,
                                   num_slots=TrtGptModelOptionalParams().max_batch_size)
    try:
        info = backend.info
        assert (facts["num_blocks"], facts["tokens_per_block"]) == (info.num_blocks, info.tokens_per_block)
        assert (facts["vocab_size"], tuple(facts["end_ids"])) == (info.vocab_size, info.end_ids)
        assert (facts["dtype"], facts["device"], facts["architecture"]) == (info.dtype, info.device, info.architecture)
        assert (facts["not_compiled"], facts["not_captured"]) == (info.not_compiled, info.not_captured)
        assert facts["absent"] == info.absent
        assert facts["kv_cache_dtype"] == info.kv_cache_dtype == (
            info.dtype if kv.kv_cache_dtype == "auto" else "fp8_e4m3")
        told = described(facts).splitlines()
        assert all(any("without " in line and name in line and line.endswith(f": {reason}") for line in told)
                   for name, reason in info.absent.items()), told
        assert facts["max_seq_len"] == info.max_seq_len == 256
        assert (facts["quantized_activations"] or "") == info.quantized_activations == (activations or "")
        assert activations is None or "ones are multiplied with activations in int8" in "\n".join(told)
        assert quantization is None or f"matrices of layers are quantised to {quantization}" in "\n".join(told)
        assert facts["pool_bytes"] == backend._parts.pool.nbytes
        assert facts["weight_bytes"] + facts["pool_bytes"] == backend.memory_usage().cpu
    finally:
        backend.close()
    assert facts["block_bytes"] * facts["num_blocks"] == facts["pool_bytes"]
    assert facts["stored_types"] == ({"BF16": 38} if kind == "folder" else {"Q8_0": 16, "F32": 5})
    assert facts["sequences_by_context"]["256"] == facts["num_blocks"] // (256 // facts["tokens_per_block"])


def test_fp8_doubles_the_blocks_of_bfloat16(capsys):
    options = [str(MODEL), "--dtype", "bfloat16", "--device", "cpu", "--free-memory-bytes", f"{64 << 20}",
               "--max-num-tokens", "256", "--max-batch-size", "64"]
    blocks, block_bytes = {}, {}
    for kind in ("auto", "fp8"):
        assert main([*options, "--report", "json", "--kv-cache-dtype", kind]) == 0
        facts = json.loads(capsys.readouterr().out)
        blocks[kind], block_bytes[kind] = facts["num_blocks"], facts["block_bytes"]
    assert 2 * block_bytes["fp8"] == block_bytes["auto"] and blocks["fp8"] >= 2 * blocks["auto"]
    assert facts["pool_bytes"] == blocks["fp8"] * facts["block_bytes"]
    assert main([*options, "--kv-cache-dtype", "fp8"]) == 0
    assert "keys and values in fp8_e4m3" in capsys.readouterr().out
    of_gpu = inspect_model(MODEL, device="cuda", free_bytes=1 << 34, kv=KvCacheConfig(kv_cache_dtype="fp8"))
    assert (of_gpu["kv_cache_dtype"], of_gpu["block_bytes"]) == ("fp8_e4m3", block_bytes["fp8"])


@pytest.mark.parametrize(("family", "wanted", "says"), [
    ("Helium", "auto", "transformers"), ("Llama", "transformers", "transformers"), ("Llama", "native", "native")])
def test_it_says_whose_class_computes(tmp_path, family, wanted, says):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path)
    facts = inspect_model(tmp_path, device="cpu", model_implementation=wanted)
    params = TrtGptModelOptionalParams(device="cpu", model_implementation=wanted)
    backend = build_native_backend(tmp_path, params, layout=packing.packed, num_slots=params.max_batch_size)
    try:
        assert facts["model_implementation"] == backend.info.model_implementation == says
        assert facts["weight_bytes"] + facts["pool_bytes"] == backend.memory_usage().cpu
        assert facts["num_blocks"] == backend.info.num_blocks and facts["end_ids"] == list(backend.info.end_ids)
    finally:
        backend.close()


def test_bytes_of_weights_are_those_that_torch_takes(monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent")
    facts = inspect_model(MODEL, device="cpu")
    loaded = load_model(MODEL, device="cpu", compiled_step=facts["steps"] == "compiled")
    assert facts["weight_bytes"] == loaded.weight_bytes


def test_a_copy_of_the_embedding_is_part_of_the_weights_wherever_their_size_is_told():
    """A host with less memory than the weights and the copy gets a refusal with the size of both together."""
    facts = inspect_model(MODEL, device="cpu")
    copied = "; " if facts["steps"] != "compiled" else " and 4.0 MiB for a copy of the embedding; "
    assert f"{facts['weight_bytes'] / 2**20:.1f} MiB, 3,950,848 elements in the checkpoint{copied}" in described(facts)
    assert facts["weight_bytes"] == 4 * facts["num_weights"] + facts["embedding_copy_bytes"]
    with pytest.raises(InsufficientMemoryError, match=f"they take {facts['weight_bytes']:,} bytes"):
        inspect_model(MODEL, device="cpu", free_bytes=facts["weight_bytes"] - 1)
    with pytest.raises(InsufficientMemoryError, match="the KV cache needs 1 block of 64 tokens, 262,144 bytes") as told:
        inspect_model(MODEL, device="cpu", free_bytes=facts["weight_bytes"] + 1000)
    assert told.value.fix == "free memory, or use a smaller model or dtype"


def test_a_machine_that_is_elsewhere_is_planned_for():
    facts = inspect_model(MODEL, device="cuda", free_bytes=10**9)
    assert facts["dtype"] == facts["checkpoint_dtype"] == "bfloat16" and facts["steps"] == "triton"
    assert facts["free_bytes"] == 10**9 and facts["pool_bytes"] < 9 * 10**8 < 10 * facts["pool_bytes"]
    fewer = inspect_model(MODEL, device="cuda", free_bytes=5 * 10**8)
    assert 0 < fewer["num_blocks"] < facts["num_blocks"]
    assert facts["absent"] == {"compiled": "the device is cuda", "padded": "TrtGptModelType.V1 alone pads steps"}
    assert list(facts["sequences_by_context"]) == ["2048", "1024", "512"]
    assert facts["sequences_by_context"]["2048"] == facts["num_blocks"] // 32


def test_the_device_that_is_elsewhere_has_a_name_that_devices_have():
    assert inspect_model(MODEL, device="cuda:7", free_bytes=10**9)["device"] == "cuda:7"
    for name in ("cuda:", "cuda:abc", "cuda:-1", "cuda:1:2", "tpu"):
        with pytest.raises(ConfigError, match=f"device is '{name}'"):
            inspect_model(MODEL, device=name, free_bytes=10**9)
    for free_bytes in (0, -1):
        with pytest.raises(ConfigError, match=f"the free memory to plan for is {free_bytes} bytes"):
            inspect_model(MODEL, free_bytes=free_bytes)


def test_a_reader_that_goes_and_a_full_disk_are_no_crash():
    command = [sys.executable, "-m", "batch_manager.tools", "inspect", MODEL, "--device", "cpu"]
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe, open("/dev/full", "w") as full:
        for run, out, status, told in (
                (forked.run, pipe, 0, ""),
                (subprocess.run, full, 2, "batch-manager inspect: the standard output cannot be written: No space left "
                                          "on device; direct it elsewhere\n")):
            done = run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
            assert (done.returncode, done.stderr) == (status, told)


def test_the_command_prints_text_or_json(capsys):
    assert dispatcher.main(["inspect", str(MODEL), "--device", "cpu"]) == 0
    told = capsys.readouterr().out
    assert "LlamaForCausalLM, native: batch_manager.models.llama.Llama" in told and "end ids: 1\n" in told
    assert "4,096 tokens" in told and "MiB" in told
    assert main([str(MODEL), "--device", "cpu", "--report", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_layers"] == 4


def test_a_step_that_may_not_fit_is_told(capsys):
    facts = inspect_model(MODEL, device="cpu", max_num_tokens=10**9, free_bytes=4 << 30)
    assert facts["step_bytes"] > facts["set_aside_bytes"] == (facts["free_bytes"] - facts["weight_bytes"]) // 2
    assert "are set aside" in described(facts)
    assert "are set aside" not in described(inspect_model(MODEL, device="cpu", free_bytes=4 << 30))


@pytest.mark.parametrize(("change", "options", "fact"), [
    ({"architectures": ["UnheardOfForCausalLM"]}, [], "UnheardOfForCausalLM"),
    ({"num_hidden_layers": "four"}, [], "num_hidden_layers"),
    ({"num_hidden_layers": 5}, [], "has no tensor 'model.layers.4."),
    ({"num_hidden_layers": 3}, [], "which the model does not use"),
    ({"intermediate_size": 1024}, [], "has shape"),
    ({}, ["--free-memory-bytes", "1000000"], "do not fit"),
    ({}, ["--free-memory-bytes", "20000000"], "the KV cache needs"),
    ({}, ["--max-seq-len", "4096"], "max_seq_len is 4,096"),
    ({}, ["--max-batch-size", "99999999999", "--free-memory-bytes", "4000000000"],
     "the state of 99,999,999,999 sequences takes"),
    (None, [], "model.safetensors"),
])
def test_what_an_engine_refuses_is_refused_in_three_parts(tmp_path, capsys, change, options, fact):
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **(change or {})}))
    if change is not None:
        (tmp_path / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes())
    assert main([str(tmp_path), "--device", "cpu", *options]) == 1
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and fact in lines[0] and lines[0].startswith("cannot run: ")
    assert [line.strip().partition(":")[0] for line in lines[1:]] == ["expected", "way out"][: len(lines) - 1]
    assert len(lines) > 1
    assert main([str(tmp_path), "--device", "cpu", "--report", "json", *options]) == 1
    refused = json.loads(capsys.readouterr().out)["refused"]
    expectation = refused["expectation"].removeprefix("expected ")     # the label of the line has the word
    assert fact in refused["fact"]
    assert [expectation, refused["way_out"]][: len(lines) - 1] == [line[12:] for line in lines[1:]]


# Parameters that this program leaves at their defaults, which no error forbids: their advice is never printed.
AT_THEIR_DEFAULTS = {"deterministic", "cuda_graphs", "cpu_compile", "host_cache_size", "max_num_sequences",
                     "max_beam_width", "peft_cache_config", "tokens_per_block", "disk_cache_path", "disk_cache_size",
                     "disk_cache_read_only", "enable_block_reuse"}
# Advice in errors of later steps, when an engine starts or runs.
OF_AN_ENGINE = {"thread_count.py", "weight_form.py", "torch_fixed_tiles.py"}


def pieces_of_advice():
    """Yield (file, text) of each way out that an error of a module of a model has. Values in a text are left out."""
    package = Path(batch_manager.__file__).parent
    for path in (path for name in ("config", "models", "weights", "runtime", "layers", "attention")
                 for path in sorted((package / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            called = getattr(node, "func", None)
            if getattr(called, "id", getattr(called, "attr", "")).endswith("Error"):
                for fix in [*node.args[2:3], *(word.value for word in node.keywords if word.arg == "fix")]:
                    texts = [one.value for one in ast.walk(fix) if isinstance(one, ast.Constant)]
                    yield path.name, "".join(text for text in texts if isinstance(text, str))


def test_every_piece_of_advice_names_an_option_of_this_program():
    options = {name for action in parser_of("inspect", "")._actions for name in action.option_strings}
    assert set(OPTION_OF.values()) <= options
    parameters = {field.name for kind in (TrtGptModelOptionalParams, KvCacheConfig) for field in fields(kind)}
    advice = list(pieces_of_advice())
    assert len(advice) > 50
    for file, text in advice:
        shown = advice_of(text)
        assert set(re.findall(r"--[a-z-]+", shown)) <= options | {"--", "--upgrade"}, text
        if file not in OF_AN_ENGINE:
            named = set(re.findall(r"[a-z_]+(?![a-z_(])", shown.replace("(max_tokens=...)", ""))) & parameters
            assert named - {"device", "dtype", "quantization", "kv_cache_dtype"} <= AT_THEIR_DEFAULTS, (file, text)
    for words, _ in REWORDED:
        assert any(words in text for _, text in advice), words


@pytest.mark.parametrize("device, way_out", [("cpu:1", "use --device cpu"), ("npu", "leave --device out")])
def test_advice_on_the_device_is_an_option(device, way_out, capsys):
    assert main([str(MODEL), "--device", device]) == 1
    assert way_out in capsys.readouterr().err


def test_no_weights_are_loaded(monkeypatch):
    from batch_manager.weights import safetensors_source

    class Unreadable:
        def __init__(self, *_, **__):
            pass

        def get_tensor(self, name):
            raise AssertionError(f"{name} was read")

    monkeypatch.setattr(safetensors_source, "safe_open", Unreadable)
    facts = inspect_model(MODEL, device="cpu")
    assert facts["num_weights"] > 3_000_000 and facts["tensors_are_checked"]


def test_models_of_transformers_are_told_to_be_unchecked(capsys):
    told = described(inspect_model(MODEL, device="cpu") | {"tensors_are_checked": False})
    assert "the tensors are checked only when the model is loaded" in told


def test_a_file_that_is_not_there_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot be opened"):
        inspect_model("/nowhere/a.gguf")
