"""The operations of one step on the device, each written once for Triton and once in plain torch.

Owns        what a kernel computes: rotation and cache writes, paged attention, norms, activations, drawing a token.
Knows       torch and triton, nothing else of this project. Importing this package, `dispatch` or `reference`
            never imports triton; a kernel module (`rms_norm`, ...) does.
Must not    know requests, models, schedules, streams or graphs. A kernel gets tensors and numbers.

A new kernel is three files of one name: `<name>.py` with the kernel and, below it, the function that launches it;
`reference/<name>.py` with the same signature in torch, simple and slow; `tests/kernels/test_<name>.py`, which
compares the two. Where a CPU has a faster way than the oracle, `cpu/<name>.py` is a fourth.
`tests/kernels/test_layout.py` holds the folders together and `test_ahead_of_time.py` compiles every kernel for four
architectures: give it one line there.
"""
