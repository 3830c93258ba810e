"""Random LoRA adapters: of transformers models by peft, and their content as the package takes it."""

import copy
from random import Random

import numpy as np

from batch_manager.adapter_values import MODULE_NAMES, AdapterContent, AdapterPart, locate_projection

RANKS = (1, 2, 3, 5, 8, 16, 33, 64)


def content_of(parts, dtype="float32"):
    parts = tuple(parts)
    return AdapterContent(digest=b"", dtype=dtype, parts=parts, num_pages=max((p.size for p in parts), default=1),
                          num_bytes=sum(p.a.nbytes + p.b.nbytes for p in parts))


def projections_of(model):
    """Return the names of a transformers model's projections that adapters can change."""
    return [name for name, module in model.named_modules()
            if locate_projection(name) is not None and getattr(module, "weight", None) is not None]


def with_adapter(model, seed, *, share=0.6, ranks=RANKS, chosen=None):
    """Return (a copy of a transformers model with a random adapter by peft, the adapter's parts).

    share    of the projections that the adapter changes
    chosen   names of these projections; None: drawn
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    draw, names = Random(seed), projections_of(model)
    if chosen is None:
        chosen = [name for name in names if draw.random() < share] or names[:1]
    own = {name: draw.choice(ranks) for name in chosen}
    with_peft = get_peft_model(copy.deepcopy(model), LoraConfig(
        r=1, target_modules=list(own), rank_pattern=own,
        lora_alpha=draw.choice([2, 8]), use_rslora=draw.random() < 0.3, init_lora_weights=False,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()))).eval()
    generator, parts = torch.Generator().manual_seed(seed), []
    for name in chosen:
        layer = with_peft.base_model.model.get_submodule(name)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert len(a) == own[name]
        with torch.no_grad():
            a.copy_(torch.randn(a.shape, generator=generator) / a.shape[1] ** 0.5)
            b.copy_(torch.randn(b.shape, generator=generator) / len(a) ** 0.5 / layer.scaling["default"])
            factor = (b * layer.scaling["default"]).numpy()
        parts += parts_of(name, a.detach().numpy(), factor)
    return with_peft, parts


def with_adapter_of_size(model, seed, rank):
    """Return the parts of a random adapter of all projections, of one rank."""
    draw = np.random.default_rng(seed)
    return [AdapterPart(part.module, part.layer, draw.normal(size=(rank, part.a.shape[1])).astype(np.float32) / 8,
                        draw.normal(size=(len(part.b), rank)).astype(np.float32) / 4)
            for name in projections_of(model)
            for part in parts_of(name, np.empty((1, model.get_submodule(name).weight.shape[1]), np.float32),
                                 np.empty((model.get_submodule(name).weight.shape[0], 1), np.float32))]


def parts_of(name, a, b):
    """Return the parts of a projection: several for a fused one whose modules share A."""
    layer, modules = locate_projection(name)
    return [AdapterPart(module, layer, a, part) for module, part in zip(modules, np.split(b, len(modules)))]


def random_content(modules, seed=0, rank=2):
    """Return an adapter of all modules, an AdapterModules, whose outputs are as large as those of the projections."""
    draw = np.random.default_rng(seed)
    return content_of(AdapterPart(name, layer, draw.normal(size=(rank, size[0])).astype(np.float32) / size[0] ** 0.5,
                                  draw.normal(size=(size[1], rank)).astype(np.float32) / rank ** 0.5)
                      for name, layers in modules.sizes.items() for layer, size in enumerate(layers)
                      if size is not None and not (name == "attn_qkv" and "attn_q" in modules.sizes))


def tensors_of(parts):
    """Return the tensors of a request for parts in float32."""
    rows = [np.concatenate([part.a.ravel(), part.b.ravel()]) for part in parts]
    weights = np.zeros((len(rows), max(map(len, rows))), np.float32)
    for stored, row in zip(weights, rows):
        stored[: len(row)] = row
    config = [[MODULE_NAMES.index(part.module), part.layer, part.size] for part in parts]
    return {"lora_weights": weights, "lora_config": np.array(config, np.int32)}
