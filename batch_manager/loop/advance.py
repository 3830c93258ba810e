"""Give every sequence of a step what it yielded."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..handover import END_ID, NOT_FINISHED, RowFailure, ScheduledBatch, StepOutput
from ..names import FinishReason, LlmRequestState
from ..requests.llm_request import LlmRequest
from .resources import Resources
from .responder import Responder

Row = tuple[int, tuple[LlmRequest, int, int]]    # its number, and whose it is, token and finish code

COMPLETE = LlmRequestState.GENERATION_COMPLETE


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


def advance(batch: ScheduledBatch, output: StepOutput, requests: Sequence[LlmRequest], responder: Responder,
            resources: Resources) -> Outcome:
    """Move contexts on, append tokens, hand what was asked for to the responder, let beams go on with their parents'
    blocks.

    requests   of the batch, in its order, as they were when it was launched: one that has ended since is passed over,
               whoever owns its slot now
    Mutates the requests of the batch. A sequence named in `output.failures` is left as it was.
    """
    outcome = Outcome()
    if output.failures:
        outcome.failed = [(request, output.failures[request.seq_slot]) for request in requests
                          if request.seq_slot in output.failures and not request.is_finished]
        failed = {request.seq_slot for request in requests if request.seq_slot in output.failures}
    else:
        failed = ()

    for work, request in zip(batch.context, requests):
        if work.slot not in failed and not request.is_finished:
            request.advance_context(len(work.token_ids))
            if work.slot in output.context_logits:
                responder.note_context_logits(request, work.start, output.context_logits[work.slot])

    listeners, tokens = responder.listeners, output.tokens.tolist()
    drawing = _requests_of_rows(batch, output, requests)
    if _is_plain(output, drawing) and not listeners:    # so it is most of the time; 256 rows take half as long then
        outcome.ended = [(request, FinishReason.LENGTH) for request, token in zip(drawing, tokens, strict=True)
                         if request.add_token(token)]
        outcome.generated_tokens = len(tokens)
        return outcome

    rows = enumerate(zip(drawing, tokens, output.finish.tolist(), strict=True))
    if output.beams:
        rows = _advance_beams(rows, output, outcome, responder, resources)
    passed_over = 0
    for row, (request, token, finish) in rows:    # 256 rows an iteration: no call that can be spared
        if request.state is COMPLETE or (failed and request.seq_slot in failed):
            passed_over += 1
        elif finish == END_ID:    # the end id is not part of the output
            outcome.ended.append((request, FinishReason.END_ID))
            passed_over += 1
        else:
            has_all = request.add_token(token)
            streams = request.request_id in listeners and responder.note_token(request, row, output)
            if has_all or finish != NOT_FINISHED:
                outcome.ended.append((request, FinishReason(finish) if finish else FinishReason.LENGTH))
            elif streams:
                outcome.to_send.append(request)
    outcome.generated_tokens += len(output.tokens) - passed_over
    return outcome


def _is_plain(output: StepOutput, drawing: Sequence[LlmRequest]) -> bool:
    """Whether every row is a token for a request that is alive, and only a length may end any of them."""
    return not (output.beams or output.failures or output.finish.any()
                or [request for request in drawing if request.state is COMPLETE])


def _advance_beams(rows: Iterable[Row], output: StepOutput, outcome: Outcome, responder: Responder,
                   resources: Resources) -> Iterator[Row]:
    """Deal with the rows that stand for several beams; yields the others."""
    for row in rows:
        request = row[1][0]
        beams = output.beams.get(request.seq_slot)
        if beams is None or request.state is COMPLETE or request.seq_slot in output.failures:
            yield row
            continue
        outcome.generated_tokens -= 1    # the caller counts one for every row
        if beams.hypotheses is None:
            resources.follow(request, beams.parents.tolist())
            request.add_to_beams(beams.parents.tolist(), beams.tokens.tolist())
            responder.note_beams(request, beams, output.generation_logits.get(request.seq_slot))
            outcome.generated_tokens += request.beam_width
        else:
            responder.note_hypotheses(request, beams.hypotheses, output.generation_logits.get(request.seq_slot))
            request.set_beams([hypothesis.tokens.tolist() for hypothesis in beams.hypotheses])
            outcome.generated_tokens += len(beams.hypotheses)
            outcome.ended.append((request, FinishReason(beams.hypotheses[0].finish)))


def _requests_of_rows(batch: ScheduledBatch, output: StepOutput, requests: Sequence[LlmRequest]) -> list[LlmRequest]:
    """The request of each row of the output."""
    if output.failures:    # a sequence that failed alone has no row
        by_slot = {request.seq_slot: request for request in requests}
        return [by_slot[slot] for slot in output.slots.tolist()]
    last_chunks = [request for work, request in zip(batch.context, requests) if work.is_last_chunk]
    return last_chunks + list(requests[len(batch.context):])
