"""Decides which operations of a recorded model share a launch with a matrix product.

A norm is fused into the products that read it, an activation into the product before it, and a bias and a residual sum
into their product.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ....layers.recording import Rows
from .recording import Activation, LaunchRecording, Norm, Operation, Product, is_whole, read_by, written_by


@dataclass(frozen=True, slots=True)
class FusedProduct:
    """A product and the operations fused into its launch. The launch reads `x` and writes `result`.

    norm         applied to `x` first; None: no norm
    activation   applied to the product; None: no activation
    """

    x: Rows
    result: Rows
    product: Product
    norm: Norm | None
    activation: Activation | None


def fuse(recording: LaunchRecording,
         pays: Callable[[int, int, bool, str, float], bool]) -> list[Operation | FusedProduct]:
    """Return the operations in order, with norms, activations, biases and sums fused into matrix products.

    pays   (columns of the product's input, columns of the result, whether a gated activation is fused, fused norm:
           "none", "rms" or "layer", number of launches saved) -> whether the fused product is faster than separate
           launches. A norm that n products read counts as 1 / n of a launch for each of them
    """
    operations, widths = recording.operations, recording.widths
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for register in read_by(operation):
            readers.setdefault(register, []).append(index)

    def can_fuse(product: Product) -> bool:
        return is_whole(product.x, widths) and is_whole(product.result, widths)

    def activation_after(index: int) -> int | None:
        """Return the index of the activation to fuse into the product at `index`, or None.

        The activation must be the only reader of the product and must read all its columns.
        """
        product = operations[index]
        found = readers.get(product.result.register, [])
        if product.adds or len(found) != 1 or product.result.register == recording.result:
            return None
        activation = operations[found[0]]
        is_taken = isinstance(activation, Activation) and is_whole(activation.x, widths)
        return found[0] if is_taken else None

    def launches_after(index: int) -> int:
        """Return 1 if fusing what follows the product at `index` saves a launch, otherwise 0.

        Fusing an activation saves a launch, and so does fusing the sum of product, bias and residual. Without a bias,
        an unfused product needs no launch for its residual, which the matrix library adds.
        """
        product = operations[index]
        adds_both = product.adds and product.matrix.bias is not None
        return int(activation_after(index) is not None or adds_both)

    def pays_with(index: int, norm: str, saved: float) -> bool:
        product, activated_at = operations[index], activation_after(index)
        gated = activated_at is not None and operations[activated_at].gated
        outputs = product.matrix.weight.shape[0] // (2 if gated else 1)
        return pays(product.matrix.weight.shape[1], outputs, gated, norm, saved + launches_after(index))

    def takes_norm(norm_at: int, index: int) -> bool:
        """Whether it is possible, and saves time, to fuse the norm at `norm_at` into the operation at `index`."""
        norm, operation = operations[norm_at], operations[index]
        if not isinstance(operation, Product) or not can_fuse(operation):
            return False
        between = operations[norm_at + 1 : index + 1]
        return (operation.x.register == norm.result.register
                and all(norm.x.register not in written_by(one) for one in between)
                and pays_with(index, _kind_of(norm), 1 / len(readers[norm.result.register])))

    norm_of: dict[int, Norm] = {}
    left_out: set[int] = set()
    for index, norm in enumerate(operations):
        if not isinstance(norm, Norm) or not is_whole(norm.x, widths) or norm.result.register == recording.result:
            continue
        followers = readers.get(norm.result.register, [])
        if followers and all(takes_norm(index, reader) for reader in followers):
            left_out.add(index)
            norm_of |= dict.fromkeys(followers, norm)

    steps: list[Operation | FusedProduct] = []
    for index, operation in enumerate(operations):
        if index in left_out:
            continue
        if isinstance(operation, Product):
            norm, activated_at = norm_of.get(index), activation_after(index)
            saves_one = norm is not None or launches_after(index) > 0
            if saves_one and can_fuse(operation) and (norm is not None or pays_with(index, "none", 0)):
                activation = None if activated_at is None else operations[activated_at]
                left_out |= {activated_at} - {None}
                steps.append(FusedProduct((norm or operation).x, (activation or operation).result, operation, norm,
                                          activation))
                continue
        steps.append(operation)
    return steps


def _kind_of(norm: Norm) -> str:
    return "rms" if norm.bias is None else "layer"
