"""LoRA adapters as values: the modules that a model can adapt, and the content of one adapter.

An adapter adds B (A x) to the output of some projections of a model. A is [D, in] and B [out, D], where D is the rank,
called the adapter's size. Any factor, such as alpha / r, is already in B.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

# The names of the modules, by TensorRT-LLM's module ids 0..7. In a network with a gate, `mlp_h_to_4h` is the projection
# under the activation (gate_proj), and `mlp_gate` the other one (up_proj).
MODULE_NAMES = ("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate")
SEPARATE_ATTENTION = MODULE_NAMES[1:4]      # `attn_qkv` is all three of them
LARGEST_ADAPTER_SIZE = 1024


# Last words of a projection's path -> its modules, by the names of lora_config's ids. A fused projection has several
# modules if each has an A of its own. In a gated network, `mlp_h_to_4h` is the projection under the activation.
_MODULES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qkv_proj", "c_attn", "query_key_value"), ("attn_qkv",)),
    "q_proj": ("attn_q",), "k_proj": ("attn_k",), "v_proj": ("attn_v",),
    **dict.fromkeys(("o_proj", "out_proj", "attn.c_proj", "attention.dense", "self_attn.dense",
                     "self_attention.dense"), ("attn_dense",)),
    **dict.fromkeys(("gate_proj", "fc_in", "fc1", "c_fc", "dense_h_to_4h"), ("mlp_h_to_4h",)),
    "up_proj": ("mlp_gate",), "gate_up_proj": ("mlp_h_to_4h", "mlp_gate"),
    **dict.fromkeys(("down_proj", "fc_out", "fc2", "mlp.c_proj", "dense_4h_to_h"), ("mlp_4h_to_h",))}


def locate_projection(path: str) -> tuple[int, tuple[str, ...]] | None:
    """Return the layer and the modules of a projection; None if adapters cannot change it.

    path   name in the checkpoint without `.weight`: "model.layers.3.self_attn.q_proj"
    """
    words = path.split(".")
    modules = _MODULES.get(words[-1]) or _MODULES.get(".".join(words[-2:]))
    layer = re.search(r"\.(\d+)\.", path)
    return None if modules is None or layer is None else (int(layer[1]), modules)


@dataclass(frozen=True, slots=True)
class AdapterModules:
    """The projections that a model adapts. All of them together, for one rank, are a page of device memory.

    sizes   name of a module, one of MODULE_NAMES -> (inputs, outputs) of the projection in each layer; None in a layer
            that lacks it. Sizes are those of the whole model, not of one process of several. A model that has the three
            modules of SEPARATE_ATTENTION has `attn_qkv` too, which takes no pages of its own
    """

    sizes: Mapping[str, tuple[tuple[int, int] | None, ...]]

    @property
    def num_layers(self) -> int:
        return max(map(len, self.sizes.values()), default=0)

    @property
    def num_module_layers(self) -> int:
        """Number of projections, counted in every layer."""
        return sum(size is not None for layers in self._own_sizes() for size in layers)

    @property
    def page_elements(self) -> int:
        """Number of elements of one rank of all projections: a row of each A and a column of each B."""
        return sum(sum(size) for layers in self._own_sizes() for size in layers if size is not None)

    def _own_sizes(self) -> Iterable[tuple[tuple[int, int] | None, ...]]:
        is_separate = SEPARATE_ATTENTION[0] in self.sizes
        return (layers for name, layers in self.sizes.items() if not (is_separate and name == "attn_qkv"))

    @property
    def largest_row(self) -> int:
        """Number of elements of the largest projection's rank: inputs and outputs."""
        return max((sum(size) for layers in self.sizes.values() for size in layers if size is not None), default=0)

    def only(self, names: tuple[str, ...] | None) -> "AdapterModules":
        """Return the modules in `names`; None: all."""
        return self if names is None else AdapterModules({name: self.sizes[name] for name in self.sizes
                                                          if name in names})


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPart:
    """The two factors of an adapter for one projection.

    module, layer   the projection; `module` is one of MODULE_NAMES
    a               [D, inputs]
    b               [outputs, D]
    """

    module: str
    layer: int
    a: np.ndarray
    b: np.ndarray

    @property
    def size(self) -> int:
        """The rank D."""
        return len(self.a)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterContent:
    """The checked content of one adapter. Read only.

    digest      32 bytes that name the content: equal for equal parts in equal dtypes
    dtype       "float32", "float16" or "bfloat16"; numbers of the last are stored as uint16 with the same bits
    parts       by layer and module id; each projection at most once
    num_bytes   bytes of all parts
    num_pages   the largest rank, and so the number of pages on the device
    """

    digest: bytes
    dtype: str
    parts: tuple[AdapterPart, ...]
    num_bytes: int
    num_pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Facts about a loaded adapter.

    task_id        the id by which requests name it
    adapter_size   its largest rank
    num_bytes      bytes of its weights in the host cache
    modules        names of the modules that it adapts, in the order of their ids
    digest         hexadecimal name of its content
    """

    task_id: int
    adapter_size: int
    num_bytes: int
    modules: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, task_id: int, content: AdapterContent) -> "AdapterInfo":
        adapted = {part.module for part in content.parts}
        return cls(task_id=task_id, adapter_size=content.num_pages, num_bytes=content.num_bytes,
                   modules=tuple(name for name in MODULE_NAMES if name in adapted), digest=content.digest.hex())
