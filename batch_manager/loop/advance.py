"""Give every sequence of a step what it yielded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..handover import END_ID, NOT_FINISHED, RowFailure, ScheduledBatch, StepOutput
from ..names import FinishReason
from ..requests.llm_request import LlmRequest
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


def advance(batch: ScheduledBatch, output: StepOutput, requests: Sequence[LlmRequest],
            responder: Responder) -> Outcome:
    """Move contexts on, append tokens, hand what was asked for to the responder.

    requests   of the batch, in its order, as they were when it was launched: one that has ended since is passed over,
               whoever owns its slot now
    Mutates the requests of the batch. A sequence named in `output.failures` is left as it was.
    """
    alive = {request.seq_slot: request for request in requests if not request.is_finished}
    outcome = Outcome(failed=[(alive[slot], failure) for slot, failure in output.failures.items() if slot in alive])
    failed_slots = output.failures
    for work in batch.context:
        if work.slot in alive and work.slot not in failed_slots:
            request = alive[work.slot]
            request.advance_context(len(work.token_ids))
            if work.slot in output.context_logits:
                responder.note_context_logits(request, work.start, output.context_logits[work.slot])

    rows = zip(output.slots.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True)
    for row, (slot, token, finish) in enumerate(rows):
        request = alive.get(slot)
        if request is None or slot in failed_slots:
            continue
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
