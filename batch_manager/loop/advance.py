"""Applies the output of a step to its requests."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ..handover import END_ID, NOT_FINISHED, RowFailure, ScheduledBatch, StepOutput
from ..names import FinishReason
from ..requests.llm_request import COMPLETE, LlmRequest
from ..responses.deliveries import Deliveries
from ..steps.resources import Resources


@dataclass(slots=True)
class Outcome:
    """The results of a step for its requests, in batch order.

    to_send             streaming requests that have new tokens and have not ended
    ended               requests that completed, with the reason
    failed              requests whose row is unusable, with the failure
    generated_tokens    number of tokens appended to requests
    discarded_tokens    number of tokens of requests that had ended before the step was read, and of void rows
    """

    to_send: list[LlmRequest] = field(default_factory=list)
    ended: list[tuple[LlmRequest, FinishReason]] = field(default_factory=list)
    failed: list[tuple[LlmRequest, RowFailure]] = field(default_factory=list)
    generated_tokens: int = 0
    discarded_tokens: int = 0


def advance(batch: ScheduledBatch, output: StepOutput, requests: Sequence[LlmRequest], void: Collection[LlmRequest],
            deliveries: Deliveries, resources: Resources, *, may_have_ended: bool = True) -> Outcome:
    """Apply the output of a step to its requests, and return the outcome.

    Appends tokens, records the progress of contexts, stores the log probabilities and logits that requests ask for,
    reorders beams and publishes blocks.

    requests   requests of the batch at its launch, in batch order; ended requests are skipped, even if another request
               has their slot now
    void       requests with void rows, which are skipped as well
    may_have_ended   False: no request has ended since the launch; True: some may have

    Mutates the requests, except ended ones, requests with void rows, and requests whose slots are in `output.failures`.
    """
    outcome = Outcome()
    failures = output.failures
    drafts: dict[int, int] = {}
    if batch.context:
        drafts = {work.slot: work.num_drafts for work in batch.context if work.num_drafts}
        _read_contexts(batch, output, requests, void, deliveries, resources)
    listeners, tokens, row_starts = deliveries.listeners, output.tokens.tolist(), output.row_starts
    sampled = _requests_of_rows(batch, output, requests)
    if row_starts is None and batch.generation.num_drafts is None and not (
            drafts or deliveries.asking or failures or void or output.finish.any()
            or may_have_ended and [request for request in sampled if request.state is COMPLETE]):
        # The common case: one token for each request, and only the length can end a request. With 256 rows, this path
        # takes half the time of the general path.
        outcome.ended = [(request, FinishReason.LENGTH) for request in add_a_token_to_each(sampled, tokens)]
        if listeners:
            outcome.to_send = [request for request in sampled if request.request_id in listeners]
            if outcome.ended:
                outcome.to_send = [request for request in outcome.to_send if request.state is not COMPLETE]
        outcome.generated_tokens = len(tokens)
        return outcome

    if failures:
        outcome.failed = [(request, failures[request.seq_slot]) for request in requests
                          if request.state is not COMPLETE and request not in void
                          and request.seq_slot in failures]
    failed = {request for request, _ in outcome.failed}
    starts: Sequence[int] = range(len(sampled) + 1) if row_starts is None else row_starts.tolist()
    for row, (request, finish) in enumerate(zip(sampled, output.finish.tolist(), strict=True)):
        start, stop = starts[row], starts[row + 1]
        if request.state is COMPLETE or request in void:
            outcome.discarded_tokens += stop - start
            continue
        if request in failed:
            continue
        if request.beam_width > 1:
            reason = _advance_beams(request, output, slice(start, stop), outcome, deliveries, resources)
            if reason is not None:
                outcome.ended.append((request, reason))
            continue
        if stop - start > 1:    # accepted drafts may exceed the output length
            most = request.final_length - request.num_tokens
            stop, finish = (start + most, NOT_FINISHED) if stop - start > most else (stop, finish)
        if finish == END_ID:    # the end id is not part of the output
            stop -= 1
        has_all = request.add_token(tokens[start]) if stop - start == 1 else request.add_tokens(tokens[start:stop])
        outcome.generated_tokens += stop - start
        streams = stop > start and request.request_id in listeners and deliveries.note_tokens(
            request, output, start, stop)
        if has_all or finish != NOT_FINISHED:
            outcome.ended.append((request, FinishReason(finish) if finish else FinishReason.LENGTH))
        elif streams:
            outcome.to_send.append(request)
    num_drafts = batch.generation.num_drafts
    if num_drafts is not None:
        drafts.update(zip(batch.generation.slots.tolist(), num_drafts.tolist()))
    if drafts:
        _reject_drafts(drafts, starts, sampled, outcome, void, resources)
    return outcome


def add_a_token_to_each(requests: Sequence[LlmRequest], tokens: Sequence[int]) -> list[LlmRequest]:
    """Add a token to each request, as `LlmRequest.add_token` does. Returns the requests whose output is complete.

    The function repeats the code of `add_token`. This takes a third less time than calls of it.
    """
    nearly: list[LlmRequest] = []
    for request, token in zip(requests, tokens, strict=True):
        generated = request.tokens[0]
        generated.append(token)
        if request.final_length - len(generated) <= 1:
            nearly.append(request)
    return [request for request in nearly if request.note_length()]


def _reject_drafts(drafts: Mapping[int, int], starts: Sequence[int], sampled: Sequence[LlmRequest], outcome: Outcome,
                   void: Collection[LlmRequest], resources: Resources) -> None:
    """Release the blocks of rejected drafts, for requests that have not ended.

    drafts   slot -> number of draft tokens in the step
    """
    over = {request for request, _ in (*outcome.ended, *outcome.failed)}
    rejected: dict[LlmRequest, int] = {}
    for row, request in enumerate(sampled):
        if request.state is COMPLETE or request in over or request in void or request.seq_slot not in drafts:
            continue
        request.propose(())
        count = 1 + drafts[request.seq_slot] - (starts[row + 1] - starts[row])
        if count:
            rejected[request] = count
    if rejected:
        resources.reject_drafts(list(rejected), list(rejected.values()))


def _advance_beams(request: LlmRequest, output: StepOutput, row: slice, outcome: Outcome, deliveries: Deliveries,
                   resources: Resources) -> FinishReason | None:
    """Extend the beams of a request, or replace them with the hypotheses of its finished search.

    Returns the finish reason if the request has ended, else None.
    """
    slot = request.seq_slot
    hypotheses, logits = output.hypotheses.get(slot), output.generation_logits.get(slot)
    if hypotheses is None:
        assert output.parents is not None and output.log_probs is not None    # steps/output_check.py ensures it
        parents, tokens = output.parents[row].tolist(), output.tokens[row].tolist()
        resources.follow(request, parents)
        request.add_to_beams(parents, tokens)
        deliveries.note_beams(request, parents, output.log_probs[row], logits)
        outcome.generated_tokens += request.beam_width
        return None
    deliveries.note_hypotheses(request, hypotheses, logits)
    request.set_beams([hypothesis.tokens.tolist() for hypothesis in hypotheses])
    outcome.generated_tokens += len(hypotheses)
    return FinishReason(hypotheses[0].finish)


def _read_contexts(batch: ScheduledBatch, output: StepOutput, requests: Sequence[LlmRequest],
                   void: Collection[LlmRequest], deliveries: Deliveries, resources: Resources) -> None:
    read = [(work, request) for work, request in zip(batch.context, requests)
            if request.state is not COMPLETE and request not in void and work.slot not in output.failures]
    for work, request in read:
        request.read_context(work.end)
        if work.is_last_chunk and request.draft_len:
            request.propose(())
        if work.slot in output.context_logits:
            deliveries.note_context_logits(request, work.start, output.context_logits[work.slot])
    resources.publish([request for _, request in read])


def _requests_of_rows(batch: ScheduledBatch, output: StepOutput,
                      requests: Sequence[LlmRequest]) -> Sequence[LlmRequest]:
    """Return the request of each row of `output`: contexts that ran their last chunk, then generating requests."""
    sampled = requests
    if batch.context:
        sampled = [request for work, request in zip(batch.context, requests) if work.is_last_chunk]
        sampled += requests[len(batch.context):]
    if len(sampled) != len(output.slots):    # after a bisection, sequences that failed alone or had ended have no row
        slots = set(output.slots.tolist())
        sampled = [request for slot, request in zip(batch.yielding.tolist(), sampled, strict=True) if slot in slots]
    return sampled
