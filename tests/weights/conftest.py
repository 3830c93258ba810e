"""Fixture `checkpoint`: a small valid checkpoint of a Llama, which tests write to a folder after damaging it."""

import json

import pytest
import torch
from safetensors.torch import save_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
          "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}


def tensors_of(config, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,),
              "lm_head.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.input_layernorm.weight": (hidden,), f"{name}.post_attention_layernorm.weight": (hidden,),
                   f"{name}.self_attn.q_proj.weight": (8, hidden), f"{name}.self_attn.k_proj.weight": (4, hidden),
                   f"{name}.self_attn.v_proj.weight": (4, hidden), f"{name}.self_attn.o_proj.weight": (hidden, 8),
                   f"{name}.mlp.gate_proj.weight": (inner, hidden), f"{name}.mlp.up_proj.weight": (inner, hidden),
                   f"{name}.mlp.down_proj.weight": (hidden, inner)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class Checkpoint:
    """The configuration and the tensors of a checkpoint. Tests change them, and then write them to `folder`.

    `write` writes one tensor file, `write_shards` writes two and an index.
    """

    def __init__(self, folder):
        self.folder, self.config, self.tensors = folder, dict(CONFIG), tensors_of(CONFIG)

    def write_config(self):
        (self.folder / "config.json").write_text(json.dumps(self.config))

    def write(self):
        self.write_config()
        save_file(self.tensors, self.folder / "model.safetensors")
        return self.folder

    def write_shards(self, weight_map=None):
        self.write_config()
        names = sorted(self.tensors)
        shards = {"first.safetensors": names[:9], "second.safetensors": names[9:]}
        for shard, members in shards.items():
            save_file({name: self.tensors[name] for name in members}, self.folder / shard)
        honest = {name: shard for shard, members in shards.items() for name in members}
        index = {"metadata": {"total_size": 1}, "weight_map": {**honest, **(weight_map or {})}}
        (self.folder / "model.safetensors.index.json").write_text(
            json.dumps({**index, "weight_map": {k: v for k, v in index["weight_map"].items() if v != "absent"}}))
        return self.folder


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    return Checkpoint(folder)
