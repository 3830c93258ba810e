"""The device operations of a step, each implemented in Triton and in plain torch.

Owns        the kernels: rotation and cache writes, paged attention, norms, activations, token sampling.
Uses        torch and triton, numpy on the host, and no other package of this project. Importing this package,
            `dispatch` or `reference` never imports triton; a kernel module (`rms_norm`, ...) does.
Must not    use requests, models, schedulers, streams or graphs. A kernel takes tensors and numbers.

A new kernel is three files of the same name: `<name>.py` with the kernel and, below it, the function that launches it;
`reference/<name>.py` with the same signature in torch, simple and slow; `tests/kernels/test_<name>.py`, which compares
the two. If a faster version for CPUs is worthwhile, `cpu/<name>.py` is a fourth file.
`tests/kernels/test_layout.py` checks the folders against each other. `test_ahead_of_time.py` compiles every kernel for
four architectures: add the new kernel to KERNELS there, and a call of the kernel to
`compile_ahead_of_time.py`.
"""
