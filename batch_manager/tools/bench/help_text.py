"""Description and epilog of `batch-manager bench --help`."""

ABOUT = """Serve a workload through the callbacks of a GptManager and measure how fast it is.

    batch-manager workload --tokenizer FOLDER --out offline.json
    batch-manager bench --model FOLDER --workload offline.json --out result.json
    batch-manager bench --model FOLDER --workload offline.json --request-rate 2 --slo-ttft-ms 500 --slo-itl-ms 50
    batch-manager bench --model FOLDER --workload offline.json --sweep concurrency=1,2,4,8,16 --plot plots
    batch-manager bench --model FOLDER --workload offline.json --find-saturation --slo-ttft-ms 500
    batch-manager bench --model FOLDER --workload sharegpt.json --turns 5 --request-rate 1 --max-input-tokens 4000

Requests are submitted when they arrive and decoded greedily to exactly the requested length. Every token gets a
timestamp when the send callback receives it. All latencies are computed from these timestamps and count from the
arrival of the request. Only the run is timed; a warm-up with other prompts runs before it, on the same engine. A
sweep loads the engine once.

Requests with the same `session` in a workload, and the answered turns of a ShareGPT conversation, are the turns of a
session. Its first turn arrives at a time of the load; each later turn arrives `think_s` seconds (0) after the answer to
the turn before it. Its prompt is that turn's prompt, the answer that was generated, and the tokens of the new turn.
--request-rate is then sessions/s, and --concurrency without a rate is sessions in progress.

With --block-reuse each run of a sweep has its own cache salt, so that it does not reuse blocks of the others.
"""

HOW_IT_ENDS = """The result (--out, --report json) is one JSON object. A sweep has these fields for each of `points`:

    output_tok_s, total_tok_s     generated tokens, and prompt plus generated tokens, over wall_s; prompts of requests
                                  without a token are left out
    requested_tok_s               requested tokens over wall_s: gptManagerBenchmark's token_throughput
    requests_s                    requests without an error, over wall_s
    ttft_ms_*, itl_ms_*, e2e_ms_* time to the first token, between two tokens, and to the last token; the first and the
                                  third count from arrival
    latency_ms                    avg, min, max, p50, p90, p99 of ttft, itl, e2e, tpot (mean time between the tokens of
                                  one request) and, with --queue-times, queue (arrival to the first step)
    user_tok_s                    tokens/s that one user sees: 1 / tpot
    goodput                       with --slo-ttft-ms, --slo-itl-ms, --slo-e2e-ms: requests/s within all bounds, and
                                  their share (--slo-itl-ms bounds a request's mean time between tokens)
    sessions, turns               number of sessions, and the figures of the first turns, the second turns, and so on;
                                  null without sessions
    offered_rate, completion_rate requests/s that arrive, and that complete, between the first and the last one
    arrival_window_rate           requests/s that complete in the second half of the time in which requests arrive: the
                                  offered rate less the growth of the requests in progress between its quarters;
                                  --find-saturation compares it with the offered rate
    steps                         iterations with an active request
    drafts                        with drafts: sequences in steps with drafts, tokens drafted, and those accepted at
                                  each place; with --synthetic-acceptance, also the outputs that are other ones
                                  than without drafts, where two tokens are nearly equal (none in float32)
    peak_rss_mb                   sum of the largest resident sets of this process and its children
    load_s                        from the start of loading to the end of the warm-up
    cpu                           cores used during the run by this process (own), by others (foreign; foreign_nice:
                                  the part at a positive nice level) and by the hypervisor (steal)
    failed, failures              number of requests that ended with an error, and the first 20 of them
    wrong_length                  requests without exactly the requested number of tokens, including failed ones

--plot and --stats-csv collect statistics in every iteration, which costs some host time.

`[BENCHMARK]` lines and --output-csv use gptManagerBenchmark's names. As in that program, token_throughput counts
requested lengths. sequence_latency and time_to_first_token count from arrival and include the time in the queue;
inter_token_latency is tpot. A sample and a sequence are both one request, regardless of its beams.

Exit status: 0 done; 1 a request failed, an output has the wrong length, or the engine stopped answering; 2 an argument
or a file is wrong; 130 Ctrl-C; 143 SIGTERM. Output files are written whole or not at all, except the trace: it grows
while the engine runs, and a run that is interrupted leaves the part so far. Reads /proc, so it needs Linux."""
