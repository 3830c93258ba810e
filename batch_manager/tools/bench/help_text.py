"""What `batch-manager bench --help` says around its options."""

ABOUT = """Serve a workload with a GptManager, through its callbacks, and say how fast that was.

    batch-manager workload --out offline.json
    batch-manager bench --model FOLDER --workload offline.json --out result.json
    batch-manager bench --model FOLDER --workload offline.json --request-rate 2 --slo-ttft-ms 500 --slo-itl-ms 50
    batch-manager bench --model FOLDER --workload offline.json --sweep concurrency=1,2,4,8,16 --plot plots
    batch-manager bench --model FOLDER --workload offline.json --find-saturation --slo-ttft-ms 500

Requests are handed over when they arrive and decoded greedily to exactly the length they ask for. Every token is
stamped when the send callback receives it; all latencies come from the stamps and count from the arrival of the
request. Only the serving is timed: a warm-up with other prompts goes before, on the same engine. A sweep loads the
engine once; with --block-reuse each of its servings has a cache salt of its own, so that none finds the blocks of
another one.
"""

HOW_IT_ENDS = """The result (--out, --report json), one JSON object. A sweep has these for each of its `points`:

    output_tok_s, total_tok_s     generated tokens, and prompt plus generated tokens, over wall_s
    requested_tok_s               tokens that requests asked for, over wall_s: gptManagerBenchmark's token_throughput
    requests_s                    requests that did not fail, over wall_s
    ttft_ms_*, itl_ms_*, e2e_ms_* time to the first token and to the last, both from arrival, and between two tokens
    latency_ms                    avg, min, max, p50, p90, p99 of ttft, itl, e2e, of tpot (for each request its mean
                                  time between tokens) and, with --queue-times, of queue (arrival to the first step)
    user_tok_s                    tokens a second that one user sees: 1 / tpot
    goodput                       with --slo-ttft-ms, --slo-itl-ms: requests a second, and share of all, that keep both
                                  (the mean time between the tokens of a request counts)
    offered_rate, completion_rate requests a second that arrive, and that are done, between the first and the last one
    steps                         iterations of the engine with an active request
    peak_rss_mb                   largest resident set of this process and its children, added up
    load_s                        from the start of loading to the end of the warm-up
    cpu                           cores burnt by this process (own), by others (foreign; foreign_nice is the part at a
                                  positive nice level) and by the hypervisor (steal) while it served
    failed, failures              requests that ended with an error, and the first 20 of them
    wrong_length                  requests whose output is not as long as asked for, failed ones included

--plot and --stats-csv take the statistics of every iteration, which costs the engine some host time.

`[BENCHMARK]` lines and --output-csv have gptManagerBenchmark's names. token_throughput counts requested lengths, as
there; sequence_latency and time_to_first_token count from arrival, the time in the queue included;
inter_token_latency is tpot. A sample is a request, and a sequence is one too, whatever its beams.

Exit status: 0 done; 1 a request failed, an output has the wrong length, or the engine stopped answering; 2 an argument
or a file is wrong; 130 Ctrl-C; 143 SIGTERM. Output files are written whole or not at all, except the trace: it grows
while the engine runs, and a run that is interrupted leaves the part so far. Reads /proc, so it needs Linux."""
