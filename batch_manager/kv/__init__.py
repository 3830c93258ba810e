"""Who owns which block of the KV cache.

Owns     the free order, the block tables, lengths, and every number a scheduler plans with
Not      what is stored in a block, which request ought to run, when a request ends
Yours    arithmetic on lengths goes to block_needs.py; a number of TensorRT-LLM's to estimates.py, what sequences will
         really hold to reservations.py, what a plan may ask of its budget to ledger.py; any new state gets a line in
         audit.py
"""
