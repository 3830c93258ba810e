"""The frame of the model families: embed, enter, layers, norm, head.

A family inherits from it and from nothing else, or, with experts, from the family that it is apart from them. Its layer
inherits from the one of layer.py, or from that of a related family.

A frame can also be a stage of a model: some of its layers, with the embedding on the first stage and the norm and the
head on the last one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..attention.interface import Attention
from ..errors import ConfigError, counted
from ..layers.context import LayerContext
from ..layers.embedding import Embedding, Head
from ..layers.norm import RmsNorm
from ..layers.rotary import Rotary
from ..weights.source import Weights
from .layer import Layer
from .spec import ModelSpec, Spec

ROTARY_BUFFERS = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Names:
    """Names in the checkpoint, without `.weight`. The name of a layer is that of `layers` and its number."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` consecutive parts of a model, each with about the same number of layers."""

    index: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def layers_of(self, num_layers: int) -> range:
        """Return the numbers of the layers of this stage. Raises ConfigError for fewer layers than stages."""
        if num_layers < self.count:
            raise ConfigError(f"the model is divided into {counted(self.count, 'stage')}",
                              f"expected at most {num_layers}, the number of its layers", "use fewer stages")
        return range(num_layers * self.index // self.count, num_layers * (self.index + 1) // self.count)

    def part_of(self, spec: Spec, per_layer: Sequence[str]) -> Spec:
        """Return the spec of this stage: the number of its layers, and their entries in the fields `per_layer`."""
        layers = self.layers_of(spec.num_layers)
        if self.count == 1:
            return spec
        return replace(spec, num_layers=len(layers),
                       **{name: getattr(spec, name)[layers.start : layers.stop] for name in per_layer})


WHOLE = Stage()


class Decoder:
    """A decoder of transformers: embed -> enter -> layers -> norm -> logits. See registry.Model for the methods.

    The members have Llama's values; a family replaces those in which it differs. On a stage, what belongs to other
    stages is None: `embedding` after the first stage, `norm` and `head` before the last one.

    per_layer   fields of the spec that have an entry for each layer
    names       names in the checkpoint
    layer       layer(spec, weights, context, name, index) makes a layer, as layer.py has it. `name` has the number of
                the layer in the file, `index` counts the layers of the stage
    last_norm   last_norm(weights, context, name, size, epsilon) makes the norm after the last layer
    """

    deterministic, has_stages = True, True
    harmless_tensors: tuple[str, ...] = ROTARY_BUFFERS
    per_layer: tuple[str, ...] = ("attention",)
    names = Names()
    layer: Callable[..., Any] = Layer
    last_norm: Callable[..., Any] = RmsNorm

    def __init__(self, spec: ModelSpec, weights: Weights, context: LayerContext, stage: Stage = WHOLE) -> None:
        numbers, spec = stage.layers_of(spec.num_layers), stage.part_of(spec, self.per_layer)
        self.embedding = self.norm = self.head = None
        self._enters = stage.is_first and type(self).enter is not Decoder.enter
        if stage.is_first:
            self.embedding = self.make_embedding(spec, weights, context)
            self.make_entry(spec, weights, context)
        self.layers = [self.layer(spec, weights, context, f"{self.names.layers}.{number}", index)
                       for index, number in enumerate(numbers)]
        if stage.is_last:
            self.norm = self.make_norm(spec, weights, context)
            self.head = self.make_head(spec, weights, context)
        self.make_rotary(spec, context)
        self._rotaries = [self.rotary_of(spec, index) for index in range(spec.num_layers)]    # none in a step

    # ------------------------------------------------------------------ the parts of a family

    def make_embedding(self, spec: ModelSpec, weights: Weights, context: LayerContext,
                       scale: float | None = None) -> Embedding:
        """Return the token embedding [vocab, hidden size]. A last stage with a tied head makes it, too."""
        return Embedding(weights, context, f"{self.names.embedding}.weight", spec.vocab_size, spec.hidden_size,
                         scale=scale, is_kept=True)

    def make_entry(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> None:
        """Make what `enter` uses, such as learned positions."""

    def make_norm(self, spec: ModelSpec, weights: Weights, context: LayerContext) -> Any:
        """Return the norm after the last layer; None: there is no norm."""
        return self.last_norm(weights, context, self.names.norm, spec.hidden_size, spec.norm_epsilon)

    def make_head(self, spec: ModelSpec, weights: Weights, context: LayerContext, **options: Any) -> Head:
        """Return the head, made with `options`. If it is tied on another stage than the first, it reads the table."""
        tied_to = None
        if spec.tie_word_embeddings:
            tied_to = self.embedding or self.make_embedding(spec, weights, context)
        return Head(weights, context, f"{self.names.head}.weight", spec.vocab_size, spec.hidden_size, tied_to=tied_to,
                    **options)

    def make_rotary(self, spec: ModelSpec, context: LayerContext) -> None:
        """Make what `rotary_of` returns: None for a spec without rotary positions."""
        self.rotary = None
        if spec.rotary is not None:
            self.rotary = Rotary(context, spec.rotary, spec.rotary_size or spec.head_size, spec.max_position_embeddings)

    def rotary_of(self, spec: ModelSpec, index: int) -> Rotary | None:
        """Return the rotary positions of the layer `index` of the stage, which has `spec`; None: it has none."""
        return self.rotary

    def enter(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return what the first layer gets for the result of `embed`, in which the engine can have replaced rows."""
        return hidden

    # ------------------------------------------------------------------ a step

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(token_ids)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """As registry.Model. On a later stage, `hidden` is the result of the stage before; see `Stage`."""
        if self._enters:
            hidden = self.enter(hidden, positions)
        for layer, rotary in zip(self.layers, self._rotaries):
            hidden = layer(hidden, rotary, attention)
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
