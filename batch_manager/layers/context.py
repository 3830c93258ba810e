"""The settings with which layers are constructed, apart from their weights."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The settings shared by all layers of a loaded model. A model passes them to each layer that it constructs.

    device          device on which the layers compute
    dtype           dtype of weights and hidden states
    deterministic   make the results for a row independent of the other rows of the step, to the bit
    compiled_step   on a CPU, store matrices in the layout of the compiled step, which runs a recorded forward in one
                    call; see recording.py

    The next three fields are extension points. In this version they must be None: the layers that they concern
    (`Linear`, `Embedding`, `Head`) raise ConfigError for any other value; see `refuse`.

    split           tensor parallelism: the number of processes, the index of this process, and how to sum or gather
                    results. `Linear(split=...)` states the dimension along which a layer is split
    weight_form     how a matrix is stored and multiplied; see weight_form.py. None: unquantized, and packed if the
                    device multiplies a packed matrix faster
    adapters        low-rank adapters whose outputs are added to the output of a `Linear`, planned once per step
    """

    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    compiled_step: bool = False
    split: Any = None
    weight_form: Any = None
    adapters: Any = None

    def refuse(self, layer: str, *ports: str) -> None:
        """Raise ConfigError if one of the fields named in `ports` is set, because the layer does not support it.

        layer   class and name of the layer, for the message
        """
        for port in ports:
            value = getattr(self, port)
            if value is not None:
                raise ConfigError(f"LayerContext.{port} is {value!r} for {layer}",
                                  "this version supports only None", f"leave {port} out")
