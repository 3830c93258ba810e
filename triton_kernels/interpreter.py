"""Make the interpreter of Triton 3.6 work with numpy 2.4 and later."""

from triton.runtime import interpreter


def accept_arrays_of_one_element():
    """Let interpreted kernels use an array of one element as an integer.

    Triton 3.6 converts such an array with `int`, which numpy refuses since 2.4. Later releases of Triton do not need
    this function, and it changes nothing for them.
    """
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    interpreter._patch_lang_tensor = patch_with_index
