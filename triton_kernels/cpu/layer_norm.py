"""LayerNorm on a CPU, with torch's function. Same contract as triton_kernels/layer_norm.py."""

from torch.nn import functional

from .fixed_pieces import row_by_row


def layer_norm(hidden, weight, bias, epsilon, residual=None, out=None, deterministic=False):
    """Normalize over the last dimension. Returns `out`, or a new tensor if `out` is None.

    See triton_kernels/layer_norm.py for shapes.
    """
    if weight is not None and weight.dim() == 2:
        normed = layer_norm(hidden, None, None, epsilon, deterministic=deterministic).mul_(weight)
        normed = normed if bias is None else normed.add_(bias)
        return normed if out is None else out.copy_(normed)
    rows = hidden if residual is None else residual.add_(hidden)
    if deterministic:
        normed = row_by_row(lambda piece: functional.layer_norm(piece, piece.shape[-1:], weight, bias, epsilon),
                            rows.reshape(-1, rows.shape[-1])).view(rows.shape)
    else:
        normed = functional.layer_norm(rows, rows.shape[-1:], weight, bias, epsilon)
    return normed if out is None else out.copy_(normed)
