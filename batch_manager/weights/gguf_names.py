"""Maps Hugging Face's tensor names to the tensors of a GGUF file.

llama.cpp's converter renames every tensor and changes some: it interleaves the rotated halves of Llama's queries and
keys, adds one to Gemma's norms, transposes GPT-2's matrices, and groups the rows of fused projections into queries,
keys and values. A `Location` describes how to undo these changes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ..errors import ModelLoadError
from .folder import CheckpointFile
from .gguf_header import GgufTensor
from .json_file import shown

MAX_EXPERTS = 4096                 # of a layer


@dataclass(frozen=True, slots=True)
class Heads:
    """The numbers of query and key heads, and the head size, on which the order of rows in the file depends."""

    queries: int
    keys: int
    size: int


@dataclass(frozen=True, slots=True)
class Location:
    """Where a Hugging Face tensor is in the GGUF file, and how to restore it.

    tensor       name of the GGUF tensor
    rows         rows of the GGUF tensor that belong to the Hugging Face tensor, of all its matrices one after the
                 other; None: all
    is_one_row   whether the Hugging Face tensor is the single row in `rows`, without the first dimension
    order        () -> [rows] int64, the GGUF row of each Hugging Face row; None: the same order. Called when the tensor
                 is read, after its shape is checked
    transposed   whether the GGUF tensor is the transpose of the Hugging Face tensor
    offset       number to add to every element of the GGUF tensor
    """

    tensor: str
    rows: range | None = None
    is_one_row: bool = False
    order: Callable[[], torch.Tensor] | None = None
    transposed: bool = False
    offset: float = 0.0


# Name in a GGUF block -> name in a Hugging Face layer, both without ".weight" or ".bias".
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_QKV = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA = {**_NORMS, **_QKV, "attn_output": "self_attn.o_proj", **_GATED}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA2 = {**_LLAMA, "ffn_norm": "pre_feedforward_layernorm", **_POST_NORMS}
_OLMO2 = {**_QKV, "attn_output": "self_attn.o_proj", **_GATED, **_QK_NORMS, **_POST_NORMS}
_COHERE = {name: counterpart for name, counterpart in _LLAMA.items() if name != "ffn_norm"}
_STARCODER2 = {**_NORMS, **_QKV, "attn_output": "self_attn.o_proj", "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_PHI2 = {"attn_norm": "input_layernorm", **_QKV, "attn_qkv": "self_attn.qkv", "attn_output": "self_attn.dense",
         "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"}
_PHI3 = {**_NORMS, "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
         "ffn_down": "mlp.down_proj"}
_GPT2 = {"attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
         "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_GPT_NEOX = {**_NORMS, "attn_qkv": "attention.query_key_value", "attn_output": "attention.dense",
             "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_FALCON = {"attn_norm": "input_layernorm", "attn_qkv": "self_attention.query_key_value",
           "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
# Experts: the place in a name is for the number of the expert.
_ROUTED = {"ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj",
           "ffn_up_exps": "mlp.experts.{}.up_proj", "ffn_down_exps": "mlp.experts.{}.down_proj"}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2"}
_GRANITE_MOE = {name: counterpart.replace("mlp", "block_sparse_moe") for name, counterpart in _ROUTED.items()}
_MIXTURE = {name: counterpart for name, counterpart in _LLAMA.items() if name not in _GATED}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
                  "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj"}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def halves_apart(heads: int, size: int) -> torch.Tensor:
    """Return the GGUF row [rows] of each Hugging Face row of Llama's query or key matrix.

    The file interleaves the rows of the two halves of each head.
    """
    rows = torch.arange(heads * size, dtype=torch.int64, device="cpu")
    return rows.view(heads, size // 2, 2).transpose(1, 2).reshape(-1)


def parts_by_key_head(heads: Heads) -> torch.Tensor:
    """Return the GGUF row [rows] of each Hugging Face row of a fused projection of queries, keys and values.

    Hugging Face's tensor has the queries, the key and the value of the first key head, then those of the next key head.
    The file has all queries, then all keys, then all values.
    """
    rows = torch.arange((heads.queries + 2 * heads.keys) * heads.size, dtype=torch.int64, device="cpu")
    queries, keys, values = rows.view(-1, heads.size).split([heads.queries, heads.keys, heads.keys])
    return torch.cat([part.reshape(heads.keys, -1) for part in (queries, keys, values)], 1).reshape(-1)


Order = Callable[[], torch.Tensor] | None


def _llama_rows(name: str, heads: Heads) -> Order:
    if name not in ("attn_q", "attn_k"):
        return None
    return partial(halves_apart, heads.queries if name == "attn_q" else heads.keys, heads.size)


def _fused_rows(name: str, heads: Heads) -> Order:
    return partial(parts_by_key_head, heads) if name == "attn_qkv" else None


@dataclass(frozen=True, slots=True)
class Names:
    """The tensor names of one architecture, and the converter's changes to its tensors.

    layer       GGUF name -> Hugging Face's name, for tensors in a layer, without the prefix of the layer. A name with
                "{}" is that of a matrix of one expert; the GGUF tensor has those of all experts, [experts, out, in]
    layers      prefix of the layer's number in Hugging Face's names, such as "model.layers"
    outside     GGUF name -> Hugging Face's name, for tensors outside the layers
    rows        (GGUF name in a layer, heads) -> order of the tensor's rows, as `order` of Location
    offset      number to add to the file's norm weights, as `offset` of Location
    transposed  GGUF names of matrices in a layer that the converter transposes
    by_head     GGUF names of matrices in a layer that Hugging Face splits by row, into one tensor for each head
    two_norms   entries that replace or extend `layer` in models whose layers have two parallel norms
    ignored     names of GGUF tensors that no Hugging Face tensor needs, because only the configuration reads them
    """

    layer: Mapping[str, str]
    layers: str = "model.layers"
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    rows: Callable[[str, Heads], Order] = lambda name, heads: None
    offset: float = 0.0
    transposed: frozenset[str] = frozenset()
    by_head: frozenset[str] = frozenset()
    two_norms: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()


_FACTORS = frozenset({"rope_freqs.weight"})
NAMES = {
    "llama": Names({**_LLAMA, **_MIXTRAL}, rows=_llama_rows, ignored=_FACTORS),
    "qwen2moe": Names({**_MIXTURE, **_ROUTED, **_SHARED_EXPERT}),
    "qwen3moe": Names({**_MIXTURE, **_ROUTED, **_QK_NORMS}),
    "olmoe": Names({**_MIXTURE, **_ROUTED, **_QK_NORMS}),
    "granitemoe": Names({**_MIXTURE, **_GRANITE_MOE, "ffn_gate_inp": "block_sparse_moe.router.layer"},
                        rows=_llama_rows, ignored=_FACTORS),
    "smollm3": Names(_LLAMA, rows=_llama_rows, ignored=_FACTORS),
    "granite": Names(_LLAMA, rows=_llama_rows, ignored=_FACTORS),
    "qwen2": Names(_LLAMA),
    "qwen3": Names({**_LLAMA, **_QK_NORMS}),
    "gemma": Names(_LLAMA, offset=-1.0),
    "gemma2": Names(_GEMMA2, offset=-1.0),
    "gemma3": Names({**_GEMMA2, **_QK_NORMS}, offset=-1.0),
    "olmo2": Names(_OLMO2),
    "command-r": Names({**_COHERE, **_QK_NORMS}),
    "cohere2": Names(_COHERE),
    "stablelm": Names({**_LLAMA, "attn_q_norm": "self_attn.q_layernorm.norms",
                       "attn_k_norm": "self_attn.k_layernorm.norms"}, by_head=frozenset(_QK_NORMS)),
    "starcoder2": Names(_STARCODER2),
    "phi2": Names(_PHI2, outside={**_OUTSIDE, "output_norm": "model.final_layernorm"}),
    "phi3": Names(_PHI3, ignored=frozenset({"rope_factors_short.weight", "rope_factors_long.weight"})),
    "gpt2": Names(_GPT2, layers="transformer.h", outside={
        "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
        "output": "lm_head"}, transposed=frozenset({"attn_qkv", "attn_output", "ffn_up", "ffn_down"})),
    "falcon": Names(_FALCON, layers="transformer.h", rows=_fused_rows, two_norms={
        "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}, outside={
            "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head"}),
    "bloom": Names({**_FALCON, "ffn_norm": "post_attention_layernorm"}, layers="transformer.h", rows=_fused_rows,
                   outside={"token_embd": "transformer.word_embeddings", "output": "lm_head",
                            "token_embd_norm": "transformer.word_embeddings_layernorm",
                            "output_norm": "transformer.ln_f"}),
    "gptneox": Names(_GPT_NEOX, layers="gpt_neox.layers", rows=_fused_rows, outside={
        "token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"}),
}
_IN_A_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_OUTSIDE_BLOCKS = re.compile(r"(\w+)\.(weight|bias)")


def locate(architecture: str, tensors: Mapping[str, GgufTensor], heads: Heads,
           file: CheckpointFile) -> dict[str, Location]:
    """Return Hugging Face's name -> Location for all tensors of a GGUF file.

    Raises ModelLoadError for a tensor that `architecture` does not use.
    """
    names, found = NAMES[architecture], {}
    layer = {**names.layer, **(names.two_norms if "blk.0.attn_norm_2.weight" in tensors else {})}
    for tensor in tensors:
        if tensor in names.ignored:
            continue
        inside, outside = _IN_A_BLOCK.fullmatch(tensor), _OUTSIDE_BLOCKS.fullmatch(tensor)
        if inside and inside[2] in layer:
            _, name, kind = inside.groups()
            counterpart, prefix = layer[name], f"{names.layers}.{inside[1]}"
        elif outside and outside[1] in names.outside:
            name, kind = outside.groups()
            counterpart, prefix = names.outside[name], ""
        else:
            raise ModelLoadError(f"{file} contains tensor {shown(tensor)}",
                                 f"expected only tensors that llama.cpp's converter writes for {architecture}",
                                 "use another model, because this variant of the architecture is not supported")
        if "{}" in counterpart:
            experts, rows = tensors[tensor].shape[0], tensors[tensor].shape[-2:][0]
            if len(tensors[tensor].shape) != 3 or experts > MAX_EXPERTS:
                raise ModelLoadError(f"{file}: tensor {shown(tensor)} has shape {list(tensors[tensor].shape)}",
                                     f"expected the matrices of at most {MAX_EXPERTS:,} experts, [experts, out, in]",
                                     "convert the model again with a current version of llama.cpp")
            found.update({f"{prefix}.{counterpart.format(expert)}.{kind}": Location(
                tensor, range(expert * rows, (expert + 1) * rows)) for expert in range(experts)})
            continue
        if name in names.by_head:
            found.update({f"{prefix}.{counterpart}.{row}.{kind}": Location(tensor, range(row, row + 1), is_one_row=True)
                          for row in range(tensors[tensor].shape[0])})
            continue
        if name == "attn_qkv" and counterpart.endswith(".qkv"):
            found.update(_split_qkv(tensor, kind, f"{prefix}.{counterpart.removesuffix('.qkv')}", heads))
            continue
        found[f"{prefix}.{counterpart}.{kind}".removeprefix(".")] = Location(
            tensor, order=names.rows(name, heads), transposed=name in names.transposed and kind == "weight",
            offset=names.offset if name.endswith("norm") else 0.0)
    return found


def _split_qkv(tensor: str, kind: str, prefix: str, heads: Heads) -> dict[str, Location]:
    """Return {Hugging Face tensor name: Location} for queries, keys and values in the fused projection `tensor`."""
    ends = [heads.queries * heads.size, heads.keys * heads.size, heads.keys * heads.size]
    starts = [0, ends[0], ends[0] + ends[1]]
    return {f"{prefix}.{part}_proj.{kind}": Location(tensor, range(start, start + rows))
            for part, start, rows in zip("qkv", starts, ends, strict=True)}
