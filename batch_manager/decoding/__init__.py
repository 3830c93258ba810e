"""From rows of logits to tokens, and what is reported about them.

Owns     per-slot sampling state on the device; the order of everything done to logits; sampling a token, its
         log-probability, the end of a sequence as far as its tokens decide it; which continuations beams go on with
Not      how logits came about (models), blocks, lengths and limits (the host counts those), requests
Yours    something that changes logits is a LogitsStage in a file of its own, placed in the order of stages.py, whose
         numbers are rows of SamplingConfig; from outside a stage of Parts.stages, or a logits post-processor. Another
         way to sample goes to triton_kernels/sample_token.py and its two other forms
"""
