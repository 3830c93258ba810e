"""Who runs this iteration.

Owns     the policies: which requests get blocks, which of them get into the step, how a prompt is cut into chunks
Not      blocks and requests themselves: a scheduler reads them, spends from a ledger and returns lists
Yours    a policy of your own is a CapacityScheduler in capacity.py's style; one that decides everything itself is a
         RequestScheduler; policies.py maps names to objects

MaxRequestsScheduler and force_chunk serve conformance records and users' own schedulers; no option selects them.
"""
