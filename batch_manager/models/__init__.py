"""The model families: one file each, put together from layers/, without inheritance between them.

Owns     a family's configuration, tensor names and order of operations; `loading` loads a checkpoint
Not      where keys and values live, which tokens run, what is drawn from the logits
Yours    a new family is one file with a class like Llama's, and a line in registry.py; from outside, register_model
         and public names of batch_manager alone. Families that transformers implements run without one: transformers/
"""

from .loading import LoadedModel, load_model, read_spec
from .model_spec import ModelSpec
from .registry import Model, register_model

__all__ = ["LoadedModel", "Model", "ModelSpec", "load_model", "read_spec", "register_model"]
