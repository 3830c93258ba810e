"""The transformers library, imported when a model needs it."""

from typing import Any

from ...contained_log import log
from ...errors import ConfigError, printable
from .proven_types import VERSIONS

OLDEST = 5


def transformers() -> Any:
    """The library. Raises ConfigError where it is not installed, or is too old."""
    try:
        import transformers as library
    except ImportError as error:
        raise ConfigError(f"the model is to be run through transformers, which cannot be imported ({error})",
                          f"transformers {OLDEST} or newer, of the extra hf", 'pip install "batch-manager[hf]"'
                          ) from error
    if int(library.__version__.split(".")[0]) < OLDEST:
        raise ConfigError(f"transformers is {library.__version__}", f"version {OLDEST} or newer",
                          'pip install -U "batch-manager[hf]"')
    if library.__version__ != VERSIONS["transformers"]:
        log.info("transformers is %s; the list of model types was made with %s. Each model is compared as it is loaded",
                 library.__version__, VERSIONS["transformers"])
    return library


def checkpoint_names() -> tuple[Any, Any]:
    """The modules of transformers that know how its checkpoints name tensors. Raises ConfigError where it has none."""
    library = transformers()
    try:
        from transformers import conversion_mapping, core_model_loading
    except ImportError as error:
        raise ConfigError(f"transformers is {library.__version__}, which does not say how its checkpoints name tensors "
                          f"({error})", f"a version as {VERSIONS['transformers']}",
                          f'pip install "transformers=={VERSIONS["transformers"]}"') from error
    return conversion_mapping, core_model_loading


def first_words(error: BaseException) -> str:
    """Class and beginning of an exception's text, on one line."""
    return printable(" ".join(f"{type(error).__name__}: {error}".split())[:300])
