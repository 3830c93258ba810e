"""From what a callback returned to a request that can run, or to the reason why not.

Every reason for refusing one request lives here. The order of checks is: type, rank and element count, before anything
is copied; bytes; the copy; the values of the copy. The copy is what runs, so a user who changes a tensor after handing
it over changes nothing.
"""

from dataclasses import dataclass

from ..config import Limits
from ..handover import SlotSetup
from .llm_request import LlmRequest
from .response import ResponseOptions


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request that was accepted.

    request      the running request
    setup        what the device must know about it
    response     what its responses hold
    num_bytes    its tensors and the logits it will get back
    warnings     what was changed to make it fit, one sentence each
    cache_salt   as given
    """

    request: LlmRequest
    setup: SlotSetup
    response: ResponseOptions
    num_bytes: int
    warnings: tuple[str, ...] = ()
    cache_salt: str | bytes | None = None


class Admission:
    """Decides about one item at a time; keeps no state between them.

    max_request_bytes         bytes of one request's tensors
    gather_context_logits, gather_generation_logits   whether requests may ask for them
    exclude_input_in_output   responses that are not streamed leave the prompt out
    """

    def __init__(self, limits: Limits, *, max_request_bytes: int = 64 * 1024 * 1024, gather_context_logits: bool = True,
                 gather_generation_logits: bool = True, exclude_input_in_output: bool = False) -> None:
        self.limits = limits
        self.max_request_bytes = max_request_bytes
        self.gather_context_logits = gather_context_logits
        self.gather_generation_logits = gather_generation_logits
        self.exclude_input_in_output = exclude_input_in_output

    def admit(self, item: object) -> Admitted:
        """The request, ready to run.

        Raises InvalidRequestError, or RequestTooLargeError when the whole KV cache could not hold it, and nothing
        else, whatever `item` is and does.
        """
        raise NotImplementedError


def usable_id(item: object) -> int | None:
    """The id under which a refusal of `item` can be sent, or None when it has none. Never raises."""
    raise NotImplementedError
