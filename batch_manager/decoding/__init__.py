"""Samples tokens from rows of logits, and computes their log-probabilities and finish reasons.

Owns     per-slot sampling state on the device; the order of all changes to logits; sampling of tokens and their
         log-probabilities; end ids and stop words; beam search
Not      computing the logits (models); blocks, lengths and limits (the host counts those); requests
Yours    a change to the logits is a LogitsStage in a file of its own, listed in stages.py; its parameters are fields of
         SamplingConfig. Users of the package pass a stage in Parts.stages, or a logits post-processor. Another
         sampling method goes into sample_token.py of triton_kernels, triton_kernels/cpu and triton_kernels/reference
"""
