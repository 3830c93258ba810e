"""The model families: one file each, composed of layers/ in one frame (decoder.py) around one layer (layer.py).

Owns     a family's configuration, tensor names and order of operations; `loading` loads a checkpoint
Not      where keys and values are stored, which tokens run, how tokens are sampled from the logits
Yours    a new family is one file with what differs from Layer and Decoder, and a line in registry.py. Outside this
         package use register_model and public names of batch_manager only. A model that transformers/ runs needs no
         file
"""

from .loading import LoadedModel, load_model, read_spec
from .registry import Model, register_model
from .spec import ModelSpec

__all__ = ["LoadedModel", "Model", "ModelSpec", "load_model", "read_spec", "register_model"]
