"""Predicates on tensor strides, for the assertions of kernel launchers."""


def heads_contiguous(rows) -> bool:
    """Whether the heads of each token of `rows` [T, H, D] are contiguous. The stride of T is arbitrary."""
    return rows.stride(2) == 1 and (rows.shape[1] == 1 or rows.stride(1) == rows.shape[2])


def pages_contiguous(kv_pool) -> bool:
    """Whether the B rows of each head of each block of `kv_pool` [N, 2, HK, B, D] are contiguous."""
    return kv_pool.stride(4) == 1 and kv_pool.stride(3) == kv_pool.shape[4]
