"""A CPU's own way where it is faster than the oracle: the file name and signature of the kernel, torch and numpy only.

Owns     how a CPU computes one operation; `dispatch.kernel` hands these out. Without a file here the oracle runs
Not      what an operation computes: that stands in the kernel's docstring; a file here says why its way is another
Yours    a new twin is one file `<name>.py` with the kernel's signature; the kernel's test compares it with the oracle

`fixed_pieces` is no operation: it cuts operations of torch into pieces of fixed shape, for engines that are
deterministic. Operations whose bits depend on that take `deterministic`, which a Triton kernel does not need: one
program a row, or a fixed tile, is deterministic as it is.
"""
