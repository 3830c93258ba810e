"""Whether a class of this package computes a model, or transformers' own."""

from ..errors import UnsupportedModelError
from ..weights.json_file import Fields, shown
from .registry import Model, find_model, has_own_class, is_shipped, known_architectures, model_type_of
from .transformers.proven_types import PROVEN, REFUSED

NATIVE, TRANSFORMERS = "native", "transformers"


def choose_implementation(config: Fields, architecture: str, wanted: str) -> str:
    """NATIVE or TRANSFORMERS for a checkpoint.

    wanted   "native", "transformers" or "auto", as of load_model
    Raises   UnsupportedModelError where transformers is wanted, or nothing else is there, and the model type is not one
             that was proven to run in the engine
    """
    if wanted == NATIVE:
        return NATIVE
    is_known = architecture in known_architectures()
    if wanted != TRANSFORMERS and is_known and not _is_shared(config, architecture):
        return NATIVE
    model_type = config.text("model_type", "")
    if model_type in PROVEN:
        return TRANSFORMERS
    if wanted != TRANSFORMERS and (not model_type or config.values.get("text_config")):
        return NATIVE                                  # which says why it does not take it
    reason = REFUSED.get(model_type)
    if is_known:
        raise UnsupportedModelError(
            f"{config.where}: model_implementation is {TRANSFORMERS!r}, and the model type {shown(model_type)} is not "
            "run through transformers" + ("" if reason is None else f": {reason}"),
            f"one of the model types {', '.join(sorted(PROVEN))}",
            f"leave model_implementation out: another class runs {architecture}")
    raise UnsupportedModelError(
        f"{config.where}: the architecture {shown(architecture)} is not known, and its model type {shown(model_type)} "
        + ("is not run through transformers" if reason is None else f"is not run through transformers: {reason}"),
        f"an architecture of this package: {', '.join(known_architectures())}; or a model type that is run through "
        f"transformers: {', '.join(sorted(PROVEN))}",
        "register_model(architecture, model_class) adds an architecture")


def _is_shared(config: Fields, architecture: str) -> bool:
    """Whether the type is one that has another family's class in transformers, and is run through it."""
    expected = model_type_of(architecture)
    if expected is None or not is_shipped(architecture, find_model(architecture)):
        return False
    model_type = config.text("model_type", expected)
    return model_type in PROVEN and not has_own_class(model_type)


def load_transformers_class() -> type[Model]:
    """The class that runs models of transformers. Raises ConfigError where the library is not installed."""
    from .transformers.installed import transformers

    transformers()
    from .transformers.model import TransformersModel

    return TransformersModel

