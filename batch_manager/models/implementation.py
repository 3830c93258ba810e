"""Chooses what runs a model: transformers or a native class.

A native class is a class of this package, or a class that the user registered.
"""

from ..errors import UnsupportedModelError
from ..weights.json_file import Fields, shown
from .registry import Model, find_model, is_shipped, is_shipped_type, known_architectures, model_type_of
from .transformers.proven_types import PROVEN, REFUSED

NATIVE, TRANSFORMERS = "native", "transformers"


def choose_implementation(config: Fields, architecture: str, wanted: str) -> str:
    """Return the implementation that runs a checkpoint: NATIVE or TRANSFORMERS.

    wanted   "native", "transformers" or "auto", as for load_model. "auto" chooses NATIVE if a native class is known
             for the architecture, except for a model type that only transformers runs. "auto" also chooses NATIVE
             for a checkpoint that neither a native class nor transformers can run, if its configuration names no
             model type or has a `text_config`. The loading of such a checkpoint then raises an error that explains
             why it cannot run
    Raises   UnsupportedModelError if the choice is transformers and the model type is not proven to run in the
             engine
    """
    if wanted == NATIVE:
        return NATIVE
    is_known = architecture in known_architectures()
    if wanted != TRANSFORMERS and is_known and not _has_foreign_type(config, architecture):
        return NATIVE
    model_type = config.text("model_type", "")
    if model_type in PROVEN:
        return TRANSFORMERS
    if wanted != TRANSFORMERS and (not model_type or config.values.get("text_config")):
        return NATIVE                                  # raises the error that explains what is wrong
    reason = REFUSED.get(model_type)
    if is_known:
        raise UnsupportedModelError(
            f"{config.where}: model_implementation is {TRANSFORMERS!r}, but model type {shown(model_type)} does not "
            "run through transformers" + ("" if reason is None else f": {reason}"),
            f"expected one of the model types {', '.join(sorted(PROVEN))}",
            f"leave model_implementation out, so that a native class runs {architecture}")
    raise UnsupportedModelError(
        f"{config.where}: the architecture {shown(architecture)} is not known, and model type {shown(model_type)} "
        "does not run through transformers" + ("" if reason is None else f": {reason}"),
        f"expected an architecture of this package: {', '.join(known_architectures())}, or a model type that runs "
        f"through transformers: {', '.join(sorted(PROVEN))}",
        "add the architecture with register_model(architecture, model_class)")


def _has_foreign_type(config: Fields, architecture: str) -> bool:
    """Whether this package has a class for the architecture, but only transformers runs the checkpoint's model type."""
    expected = model_type_of(architecture)
    if expected is None or not is_shipped(architecture, find_model(architecture)):
        return False
    model_type = config.text("model_type", expected)
    return model_type in PROVEN and not is_shipped_type(model_type)


def load_transformers_class() -> type[Model]:
    """Return the class that runs models of transformers. Raises ConfigError if the library is not installed."""
    from .transformers.installed import transformers

    transformers()
    from .transformers.model import TransformersModel

    return TransformersModel

