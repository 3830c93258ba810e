"""The spec of a model: the numbers that its layers, its KV cache and its attention are made from."""

from dataclasses import dataclass, replace
from typing import Self, TypeVar

from ..attention.interface import LayerAttention
from ..errors import ConfigError
from ..layers.context import Split
from ..layers.experts import ExpertParameters
from ..layers.rotary import RotaryParameters

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and options of one model. A family with more sizes or options adds fields in a subclass.

    head_size                entries of one attention head; hidden_size / num_heads unless the configuration states it
    vocab_size               rows of the embedding
    max_position_embeddings  number of positions that the model supports; with longrope, the number before scaling
    attention                one LayerAttention for each layer: scale, window, softcap, ALiBi slopes, sink logits
    norm_epsilon             epsilon of all norms
    tie_word_embeddings      whether the output projection to logits uses the embedding's matrix
    rotary                   parameters of rotary positions. None: the model has learned positions, or ALiBi slopes in
                             `attention`, or transformers computes its positions
    rotary_size              leading entries of each head that are rotated; None: all
    qkv_bias, out_bias       whether the attention's projections have biases
    mlp_bias                 whether the projections of the feed-forward network have biases
    kv_copies                processes that have the same key and value heads, because there are fewer than processes
    qk_norm                  whether queries and keys are normed. The model class decides whether a norm is over one
                             head or over all heads
    gated_mlp                whether the feed-forward network has three matrices; otherwise two
    experts                  for each layer the parameters of its experts; None: the layer has none. Empty: no layer has
    dtype                    "float32", "float16" or "bfloat16", from config.json; None: the file does not state it
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    attention: tuple[LayerAttention, ...]
    norm_epsilon: float
    tie_word_embeddings: bool
    activation: str
    rotary: RotaryParameters | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_mlp: bool = True
    rotary_size: int | None = None
    dtype: str | None = None
    kv_copies: int = 1
    experts: tuple[ExpertParameters | None, ...] = ()

    def share(self, split: Split) -> Self:
        """Return the spec of one of the processes of `split`: its part of the heads and of the MLP.

        Vocabulary and hidden size are whole in every process. With fewer key and value heads than processes, several
        processes have the same one. Raises ConfigError if a number cannot be divided.
        """
        if split.size == 1:
            return self
        copies = max(split.size // self.num_kv_heads, 1)
        sizes = {size for layer in self.experts if layer for size in (layer.size, layer.shared_size)}
        undivided = next((size for size in sorted(sizes) if size % split.size), None)
        if undivided is not None:
            raise ConfigError(f"the model is split over {split.size} processes, and the intermediate size of an expert "
                              f"of {self.architecture} is {undivided}", f"expected a multiple of {split.size}",
                              "use fewer processes")
        for name, divides, expected in (
                ("num_heads", self.num_heads % split.size == 0, "a multiple"),
                ("num_kv_heads", self.num_kv_heads * copies % split.size == 0, "a multiple or a divisor"),
                ("intermediate_size", self.intermediate_size % split.size == 0, "a multiple")):
            if not divides:
                raise ConfigError(f"the model is split over {split.size} processes, and {name} of {self.architecture} "
                                  f"is {getattr(self, name)}", f"expected {expected} of {split.size}",
                                  "use fewer processes")
        heads, kv_heads = self.num_heads // split.size, self.num_kv_heads * copies // split.size
        first = split.rank * heads
        attention = tuple(layer if layer.alibi_slopes is None else
                          replace(layer, alibi_slopes=layer.alibi_slopes[first : first + heads])
                          for layer in self.attention)
        return replace(self, num_heads=heads, num_kv_heads=kv_heads, kv_copies=copies, attention=attention,
                       intermediate_size=self.intermediate_size // split.size,
                       experts=tuple(layer and layer.share(split) for layer in self.experts))

    @property
    def num_weights(self) -> int:
        """Number of elements in the model's matrices. Norms and biases, which are small, are not counted."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_size
        dense = (3 if self.gated_mlp else 2) * self.intermediate_size
        experts = [layer.rows for layer in self.experts if layer is not None]
        rows = self.num_layers * attention + (self.num_layers - len(experts)) * dense + sum(experts)
        rows += self.vocab_size if self.tie_word_embeddings else 2 * self.vocab_size
        has_slopes = any(layer.alibi_slopes is not None for layer in self.attention)
        rows += self.max_position_embeddings if self.rotary is None and not has_slopes else 0
        return rows * self.hidden_size

    @property
    def expert_counts(self) -> tuple[int, int, int] | None:
        """Number of layers with experts, and the largest numbers of experts and of a token's; None: no layer has any.
        """
        layers = [layer for layer in self.experts if layer is not None]
        if not layers:
            return None
        return len(layers), max(layer.count for layer in layers), max(layer.chosen for layer in layers)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Numbers of rows of the weights of the query, key and value projections."""
        return (self.num_heads * self.head_size, *(self.num_kv_heads * self.head_size,) * 2)


Spec = TypeVar("Spec", bound=ModelSpec)
