"""The small model in the repository is complete, can be loaded and is trained."""

import importlib.util
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

transformers = pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL_FOLDER = REPOSITORY / "examples" / "models" / "austen-4m"
TRAINING_SCRIPT = REPOSITORY / "examples" / "train_tiny_model.py"
TEXT = REPOSITORY / "examples" / "data" / "austen.txt.xz"


@pytest.fixture(scope="module")
def training_script():
    """The training script as a module, which knows the held-out passages."""
    specification = importlib.util.spec_from_file_location("train_tiny_model", TRAINING_SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def held_out_passages(training_script):
    return training_script.split_passages(training_script.read_passages(TEXT))[1]


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)


@pytest.fixture(scope="module")
def loaded():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, output_loading_info=True)


def expected_weight_names(config):
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        names |= {prefix + f"self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {prefix + f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {prefix + "input_layernorm.weight", prefix + "post_attention_layernorm.weight"}
    return names


def test_folder_is_complete_and_small():
    names = {path.name for path in MODEL_FOLDER.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) <= 10_000_000


def test_weights_file_is_plain_bfloat16():
    config = json.loads((MODEL_FOLDER / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    with safe_open(MODEL_FOLDER / "model.safetensors", framework="pt") as weights:
        # The output layer is the embedding table, so it has no entry of its own.
        assert set(weights.keys()) == expected_weight_names(config)
        assert all(weights.get_slice(name).get_dtype() == "BF16" for name in weights.keys())  # noqa: SIM118


def test_transformers_loads_every_weight(loaded):
    model, information = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not information.get(kind), kind
    assert type(model).__name__ == "LlamaForCausalLM"
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_tokenizer_round_trips(tokenizer, held_out_passages):
    for text in (held_out_passages[0], held_out_passages[-1], "Café, 日本語 and 🙂\n\tall   survive.\r\n"):
        tokens = tokenizer(text)["input_ids"]
        assert tokens[0] == tokenizer.bos_token_id == 0
        assert tokenizer.eos_token_id == 1
        assert tokenizer.decode(tokens, skip_special_tokens=True) == text


def test_held_out_text_is_predicted_well(loaded, tokenizer, held_out_passages, training_script):
    model = loaded[0]
    encoded, byte_count = [], 0
    for passage in held_out_passages[::2]:
        encoded.append(torch.tensor(tokenizer(passage)["input_ids"] + [tokenizer.eos_token_id]))
        byte_count += len(passage.encode("utf-8"))

    class Logits(torch.nn.Module):
        """A wrapper of the transformers model with the interface of the training script's model: tokens -> logits."""

        def forward(self, tokens):
            return model(tokens, use_cache=False).logits

    # This model needs 1.34 bits per byte for the passages. An untrained model needs about 2.9 bits. A model that only
    # has the frequency of each token needs about 2.3 bits.
    assert training_script.held_out_bits_per_byte(Logits(), encoded, byte_count) < 1.45


def test_model_stops_by_itself(loaded, tokenizer):
    model = loaded[0]
    prompt = tokenizer("It was a fine evening, and", return_tensors="pt")
    torch.manual_seed(0)
    outputs = model.generate(
        **prompt, max_new_tokens=600, do_sample=True, temperature=0.7, top_k=40, num_return_sequences=8
    )
    assert (outputs == tokenizer.eos_token_id).any(dim=1).sum() >= 4


def test_training_script_writes_a_loadable_folder(tmp_path):
    folder = tmp_path / "smoke"
    text = tmp_path / "text.txt.xz"
    text.write_bytes(lzma.compress(lzma.decompress(TEXT.read_bytes())[:500_000]))
    command = [sys.executable, str(TRAINING_SCRIPT), "--output", str(folder), "--data", text, "--max-steps", "2"]
    command += ["--batch-tokens", "256", "--length", "64", "--final-length", "64"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "done: 2 steps" in result.stdout
    model, information = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not information["missing_keys"] and not information["unexpected_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("It was", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > prompt["input_ids"].shape[1]
