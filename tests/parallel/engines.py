"""Engines of several ranks in processes, and of one process, for the same requests."""

from typing import Any, NamedTuple

import numpy as np

from batch_manager import GptManager, ParallelConfig
from batch_manager.loop.draft_model import DraftModel
from tests.harness.client import Client
from tests.harness.drafters import KnowingDrafter
from tests.harness.requests import request
from tests.harness.world import engine_arguments, make_manager

SECONDS = 60
VOCABULARY = 160        # of the models of tests/models/test_ranks.py


class Job(NamedTuple):
    """An engine, and the requests that it gets.

    folder     the checkpoint
    requests   arguments and keyword arguments of `tests.harness.requests.request`
    options    those of `make_manager`; `tensor`, `stages` and `rank_timeout_s` for ParallelConfig
    """

    folder: Any
    requests: list[tuple[tuple, dict]]
    options: dict[str, Any]


class Answer(NamedTuple):
    """What a request got: all tokens of each response, in order, and the tensors and the error of the final one."""

    tokens: list[list[int]]
    tensors: dict[str, np.ndarray]
    error: str


def run_alone(job, make=None):
    """Return request id -> Answer, and the records of the statistics.

    make   (client) -> a manager; None: of one process
    """
    client = Client()
    client.pending = [request(*given, **more) for given, more in job.requests]
    ids = [item.request_id for item in client.pending]
    manager = make(client) if make else make_manager(client, model_path=job.folder, num_threads=1, **job.options)
    client.wait_for_finals(*ids)
    assert manager.shutdown(timeout=SECONDS) and not client.complaints, client.complaints
    return {number: Answer([response.tokens() for response in client.responses[number] if not response.error],
                           client.final(number).tensors, client.final(number).error) for number in ids}, client.stats


def manager_of(port, rank, job, client=None):
    """Construct the manager of a rank, with callbacks if there is a client. None: the job has no such rank."""
    options = {**job.options, "device": "cpu", "num_threads": 1}
    tensor, stages = options.pop("tensor", 1), options.pop("stages", 1)
    if rank >= tensor * stages:
        return None
    config = ParallelConfig(tensor_parallel_size=tensor, pipeline_parallel_size=stages, rank=rank,
                            leader=f"127.0.0.1:{port}", rank_timeout_s=options.pop("rank_timeout_s", 30),
                            connect_timeout_s=60)
    if client is not None:
        return make_manager(client, model_path=job.folder, parallel_config=config, **options)
    return GptManager(job.folder, **engine_arguments(None, parallel_config=config, **options),
                      get_inference_requests_cb=None, send_response_cb=None)


def with_drafts(job, answers):
    """Return a job with a drafter and clients that know the answers, and are often right."""
    texts = {given[0]: answers[given[0]].tokens[-1][len(given[1]):] for given, _ in job.requests}
    requests = [(given, {**more, "draft_input_ids": [*texts[given[0]][:given[0]], 5]} if given[0] < 4 else more)
                for given, more in job.requests]
    parts = {"drafter": KnowingDrafter(texts, VOCABULARY, 0.7, odd=0.1)}
    return job._replace(requests=requests, options={
        **job.options, "parts": parts if job.options["speculative_config"].method == "custom" else {}})


def run_rank(port, rank, jobs):
    """Run the jobs one after the other on this rank. Rank 0 returns the results of `run_alone`, other ranks None.

    One with a drafter has the requests of the job before it. Drafts do not depend on the time of a draft model.
    """
    results, DraftModel.seconds_per_draft = [], property(lambda model: 0.0, lambda model, seconds: None)
    for job in jobs:
        if rank == 0:
            if job.options.get("speculative_config"):
                job = with_drafts(job, results[-1][0])
            results.append(run_alone(job, lambda client, job=job: manager_of(port, 0, job, client)))
        elif (manager := manager_of(port, rank, job)) is not None:
            assert manager.wait_until_terminate(SECONDS * 2), manager.health()
            assert manager.health()["state"] == "STOPPED" and not manager.health()["failure"], manager.health()
    return results or None


def run_ranks(processes, port, jobs, num_ranks):
    """Return the results of `run_alone` for each job, run by ranks."""
    return processes.run(run_rank, [(port, rank, jobs) for rank in range(num_ranks)])[0]
