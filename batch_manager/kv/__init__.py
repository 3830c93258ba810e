"""Who owns which block of the KV cache.

Owns     the free order, the block tables, lengths, and every number a scheduler plans with
Not      what is stored in a block, which request ought to run, when a request ends
Yours    a number goes where the table says; arithmetic on lengths only goes to block_needs.py; what claims and releases
         goes to claims.py; any new state gets a line in audit.py

Numbers of blocks. An exact number is what a claim takes or a sequence holds. A bound is never exceeded.

    number                                     file                  kind      who asks
    free_blocks, used_blocks, usage()          kv_cache_manager      exact     statistics, plan check, custom schedulers
    held_blocks, block_ids                     kv_cache_manager      exact     starvation check, tests
    blocks_to_claim                            kv_cache_manager      exact     plan check, before anything is claimed
    blocks_freed_by                            kv_cache_manager      exact     plan check, for the requests to pause
    reusable_tokens                            kv_cache_manager      exact     plan check, cost of a first chunk
    new_blocks                                 sequence_table        exact     the ledger, and the claim itself
    KvLedger.blocks_to_claim                   ledger                exact     blocks_to_claim
    KvLedger.blocks_for_next_step              ledger                bound     MAX_UTILIZATION; exact without drafts
    KvLedger.blocks_for_next_step_of_generating  ledger              bound     the same, summed
    KvLedger.blocks_to_completion              ledger                bound     GUARANTEED_NO_EVICT, STATIC_BATCH
    KvLedger.blocks_to_completion_of_started   ledger                bound     GUARANTEED_NO_EVICT, STATIC_BATCH
    Reservations.most_blocks                   reservations          bound     admission: can the request ever run?
    Reservations.of_owners, of_all_owners      reservations          bound     the ledger
    Estimates.*                                estimates             estimate  TensorRT-LLM's numbers: records and
                                                                               custom schedulers, never the loop

Serving records and custom schedulers only: Estimates, and the temporary_attention_window that they read.
"""
