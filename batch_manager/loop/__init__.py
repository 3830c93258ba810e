"""The loop. One iteration has the phases fetch, schedule, claim, start, finish, advance, respond, poll and report.

Owns     the order of an iteration, the active requests, the list of unanswered items, the callbacks in their guarded
         blocks
Not      threads (gpt_manager, worker), scheduling policies (scheduling), blocks (kv), running the model (runtime)
Yours    generation_loop.py keeps to the phases above; resources of a request are claimed in steps/resources.py
"""
