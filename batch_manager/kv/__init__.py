"""The accounting of the KV cache: which request owns which block.

Owns     the free order, the block tables, lengths, and every number that a scheduler plans with
Not      the contents of blocks, scheduling, the end of a request
Yours    the table below shows where a number of blocks belongs; arithmetic on lengths alone goes to block_needs.py,
         claims and releases go to claims.py; new state gets a check in audit.py

The table lists all numbers of blocks. An exact number equals the blocks that a claim takes or a sequence holds. A bound
is never exceeded. The row `reusable_tokens` is a number of tokens, and a claim finds at least this many in the cache.

    number                                     file                  kind      used by
    free_blocks, used_blocks, usage()          kv_cache_manager      exact     statistics, plan check, custom schedulers
    held_blocks, block_ids                     kv_cache_manager      exact     starvation check, tests
    blocks_to_claim                            kv_cache_manager      exact     plan check, before anything is claimed
    blocks_freed_by                            kv_cache_manager      exact     plan check, for the requests to pause
    reusable_tokens                            kv_cache_manager      least     plan check, cost of a first chunk
    new_blocks                                 sequence_table        exact     the ledger, and the claim itself
    KvLedger.blocks_to_claim                   ledger                exact     blocks_to_claim
    KvLedger.blocks_for_next_step              ledger                bound     MAX_UTILIZATION; exact without drafts
    KvLedger.blocks_for_next_step_of_generating  ledger              bound     MAX_UTILIZATION, as a sum over requests
    KvLedger.blocks_to_completion              ledger                bound     GUARANTEED_NO_EVICT, STATIC_BATCH
    KvLedger.blocks_to_completion_of_started   ledger                bound     GUARANTEED_NO_EVICT, STATIC_BATCH
    Reservations.most_blocks                   reservations          bound     admission, to refuse too large requests
    Reservations.of_owners, of_all_owners      reservations          bound     the ledger
    get_remaining_blocks_to_completion         kv_cache_manager      estimate  schedulers written for TensorRT-LLM
"""
