"""From rows of logits to tokens, and what is reported about them.

Owns     per-slot sampling state on the device; the order of everything done to logits; the draw, its log-probability,
         the end of a sequence as far as its tokens decide it; which texts beams go on with
Not      how logits came about (models), blocks, lengths and limits (the host counts those), requests
Yours    something that changes logits is a LogitsStage, placed in the order of stages.py, with its numbers in
         handover.SlotSetup, or from outside a logits post-processor; another way to draw goes to sampling.py and, for
         GPUs, to triton_kernels
"""
