"""One iteration: fetch, schedule, claim, start, finish, advance, respond, poll, report.

Owns     the order of an iteration, the table of active requests, the ledger of unanswered items, the callbacks in their
         guarded blocks
Not      threads (gpt_manager, worker), the arithmetic of a policy (scheduling), blocks (kv), anything a model computes
Yours    generation_loop.py stays the sentence above; what a request must hold is claimed in steps/resources.py
"""
