"""What a layer is built for, beside the weights it takes."""

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """What all layers of one loaded model have in common. A model hands it on to each layer it makes.

    device          where the layers compute
    dtype           of weights and hidden states
    deterministic   a row's bits depend on that row alone, whatever else is in the step
    compiled_step   matrices are held as the compiled step of a CPU multiplies with them

    The ports are three independent things of one class, `Linear` (with `Embedding` and `Head`, which split the
    vocabulary). None is the plain case. A layer that a port concerns and that has no way to serve it refuses it by name
    (`refuse`); in this version each of these layers does.

    split           how layers are divided among processes. `Linear(split=...)` says along which side a map divides; the
                    port says how many processes there are, which one this is, and sums or gathers what they computed
    weight_form     how a matrix is stored, and multiplied with; see weight_form.py. None: as its plain numbers, packed
                    where the device multiplies a packed matrix faster
    adapters        what low-rank adapters add to the outputs of a map; planned once for each step, as attention is
    """

    device: torch.device
    dtype: torch.dtype
    deterministic: bool = False
    compiled_step: bool = False
    split: Any = None
    weight_form: Any = None
    adapters: Any = None

    def refuse(self, layer: str, *ports: str) -> None:
        """Raise ConfigError when one of these ports is set, which this layer cannot serve.

        layer   its class and name
        """
        for port in ports:
            value = getattr(self, port)
            if value is not None:
                raise ConfigError(f"LayerContext.{port} is {value!r} and {layer} is to be made with it",
                                  "None: it is not built in this version", f"leave {port} out")
