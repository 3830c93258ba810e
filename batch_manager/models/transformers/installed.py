"""The transformers library, imported only when a model needs it."""

from functools import cache
from typing import Any

from ...contained_log import log
from ...errors import ConfigError, printable
from .proven_types import VERSIONS

OLDEST = 5
ANOTHER_TYPE = "use a model of another type"
SAVED_BY_ANOTHER_VERSION = "save the model again, or install the version of transformers that saved it"


def transformers() -> Any:
    """Import and return the library. Raises ConfigError if it is not installed or too old."""
    try:
        import transformers as library
    except ImportError as error:
        raise ConfigError(f"the model runs through transformers, which cannot be imported ({error})",
                          f"expected transformers {OLDEST} or newer, from the extra hf",
                          'pip install "batch-manager[hf]"'
                          ) from error
    if int(library.__version__.split(".")[0]) < OLDEST:
        raise ConfigError(f"transformers is {library.__version__}", f"expected version {OLDEST} or newer",
                          'pip install -U "batch-manager[hf]"')
    _tell_version(library.__version__)
    return library


@cache
def _tell_version(version: str) -> None:
    if version != VERSIONS["transformers"]:
        log.info("transformers is %s; the list of model types was tested with %s. Each model is checked when it is "
                 "loaded", version, VERSIONS["transformers"])


def checkpoint_names() -> tuple[Any, Any]:
    """Return the modules conversion_mapping and core_model_loading of transformers, which map names of tensors.

    Raises ConfigError if the installed version does not have them.
    """
    library = transformers()
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        raise ConfigError(f"transformers is {library.__version__}, which cannot map tensor names of checkpoints "
                          f"({error})", f"expected a version such as {VERSIONS['transformers']}",
                          f'pip install "transformers=={VERSIONS["transformers"]}"') from error
    return conversion_mapping, core_model_loading


def first_words(error: BaseException) -> str:
    """Return the class name and the beginning of an exception's message, on one line."""
    return printable(" ".join(f"{type(error).__name__}: {error}".split())[:300])
