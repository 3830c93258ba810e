"""Give every sequence of a step what it yielded."""

from dataclasses import dataclass, field

from ..handover import END_ID, NOT_FINISHED, RowFailure, ScheduledBatch, StepOutput
from ..names import FinishReason
from ..requests.llm_request import LlmRequest
from .active_requests import ActiveRequests
from .responder import Responder


@dataclass(slots=True)
class Outcome:
    """Who must be told what, in batch order.

    to_send             streaming requests with new tokens that go on
    ended               requests that came to their natural end, and why
    failed              requests whose row is unusable
    generated_tokens    tokens appended to requests
    """

    to_send: list[LlmRequest] = field(default_factory=list)
    ended: list[tuple[LlmRequest, FinishReason]] = field(default_factory=list)
    failed: list[tuple[LlmRequest, RowFailure]] = field(default_factory=list)
    generated_tokens: int = 0


def advance(batch: ScheduledBatch, output: StepOutput, active: ActiveRequests, responder: Responder) -> Outcome:
    """Move contexts on, append tokens, hand what was asked for to the responder.

    Mutates the requests of the batch. A sequence named in `output.failures` is left as it was.
    """
    outcome = Outcome(failed=[(active.at_slot(slot), failure) for slot, failure in output.failures.items()])
    failed_slots, at_slot = output.failures, active.at_slot
    for work in batch.context:
        if work.slot not in failed_slots:
            request = at_slot(work.slot)
            request.advance_context(len(work.token_ids))
            if work.slot in output.context_logits:
                responder.note_context_logits(request, work.start, output.context_logits[work.slot])

    rows = zip(output.slots.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True)
    for row, (slot, token, finish) in enumerate(rows):
        if slot in failed_slots:
            continue
        request = at_slot(slot)
        if finish == END_ID:    # the end id is not part of the output
            outcome.ended.append((request, FinishReason.END_ID))
            continue
        has_all = request.add_token(token)
        outcome.generated_tokens += 1
        is_streaming = responder.note_token(request, row, output)
        if finish != NOT_FINISHED:
            outcome.ended.append((request, FinishReason(finish)))
        elif has_all:
            outcome.ended.append((request, FinishReason.LENGTH))
        elif is_streaming:
            outcome.to_send.append(request)
    return outcome
