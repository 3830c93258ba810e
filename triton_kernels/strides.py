"""What the kernels expect of their tensors' strides, as predicates for assertions."""


def heads_contiguous(rows) -> bool:
    """`rows` [T, H, D]: the heads of one token lie one after another; the stride of T is free."""
    return rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])


def pages_contiguous(kv_pool) -> bool:
    """`kv_pool` [N, 2, HK, B, D]: the B rows of one head of one block lie one after another."""
    return kv_pool.stride(4) == 1 and kv_pool.stride(3) == kv_pool.shape[4]
