"""Whether a class of this package computes a model, or transformers' own."""

from ..errors import UnsupportedModelError
from ..weights.json_file import Fields, shown
from .registry import Model, known_architectures
from .transformers.proven_types import PROVEN, REFUSED

NATIVE, TRANSFORMERS = "native", "transformers"


def choose_implementation(config: Fields, architecture: str, wanted: str) -> str:
    """NATIVE or TRANSFORMERS for a checkpoint.

    wanted   "native", "transformers" or "auto", as of load_model
    Raises   UnsupportedModelError where transformers is wanted, or nothing else is there, and the model type is not one
             that was proven to run in the engine
    """
    if wanted == NATIVE or wanted != TRANSFORMERS and architecture in known_architectures():
        return NATIVE
    model_type = config.text("model_type", "")
    if model_type in PROVEN:
        return TRANSFORMERS
    if wanted != TRANSFORMERS and (not model_type or config.values.get("text_config")):
        return NATIVE                                  # which says why it does not take it
    reason = REFUSED.get(model_type)
    raise UnsupportedModelError(
        f"{config.where}: the architecture {shown(architecture)} is not known, and its model type {shown(model_type)} "
        + ("is not run through transformers" if reason is None else f"is not run through transformers: {reason}"),
        f"an architecture of this package: {', '.join(known_architectures())}; or a model type that is run through "
        f"transformers: {', '.join(sorted(PROVEN))}",
        "register_model(architecture, model_class) adds an architecture")


def load_transformers_class() -> type[Model]:
    """The class that runs models of transformers. Raises ConfigError where the library is not installed."""
    from .transformers.installed import transformers

    transformers()
    from .transformers.model import TransformersModel

    return TransformersModel

