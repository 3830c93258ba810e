"""Runs a program with interpreted Triton kernels, without the work that the interpreter repeats at each function call.

    TRITON_INTERPRET=1 python -m tests.quick_interpreter MODULE [ARGUMENT ...]     as python -m MODULE [ARGUMENT ...]
    TRITON_INTERPRET=1 python -m tests.quick_interpreter -c CODE [ARGUMENT ...]    as python -c CODE [ARGUMENT ...]

The interpreter replaces the functions of triton.language when a kernel is launched, and again whenever the kernel calls
another Triton function. The repetitions replace nothing and take a quarter of the run time.
"""

import runpy
import sys

from triton.runtime import interpreter

replace_functions = interpreter._patch_lang


def replace_functions_once(function):
    """Replace the functions of triton.language that a kernel's `function` uses, unless a running kernel did so already.

    This function takes the place of `_patch_lang` in Triton's interpreter.
    """
    language = interpreter.tl
    modules = [value for value in function.__globals__.values() if value is language or value is language.core]
    if modules and not any(language.core.is_builtin(module.load) for module in modules):
        return interpreter._LangPatchScope()
    return replace_functions(function)


if __name__ == "__main__":
    interpreter._patch_lang = replace_functions_once
    del sys.argv[0]
    if sys.argv[0] == "-c":
        exec(sys.argv.pop(1), {"__name__": "__main__"})
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
