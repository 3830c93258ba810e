"""Every kernel has an oracle with the same signature and a test file. Oracles and CPU forms do not import triton."""

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import batch_manager.triton_kernels as triton_kernels

KERNELS = Path(triton_kernels.__file__).parent
TESTS = Path(__file__).parent
WORK_LISTS = {"context_work_list", "decode_work_list"}
ON_THE_HOST = {"attention_scratch", "fused_linear_settings", "sample_scratch", *WORK_LISTS}      # without triton
NOT_KERNELS = {"__init__", "alibi", "dispatch", "device_limits", "fp8", "interpreter", "soft_cap", "strides",
               *ON_THE_HOST}
NAMES = sorted({path.stem for path in KERNELS.glob("*.py")} - NOT_KERNELS)
TWINS = sorted({path.stem for path in (KERNELS / "cpu").glob("*.py")} - {"__init__", "fixed_pieces", "large_pages",
                                                                      "logit_blocks"})


def parameters_of(path, name):
    """Return the (parameter name, default) pairs of function `name`, without importing the module."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    arguments = next(function.args for function in functions if function.name == name)
    defaults = [ast.unparse(default) for default in arguments.defaults]
    names = [argument.arg for argument in arguments.args]
    return list(zip(names, [None] * (len(names) - len(defaults)) + defaults))


def test_every_kernel_has_an_oracle_and_a_test():
    assert sorted({path.stem for path in (KERNELS / "reference").glob("*.py")} - {"__init__"}) == NAMES
    assert [name for name in NAMES if not (TESTS / f"test_{name}.py").exists()] == []


@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_oracle_have_one_signature(name):
    kernel = parameters_of(KERNELS / f"{name}.py", name)
    assert kernel == parameters_of(KERNELS / "reference" / f"{name}.py", name)
    oracle = importlib.import_module(f"batch_manager.triton_kernels.reference.{name}")
    assert list(inspect.signature(getattr(oracle, name)).parameters) == [parameter for parameter, _ in kernel]


def test_every_twin_of_the_cpu_has_a_kernel():
    assert TWINS and set(TWINS) <= set(NAMES)


@pytest.mark.parametrize("name", TWINS)
def test_kernel_and_twin_of_the_cpu_have_one_signature(name):
    """But for the compiled library, which a twin may use."""
    kernel = parameters_of(KERNELS / f"{name}.py", name)
    own = [("native", "None")] if "native" in dict(parameters_of(KERNELS / "cpu" / f"{name}.py", name)) else []
    kernel += own
    assert kernel == parameters_of(KERNELS / "cpu" / f"{name}.py", name)
    twin = importlib.import_module(f"batch_manager.triton_kernels.cpu.{name}")
    assert list(inspect.signature(getattr(twin, name)).parameters) == [parameter for parameter, _ in kernel]


@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_file_says_what_the_project_asks(name):
    docstring = ast.get_docstring(ast.parse((KERNELS / f"{name}.py").read_text()))
    words = ["Shapes", f"Oracle      triton_kernels/reference/{name}.py", "Source"]
    assert [word for word in words if word not in docstring] == []


def test_the_package_imports_torch_and_triton_only_and_numpy_for_what_runs_on_the_host():
    allowed = {"torch", "triton", *sys.stdlib_module_names}
    for path in KERNELS.rglob("*.py"):
        on_the_host = {"numpy"} if KERNELS / "cpu" in path.parents or path.stem in WORK_LISTS else set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            else:
                continue
            assert {module.split(".")[0] for module in modules} <= allowed | on_the_host, path


def test_oracles_and_dispatch_do_not_import_triton():
    modules = ["dispatch", *sorted(ON_THE_HOST), "cpu.fixed_pieces", *(f"reference.{name}" for name in NAMES),
               *(f"cpu.{name}" for name in TWINS)]
    program = "import sys, importlib\n" + "\n".join(
        f"importlib.import_module('batch_manager.triton_kernels.{module}')" for module in modules
    ) + "\nprint('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "False"
