"""Scheduling: chooses the requests of the next step.

Owns     the policies: which requests get blocks, which requests are in the step, how prompts are cut into chunks
Not      blocks and requests: a scheduler reads them, spends from a ledger, returns lists and changes nothing else
Yours    a policy is a CapacityScheduler as in capacity.py; a RequestScheduler makes the complete plan; policies.py maps
         names to objects

force_chunk serves conformance tests and custom schedulers; no option selects it.
"""
