"""The loop. One iteration has the phases fetch, schedule, claim, start, finish, advance, respond, poll and report.

Owns     the order of an iteration, the active requests, the list of unanswered items, the callbacks in their guarded
         blocks
Not      threads (gpt_manager, worker), scheduling policies (scheduling), blocks (kv), running the model (runtime)
Yours    code that you add to generation_loop.py must be part of a phase above; code that claims resources of a
         request goes into steps/resources.py
"""
