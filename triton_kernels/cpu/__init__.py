"""CPU versions, in torch and numpy, of operations whose oracle is slow. native/ holds the compiled step, in C.

Owns     how a CPU computes an operation; `dispatch.kernel` returns these functions. Without a file here the oracle runs
Not      the definition of an operation: see the kernel's docstring. A file here explains only its algorithm
Yours    a new CPU version is one file `<name>.py` with the kernel's signature; the kernel's test compares it with the
         oracle

`fixed_pieces` is a helper: it splits torch operations into pieces of fixed shape, for deterministic engines. Operations
whose CPU version has a deterministic variant take the parameter `deterministic`. Triton kernels ignore the parameter:
with one program per row, or a fixed tile, they are always deterministic.
"""
