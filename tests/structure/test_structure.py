"""T13: the source of the package keeps its rules: which module imports which, and which file may use which name."""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

import batch_manager
from batch_manager.models.registry import _SHIPPED
from batch_manager.tools.__main__ import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE, KERNELS = REPOSITORY / "batch_manager", REPOSITORY / "triton_kernels"

GROUND = ["adapter_values", "contained_log", "forked_child", "guard", "errors", "names", "option_values",
          "sampling_config", "config", "handover", "seams", "kv_events"]
HOST = ["requests", "kv", "scheduling", "stats", "responses", "steps", "stores", "loop"]
DEVICE = ["parallel", "weights", "layers", "attention", "models", "decoding", "runtime"]

# A folder, or a file at the top of the package -> what it may import from the package, besides its own folder.
FLOORS: dict[str, list[str]] = {
    "_version": [],
    "names": [],
    "adapter_values": [],
    "errors": ["names"],
    "contained_log": ["errors"],
    "forked_child": ["errors"],
    "guard": ["contained_log", "errors", "forked_child"],
    "kv_events": ["errors", "option_values"],
    "one_shot_event": [],
    "thread_stack": [],
    "sampling_config": ["errors", "names"],
    "handover": ["adapter_values", "errors", "names", "sampling_config"],
    "option_values": ["errors"],
    "seams": ["adapter_values", "errors", "names", "handover", "option_values"],
    "clock": ["contained_log", "errors", "guard", "seams"],
    "config": ["adapter_values", "errors", "kv_events", "names", "handover", "seams", "option_values"],

    "requests": GROUND,
    "kv": [*GROUND, "requests"],
    "scheduling": [*GROUND, "requests", "kv"],
    "stats": GROUND,
    "responses": [*GROUND, "requests"],
    "steps": [*GROUND, "requests", "kv", "scheduling"],
    "stores": [*GROUND, "one_shot_event", "thread_stack", "requests", "kv", "steps"],
    "loop": [*GROUND, "thread_stack", "requests", "kv", "scheduling", "stats", "responses", "steps", "stores"],


    "triton_kernels": [],
    "parallel": [*GROUND, "one_shot_event", "thread_stack"],
    "weights": [*GROUND, "loading_thread"],
    "layers": [*GROUND, "triton_kernels", "parallel", "weights"],
    "attention": [*GROUND, "triton_kernels", "parallel", "weights"],
    "models": [*GROUND, "triton_kernels", "parallel", "weights", "layers", "attention"],
    "decoding": [*GROUND, "triton_kernels", "parallel", "weights", "layers", "attention"],
    "runtime": [*GROUND, "loading_thread", "triton_kernels", "parallel", "weights", "layers", "attention", "models",
                "decoding"],

    "adapters": ["adapter_values", "config", "errors", "weights", "layers", "models"],
    "custom_parts": ["arguments", *GROUND, "requests", "kv", "scheduling"],
    "options": ["arguments", *GROUND, "requests", "kv"],
    "build": ["adapters", "arguments", "clock", "custom_parts", "options", *GROUND, *HOST, *DEVICE, "triton_kernels",
              "interpreter_exit"],
    "build_rank": ["arguments", "build", "clock", "_version", "loading_thread", "custom_parts", "options", *GROUND,
                   "requests", "loop", "parallel", "runtime", "weights"],
    "interpreter_exit": ["errors", "names"],
    "loading_thread": ["one_shot_event", "thread_stack", "errors", "names", "interpreter_exit"],
    "worker": ["one_shot_event", *GROUND, *HOST, "interpreter_exit"],
    "engine_info": GROUND,
    "aio": ["arguments", "options", *GROUND, "requests", "responses", "engine_info", "gpt_manager", "interpreter_exit",
            "models", "one_shot_event", "thread_stack"],
    "gpt_manager": ["adapters", "clock", "arguments", "engine_info", *GROUND, *HOST, "build_rank", "custom_parts",
                    "interpreter_exit", "loading_thread", "one_shot_event", "worker", "thread_stack"],
    "arguments": [*GROUND, "loop"],
    "testing": [*GROUND, *HOST, "arguments", "decoding", "attention", "runtime", "build"],
    "tools": ["adapters", "arguments", "clock", "_version", *GROUND, *HOST, *DEVICE, "triton_kernels", "build",
              "gpt_manager", "aio", "testing", "extras"],
    "extras": ["adapters", "arguments", "_version", *GROUND, "parallel", "triton_kernels", "weights", "requests",
               "responses", "stats", "engine_info", "gpt_manager", "aio"],
    "__init__": ["_version", *GROUND, *HOST, "weights", "layers", "attention", "models", "decoding", "gpt_manager",
                 "engine_info"],
}

# A folder or file -> the libraries that it may import, besides the standard library.
OUTSIDE: dict[str, set[str]] = {
    **dict.fromkeys(["_version", "names", "errors", "contained_log", "forked_child", "guard", "one_shot_event", "clock",
                     "thread_stack", "__init__", "interpreter_exit", "loading_thread", "worker", "gpt_manager",
                     "kv_events", "arguments", "options", "build_rank", "engine_info", "aio"], set()),
    **dict.fromkeys(["adapter_values", "option_values", "sampling_config", "config", "handover", "seams",
                     "custom_parts", *HOST], {"numpy"}),
    "loop": {"numpy", "arctic_inference"},
    "stats": {"numpy", "orjson"},
    "triton_kernels": {"torch", "triton", "numpy"},
    **dict.fromkeys(DEVICE, {"numpy", "torch"}),
    "parallel": {"numpy"},
    "weights": {"numpy", "torch", "safetensors", "gguf"},
    "models": {"numpy", "torch", "transformers"},
    "adapters": {"numpy", "torch"},
    "build": {"numpy", "torch"},
    "testing": {"numpy", "torch"},
    "tools": {"numpy", "torch", "orjson", "transformers", "tokenizers", "rich", "prometheus_client"},
    "extras": {"numpy", "torch", "llguidance", "jinja2", "tokenizers", "orjson", "prometheus_client", "starlette",
               "uvicorn", "opentelemetry", "zmq", "msgspec"},
}

# Code that handles hostile input must not load or start other code. ALLOWED_LOADERS: (file, name) -> why it may.
CODE_LOADERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "subprocess", "socket",
                "socketserver", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "asyncio", "importlib", "imp",
                "runpy", "code", "codeop", "pty", "ctypes", "cffi", "multiprocessing"}
CODE_LOADING_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
CODE_LOADING_ATTRIBUTES = {("torch", "load"), ("torch", "hub"), ("torch", "jit"), ("torch", "package"),
                           ("os", "system"), ("os", "popen"), ("os", "execv"), ("os", "execvp"), ("os", "spawnv"),
                           ("os", "execve"), ("os", "fork"), ("os", "posix_spawn"), ("numpy", "load"), ("np", "load"),
                           ("yaml", "load")}
ALLOWED_LOADERS = {
    ("batch_manager/__init__.py", "importlib"): "public names are served lazily, from a table in the file",
    **dict.fromkeys([(f"batch_manager/aio/{name}.py", "asyncio") for name in ("engine", "mailbox", "switchboard")],
                    "the host's event loops, which it is made for"),
    ("batch_manager/extras/async_llm.py", "asyncio"): "the host's event loops, which it is made for",
    ("batch_manager/extras/openai/service.py", "asyncio"): "long bodies are parsed in a thread",
    ("batch_manager/extras/openai/answers.py", "asyncio"): "texts of one answer are read side by side",
    ("batch_manager/extras/openai/responses.py", "asyncio"): "a response waits for its client's going away",
    ("batch_manager/extras/openai/server.py", "asyncio"): "drains after a signal",
    ("batch_manager/extras/openai/application.py", "asyncio"): "returns memory while the server runs",
    ("batch_manager/extras/openai/application.py", "ctypes"): "mallopt and malloc_trim of the C library that is loaded",
    ("batch_manager/extras/openai/server.py", "socket"): "tries the port before the model is loaded",
    **dict.fromkeys([("batch_manager/aio/engine_process.py", name) for name in ("multiprocessing", "pickle", "socket",
                                                                               "subprocess")],
                    "starts the package's own program, and checks what it is to be sent"),
    **dict.fromkeys([(f"batch_manager/aio/{file}.py", name) for file in ("messages", "engine_program")
                     for name in ("multiprocessing", "pickle")],
                    "messages between a process and the one that it started, over a socket pair without a name"),
    ("batch_manager/parallel/control.py", "socket"): "frames between the ranks of one model",
    ("batch_manager/parallel/block_exchange.py", "socket"): "frames between two engines of one model",
    ("batch_manager/models/registry.py", "importlib"): "model families are imported when wanted, from a table there",
    ("triton_kernels/dispatch.py", "importlib"): "a kernel, the CPU's own form of it or its oracle, by its name",
    ("triton_kernels/cpu/native/library.py", "ctypes"): "the compiled step: the package's own source, compiled here",
    ("triton_kernels/cpu/native/build.py", "ctypes"): "likewise",
    ("triton_kernels/cpu/native/build.py", "subprocess"): "the C compiler, on the package's own source",
    ("batch_manager/runtime/thread_count.py", "ctypes"): "functions of the OpenMP and MKL that torch has loaded",
}

ALLOWED_CALLS = {("batch_manager/extras/launch.py", "execve"): "torchrun, with the program's own command line"}

# File that catches every exception without raising it again -> (number of places, why no block of the guard does it).
BROAD_EXCEPTS = {
    "batch_manager/aio/engine_program.py": (1, "what its constructor raises is sent to the host"),
    "batch_manager/aio/messages.py": (1, "a request that cannot be unpickled costs itself only"),
    "batch_manager/clock.py": (1, "each block of the guard reads the clock twice"),
    "batch_manager/contained_log.py": (1, "a handler of the host's; blocks write to the log"),
    "batch_manager/errors.py": (2, "a property that is read for a message, in any thread; an exception's own text"),
    "batch_manager/worker.py": (1, "whatever ends the loop"),
    "batch_manager/loading_thread.py": (1, "handed to the thread that waits"),
    "batch_manager/parallel/leading.py": (1, "of a step that begins while another is read; kept for its reading"),
    "batch_manager/requests/item_digest.py": (2, "tensors of any kind, whose own code may raise"),
    "batch_manager/requests/admission.py": (1, "one attribute of an item of any kind; the id it may have"),
    "batch_manager/loop/callbacks.py": (1, "a stop signal that is no integer, inside a block"),
    "batch_manager/loop/generation_loop.py": (1, "giving back at the end must not cost the finals"),
    "batch_manager/decoding/logits_post_processors.py": (1, "the text of an error of the user's"),
    "batch_manager/stores/threads.py": (1, "a store of the user's own, or a fetch; mostly on a store's threads"),
    "batch_manager/testing/scripted_backend.py": (1, "a planted fault, kept until the step is waited for"),
}

ALLOWED_ENVIRONMENT = {
    "batch_manager/extras/launch.py": "all of it is handed on to torchrun",
    "batch_manager/parallel/mapping.py": "variables of launchers, which are read with a parallel_config only",
    "triton_kernels/dispatch.py": "TRITON_INTERPRET is Triton's own switch",
    "triton_kernels/cpu/native/build.py": "$CC names the compiler, $XDG_CACHE_HOME where what it compiled is kept",
}

# Functions of torch that use the host's default dtype or default device unless the call names one.
TENSOR_MAKERS = {"arange", "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full",
                 "linspace", "logspace", "normal", "ones", "rand", "randint", "randn", "randperm", "range",
                 "scalar_tensor", "tensor", "tril_indices", "triu_indices", "vander", "zeros"}
TENSOR_CLASSES = {"Tensor", "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor"}

# Errors whose message has two or three parts: a fact, an expectation, and a way out if there is one. Other errors state
# a part themselves.
ERRORS_WITH_PARTS = {"ConfigError", "InsufficientMemoryError", "InvalidRequestError", "DuplicateRequestIdError",
                         "RequestTooLargeError", "QueueFullError", "DeviceLostError", "ManagerClosedError"}

BANNED_IN_THE_LOOP = ["lora", "grammar", "beam", "draft", "penalty", "prefix", "logit", "attention"]
FOREIGN_WORDS = {"scheduling": "tensor", "kv": "logit", "runtime": "request"}


# ---------------------------------------------------------------------- reading the source


@dataclass(frozen=True)
class Import:
    """One import. `module` is the absolute name of the module, `name` the name imported from it, if any."""

    line: int
    module: str
    name: str | None
    for_types_only: bool


@dataclass(frozen=True)
class Source:
    """One source file. `module` is the name of its module in an installation, `floor` its key in FLOORS."""

    path: Path
    module: str
    floor: str
    tree: ast.Module

    @property
    def where(self) -> str:
        return self.path.relative_to(REPOSITORY).as_posix()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports())

    def _imports(self) -> Iterator[Import]:
        typing_only = {id(inner) for node in self.nodes if isinstance(node, ast.If)
                       and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
                       for statement in node.body for inner in ast.walk(statement)}
        package = self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(node.lineno, alias.name, None, id(node) in typing_only)
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")
                base = base[: len(base) - node.level + 1] if node.level else []
                module = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    yield Import(node.lineno, module, alias.name, id(node) in typing_only)


def read(root: Path, name: str) -> list[Source]:
    sources = []
    for path in sorted(root.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "triton_kernels"):    # a link to KERNELS, or a copy of it
            continue
        parts = [name, *path.relative_to(root).with_suffix("").parts]
        if parts[-1] == "__init__" and len(parts) > 2:
            parts.pop()
        module = ".".join(parts).removesuffix(".__init__")
        floor = "triton_kernels" if root == KERNELS else parts[1]
        sources.append(Source(path, module, floor, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return sources


@cache
def sources() -> list[Source]:
    """Return the files of the package. They are parsed by the first test that wants them, and not for a collection."""
    return read(PACKAGE, "batch_manager") + read(KERNELS, "batch_manager.triton_kernels")


@cache
def modules() -> set[str]:
    return {source.module for source in sources()}


def core() -> list[Source]:
    return [source for source in sources() if source.floor != "tools"]


def targets(source: Source, imported: Import) -> str | None:
    """Return the module of the package that an import names; None for a module of another package."""
    if imported.module.split(".")[0] != "batch_manager":
        return None
    submodule = f"{imported.module}.{imported.name}"
    return submodule if submodule in modules() else imported.module


def floor_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def root_of(module: str) -> str:
    return module.split(".")[0]


def report(findings: list[str]) -> str:
    return "\n" + "\n".join(findings)


# ---------------------------------------------------------------------- floors


def test_every_file_and_folder_of_the_package_stands_on_a_floor():
    homeless = [f"{source.where}: '{source.floor}' is on no floor; decide what it may import and add it to FLOORS"
                for source in sources() if source.floor not in FLOORS]
    assert not homeless, report(homeless)
    assert set(OUTSIDE) == set(FLOORS)


def test_imports_point_down():
    wrong = []
    for source in sources():
        for imported in source.imports:
            target = targets(source, imported)
            if target is None or floor_of(target) == source.floor:
                continue
            if floor_of(target) not in FLOORS.get(source.floor, []):
                wrong.append(f"{source.where}:{imported.line} imports {target}; '{floor_of(target)}' does not stand "
                             f"below '{source.floor}'")
    assert not wrong, report(wrong)


def test_the_tools_do_not_grow():
    """A quarter of the package is enough for the commands. A new option pays for its lines."""
    files = [path for path in (PACKAGE / "tools").rglob("*") if path.suffix in (".py", ".js", ".css", ".html", ".md")]
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= 15_280


def tower() -> list[Source]:
    return [source for source in sources() if source.floor == "runtime" and source.path.name != "__init__.py"]


# Attributes of the forms, their parts and the backend that are set outside of constructors, besides those in `close`.
SET_LATER = {
    "block_tables.py": ({"_num_noted", "_most_noted", "_changed", "rows", "mapped"}, "noted changes, and growth"),
    "operations.py": ({"num_done"}, "a counter"),
    "ranks/backend.py": ({"tokens"}, "of the next step"),
    "ranks/exchange.py": ({"of_torch", "_ranks", "_stages", "_spare", "_hidden_size", "_dtype", "_left", "_done",
                           "_swaps", "wait_s", "_devices", "_timeout", "_threads"},
                          "groups, once all ranks are there; what is left of a step"),
    "forms/form.py": ({"choice"}, "of the launched step"),
    "adapters/port.py": ({"_most_sums", "entries", "pool", "_slots", "_planned", "segments", "sent"},
                         "while the model's layers are made; the rows of the planned and of the running step"),
    "forms/compiled/forward.py": ({"positions", "pool_slots", "query_starts", "block_tables", "rows", "adapters",
                                   "num_sequences", "table_stride", "_memory", "_buffers", "_capacity"},
                                  "arguments of the C call, and growth"),
    "forms/compiled/thread_governor.py": ({"newest", "trial", "next_trial_s", "threads", "interval_s"}, "decisions"),
    "forms/fixed/fused.py": ({"result"}, "of a recording, before it is used"),
}


def test_the_rooms_of_the_device_tower_are_few():
    rooms = Counter(source.path.parent.relative_to(PACKAGE / "runtime").as_posix() for source in tower())
    assert rooms.pop(".") <= 12 and max(rooms.values()) <= 8
    backend = next(source for source in tower() if source.path.name == "native_backend.py")
    used = {targets(backend, imported) for imported in backend.imports}
    assert len({module for module in used if module and module.startswith("batch_manager.runtime.")}) <= 6
    assert len(backend.path.read_text(encoding="utf-8").splitlines()) <= 150


def test_at_most_eighteen_classes_have_step_in_their_names():
    named = [node.name for source in core() for node in source.nodes if isinstance(node, ast.ClassDef)
             and "Step" in node.name]
    assert len(named) <= 18, named


def test_one_function_decides_the_form_of_a_step():
    found = [(source.where, function.name) for source in sources() for function in source.nodes
             if isinstance(function, ast.FunctionDef) for node in ast.walk(function)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "misfit"]
    assert found == [("batch_manager/runtime/forms/form.py", "start")]


def test_forms_and_parts_are_complete_when_constructed():
    found: dict[str, set[str]] = {}
    for source in tower():
        if source.path.parent.name == "device":
            continue
        for function in source.nodes:
            if isinstance(function, ast.FunctionDef) and function.name not in ("__init__", "close"):
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                        where = source.path.relative_to(PACKAGE / "runtime").as_posix()
                        found.setdefault(where, set()).add(node.attr)
    assert found == {where: names for where, (names, _) in SET_LATER.items()}


def test_no_two_files_import_each_other_in_a_circle():
    below = {source.module: {target for imported in source.imports if not imported.for_types_only
                             and (target := targets(source, imported)) in modules() and target != source.module}
             for source in sources()}
    done: set[str] = set()

    def circle(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module):], module]
        if module in done:
            return None
        found = next((c for target in sorted(below[module]) if (c := circle(target, [*path, module]))), None)
        done.add(module)
        return found

    for module in sorted(below):
        found = circle(module, [])
        assert not found, " -> ".join(found)


def test_each_floor_takes_from_outside_only_what_it_may():
    wrong = [f"{source.where}:{imported.line} imports {imported.module}; '{source.floor}' may import "
             f"{', '.join(sorted(OUTSIDE[source.floor])) or 'the standard library only'}"
             for source in sources() if source.floor in OUTSIDE
             for imported in source.imports
             if targets(source, imported) is None and root_of(imported.module) not in sys.stdlib_module_names
             and root_of(imported.module) not in OUTSIDE[source.floor]]
    assert not wrong, report(wrong)


def test_nobody_inside_uses_the_front_door():
    wrong = [f"{source.where}:{imported.line} imports {imported.name or 'batch_manager'} from batch_manager itself; "
             "import it from the file that defines it"
             for source in sources() for imported in source.imports
             if targets(source, imported) == "batch_manager"]
    assert not wrong, report(wrong)


# Modules that users import from, besides batch_manager itself.
PUBLIC_MODULES = ("batch_manager.aio", "batch_manager.extras.", "batch_manager.tools.", "batch_manager.testing")


def imported_by_users() -> Iterator[tuple[str, str, list[str]]]:
    """Yield (file or block, module of the package, imported names) for every import of the package in users' code.

    This code is the examples, and the Python blocks of the README and of docs/.
    """
    texts = [(f"{page.relative_to(REPOSITORY)} block {number}", text)
             for page in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
             for number, text in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"),
                                                      re.M | re.S), 1)]
    texts += [(path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8"))
              for path in sorted((REPOSITORY / "examples").rglob("*.py"))]
    for where, text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and root_of(node.module or "") == "batch_manager":
                yield where, node.module, [alias.name for alias in node.names]
            elif isinstance(node, ast.Import):
                yield from ((where, alias.name, []) for alias in node.names if root_of(alias.name) == "batch_manager")


def test_examples_import_public_names_only():
    imports = list(imported_by_users())
    wrong = [f"{where} imports {module}; give the name a place in batch_manager/__init__.py"
             for where, module, _ in imports
             if not (module == "batch_manager" or module.startswith(PUBLIC_MODULES))]
    wrong += [f"{where} imports {name}, which is not public" for where, module, names in imports
              if module == "batch_manager" for name in names if name not in batch_manager.__all__]
    assert not wrong, report(wrong)


def test_every_public_name_is_there_for_people_and_for_type_checkers():
    (front,) = [source for source in sources() if source.where == "batch_manager/__init__.py"]
    for_checkers = {imported.name: imported.module.removeprefix("batch_manager.") for imported in front.imports
                    if imported.for_types_only}
    assert for_checkers == batch_manager._PUBLIC
    undocumented = [name for name in batch_manager._PUBLIC if not getattr(batch_manager, name).__doc__]
    assert not undocumented, undocumented


def test_inside_the_package_imports_are_relative():
    wrong = [f"{source.where}:{node.lineno} writes batch_manager out" for source in sources() for node in source.nodes
             if isinstance(node, ast.ImportFrom) and not node.level and root_of(node.module or "") == "batch_manager"
             or isinstance(node, ast.Import) and any(root_of(alias.name) == "batch_manager" for alias in node.names)]
    assert not wrong, report(wrong)


def test_the_kernels_know_nothing_of_the_package_around_them():
    wrong = [f"{source.where}:{imported.line} imports {imported.module}" for source in sources()
             if source.floor == "triton_kernels" for imported in source.imports
             if root_of(imported.module) == "batch_manager"
             and not f"{imported.module}.".startswith("batch_manager.triton_kernels.")]
    assert not wrong, report(wrong)


def test_triton_is_imported_by_kernel_files_alone():
    wrong = [f"{source.where}:{imported.line} imports {imported.module}" for source in sources()
             for imported in source.imports if root_of(imported.module) == "triton"
             and (source.floor != "triton_kernels" or "/reference/" in source.where
                  or source.path.name in ("__init__.py", "dispatch.py"))]
    assert not wrong, report(wrong)


def test_transformers_is_imported_by_the_models_that_need_it_alone():
    wrong = [f"{source.where}:{imported.line} imports {imported.module}" for source in core()
             for imported in source.imports if root_of(imported.module) == "transformers"
             and not source.where.startswith("batch_manager/models/transformers/")]
    assert not wrong, report(wrong)


def test_loading_imports_no_transformers():
    code = ("import sys\nimport batch_manager.models.loading, batch_manager.runtime.native_backend\n"
            "print(*sorted({'transformers', 'tokenizers'} & set(sys.modules)))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_the_host_side_is_imported_without_torch():
    modules = ["loop.generation_loop", "requests.admission", "responses.deliveries", "kv.kv_cache_manager",
               "scheduling.policies", "testing.scripted_backend", "gpt_manager", "build",
               *(f"tools.{module}" for module, _ in COMMANDS.values())]         # so that --help is fast
    code = ("import importlib, sys\nfor module in sys.argv[1:]:\n"
            "    importlib.import_module(f'batch_manager.{module}')\n"
            "    loaded = {'torch', 'triton', 'transformers', 'safetensors'} & set(sys.modules)\n"
            "    assert not loaded, (module, loaded)")
    result = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


# ---------------------------------------------------------------------- who may name what


def test_threads_are_the_business_of_the_manager_and_its_worker_alone():
    may = {f"batch_manager/{name}.py" for name in ("gpt_manager", "worker", "one_shot_event", "loading_thread",
                                                   "interpreter_exit", "clock", "thread_stack")}
    may.update(f"batch_manager/aio/{name}.py" for name in ("engine", "mailbox", "switchboard"))    # event loops
    may.add("batch_manager/aio/adapter_names.py")       # has a lock for threads that load; starts none
    # these files have coroutines of a server that has an event loop
    may.update(f"batch_manager/extras/openai/{name}.py" for name in ("service", "answers", "responses",
                                                                    "server", "application"))
    may.update(f"batch_manager/aio/{name}.py" for name in ("engine_process", "engine_program", "messages"))
    # beats of a rank, and the locks around one connection
    may.update(f"batch_manager/parallel/{name}.py" for name in ("control", "channel", "ranks"))
    may.add("batch_manager/extras/async_llm.py")        # coroutines, for the host's event loop
    may.add("batch_manager/extras/llm.py")              # has a lock for threads that read one text; starts none
    may.add("batch_manager/loop/preparing.py")          # checks adapters of requests beside the worker
    may.add("batch_manager/stores/threads.py")          # reads and writes blocks beside the worker
    may.add("batch_manager/stores/directory.py")        # has a lock for these threads; starts none
    may.add("batch_manager/parallel/block_exchange.py")     # accepts connections of other engines beside the worker
    may.add("batch_manager/stores/held_contexts.py")    # has a lock for threads that send; starts none
    may.add("batch_manager/extras/kv_events.py")        # publishes beside the worker
    may.add("batch_manager/kv/event_log.py")            # has a lock for threads that take events; starts none
    may.add("batch_manager/runtime/thread_count.py")    # identifies the calling thread; starts none
    may.add("triton_kernels/cpu/large_pages.py")        # is called by the threads that load a model; starts none
    threads = {"threading", "_thread", "multiprocessing", "concurrent", "asyncio"}
    wrong = [f"{source.where}:{imported.line} imports {imported.module}" for source in core()
             for imported in source.imports
             if root_of(imported.module) in threads and source.where not in may]
    assert not wrong, report(wrong)


def test_torch_cuda_is_named_by_the_device_folder_alone():
    allowed = {*(f"batch_manager/runtime/device/{name}.py" for name in ("devices", "memory", "running")),
               "triton_kernels/device_limits.py"}
    wrong = []
    for source in sources():
        named = [node.lineno for node in source.nodes if isinstance(node, ast.Attribute)
                 and node.attr == "cuda" and ast.unparse(node) == "torch.cuda"]
        named += [i.line for i in source.imports
                  if f"{i.module}.{i.name}".startswith(("torch.cuda.", "torch.cuda")) or i.module == "torch.cuda"]
        if source.where not in allowed:
            wrong += [f"{source.where}:{line} names torch.cuda" for line in named]
    assert not wrong, report(wrong)


def left_to_the_default(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yield (line, function, missing argument) for each call that uses the host's default dtype or default device."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ((node.lineno, alias.name, "torch") for alias in node.names
                        if alias.name in TENSOR_MAKERS | TENSOR_CLASSES)
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        name = ast.unparse(node.func).removeprefix("torch.")
        told = {keyword.arg for keyword in node.keywords}
        if name in TENSOR_MAKERS:
            yield from ((node.lineno, name, what) for what in ("dtype", "device") if what not in told)
        elif name in TENSOR_CLASSES or name == "where" and len(node.args) == 3 and all(
                isinstance(value, ast.Constant) for value in node.args[1:]):
            yield node.lineno, name, "dtype"


def test_no_tensor_has_the_hosts_default_dtype_or_device():
    """C13: the host's torch.set_default_dtype and set_default_device have no effect on the engine's tensors."""
    wrong = [f"{source.where}:{line} calls torch.{name} without {what}" for source in sources()
             for line, name, what in left_to_the_default(source.tree)]
    assert not wrong, report(wrong)


@pytest.mark.parametrize("line, missing", [
    ("torch.zeros(3)", ["dtype", "device"]),
    ("torch.tensor([0.5], device=x.device)", ["dtype"]),
    ("torch.arange(3, dtype=torch.int64)", ["device"]),
    ("torch.zeros(3, dtype=x.dtype, device=x.device)", []),
    ("torch.zeros_like(x)", []),
    ("x.new_zeros(3)", []),
    ("torch.where(x > 0, 1.0, 0.0)", ["dtype"]),
    ("torch.where(x > 0, 1.0, x)", []),
    ("torch.Tensor([0.5])", ["dtype"]),
    ("from torch import zeros", ["torch"]),
])
def test_that_rule_sees_what_it_is_for(line, missing):
    assert [what for _, _, what in left_to_the_default(ast.parse(line))] == missing


def test_no_exception_is_caught_without_being_named():
    wrong = [f"{source.where}:{node.lineno} has a bare except" for source in sources() for node in source.nodes
             if isinstance(node, ast.ExceptHandler) and node.type is None]
    assert not wrong, report(wrong)


def test_every_exception_is_caught_in_few_places():
    """Only the files in BROAD_EXCEPTS catch every exception. Blocks of the guard catch what foreign code raises."""
    found = Counter()
    for source in core():
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler) and "BaseException" in ast.unparse(node.type):
                is_raised_again = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                found[source.where] += not is_raised_again
            elif isinstance(node, ast.Call) and ast.unparse(node) == "suppress(BaseException)":
                found[source.where] += 1
    assert +found == {where: count for where, (count, _) in BROAD_EXCEPTS.items()}


def test_the_core_neither_loads_code_nor_starts_programs_nor_opens_connections():
    """C24, C25: the core loads no code, starts no program and opens no connection."""
    wrong = []
    for source in core():
        for imported in source.imports:
            root = root_of(imported.module)
            if root in CODE_LOADERS and (source.where, root) not in ALLOWED_LOADERS:
                wrong.append(f"{source.where}:{imported.line} imports {imported.module}")
        for node in source.nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CODE_LOADING_CALLS:
                wrong.append(f"{source.where}:{node.lineno} calls {node.func.id}()")
            if (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    and (node.value.id, node.attr) in CODE_LOADING_ATTRIBUTES
                    and (source.where, node.attr) not in ALLOWED_CALLS):
                wrong.append(f"{source.where}:{node.lineno} uses {node.value.id}.{node.attr}")
            if isinstance(node, ast.keyword) and node.arg in ("trust_remote_code", "allow_pickle", "shell"):
                wrong.append(f"{source.where}:{node.value.lineno} passes {node.arg}")
    assert not wrong, report(wrong)


def test_a_users_callback_is_called_in_a_guarded_block():
    """Each of the four callbacks is called inside a `with` block of the guard.

    tests/contract/test_guard.py tests what runs inside the blocks.
    """
    files = ["batch_manager/loop/callbacks.py", "batch_manager/loop/fetched_items.py"]
    nodes = [node for source in core() if source.where in files for node in source.nodes]
    mentions = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
                and ast.unparse(node) in ("self._get", "self._send", "self._poll", "self._stats")]
    allowed = {id(inner) for node in nodes if isinstance(node, ast.With)
               and ast.unparse(node.items[0].context_expr).startswith(("self._in_", "self.in_get"))
               for inner in ast.walk(node)}
    allowed |= {id(node.left) for node in nodes if isinstance(node, ast.Compare)}
    assert [ast.unparse(node) for node in mentions if id(node) not in allowed] == []
    assert len({ast.unparse(node) for node in mentions}) == 4


def test_every_exception_to_that_is_still_needed():
    used = {(source.where, root_of(imported.module)) for source in core() for imported in source.imports}
    assert set(ALLOWED_LOADERS) <= used


def test_no_environment_variable_is_read_but_the_listed_ones():
    """C24: the core reads no environment variable except the listed ones."""
    wrong = [f"{source.where}:{node.lineno} reads the environment" for source in core() for node in source.nodes
             if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.environb")
             and source.where not in ALLOWED_ENVIRONMENT]
    assert not wrong, report(wrong)


def test_nothing_is_printed_outside_the_tools():
    wrong = [f"{source.where}:{node.lineno} writes to the terminal; use logging" for source in core()
             for node in source.nodes
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "input")
             or isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr", "sys.stdin")]
    assert not wrong, report(wrong)


def test_the_loop_does_not_know_the_features_it_carries():
    path = PACKAGE / "loop" / "generation_loop.py"
    wrong = [f"{path.relative_to(REPOSITORY)}:{number} says {word}"
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
             for word in BANNED_IN_THE_LOOP if word in line.lower()]
    assert not wrong, report(wrong)


def test_a_folder_does_not_use_the_words_of_another():
    wrong = []
    for source in sources():
        word = FOREIGN_WORDS.get(source.floor)
        for node in source.nodes if word else ():
            name = (node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute)
                    else node.arg if isinstance(node, ast.arg | ast.keyword)
                    else node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else None)
            if name and word in name.lower():
                line = getattr(node, "lineno", None) or node.value.lineno
                wrong.append(f"{source.where}:{line} says {name}; '{source.floor}' knows no {word}")
    assert not wrong, report(wrong)


WITH_EXPERTS = {"GraniteMoe": "Granite"}     # a family with experts -> the family that it is apart from them


def test_a_family_inherits_from_the_frame_alone_and_the_families_are_short():
    """The 28 families together have at most 1,550 lines. One with experts may inherit from the family without them."""
    texts = {module: (PACKAGE / f"models/{module}.py").read_text() for module, _ in _SHIPPED.values()}
    for module, name in _SHIPPED.values():
        (family,) = [node for node in ast.parse(texts[module]).body
                     if isinstance(node, ast.ClassDef) and node.name == name]
        assert [ast.unparse(base) for base in family.bases] == [WITH_EXPERTS.get(name, "Decoder")], module
        methods = {node.name for node in family.body if isinstance(node, ast.FunctionDef)}
        assert not methods & {"__init__", "forward"}, module
    assert sum(text.count("\n") for text in texts.values()) <= 1550


def test_every_folder_says_what_it_owns_what_it_must_not_know_and_where_a_new_class_goes():
    answers = {"what it owns": r"^Owns\b", "what it must not know": r"^(Not|Must not)\b",
               "where a new one goes": r"^(Yours|A new)\b"}
    wrong = []
    for folder in sorted({source.path.parent for source in sources()} - {PACKAGE, KERNELS / "reference"}):
        front, where = folder / "__init__.py", folder.relative_to(REPOSITORY)
        text = ast.get_docstring(ast.parse(front.read_text(encoding="utf-8"))) or "" if front.exists() else ""
        wrong += [f"{where}/__init__.py does not say {answer}" for answer, pattern in answers.items()
                  if not re.search(pattern, text, re.M)]
    assert not wrong, report(wrong)


def test_every_error_has_a_fact_and_an_expectation():
    wrong = [f"{source.where}:{node.lineno} has fewer than two parts: {ast.unparse(node)[:80]}"
             for source in sources()
             for node in source.nodes
             if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ERRORS_WITH_PARTS
             and len(node.args) + len(node.keywords) < 2]
    assert not wrong, report(wrong)


def test_every_file_begins_with_what_it_is_for():
    wrong = [f"{source.where} has no docstring" for source in sources()
             if not ast.get_docstring(source.tree) and source.floor != "_version"]
    assert not wrong, report(wrong)


# ---------------------------------------------------------------------- the README


def test_the_readme_quotes_the_forty_line_example_as_it_is():
    readme, example = REPOSITORY / "README.md", REPOSITORY / "examples" / "forty_lines.py"
    if not readme.exists():
        pytest.skip("there is no README.md yet")
    blocks = re.findall(r"^```python\n(.*?)^```$", readme.read_text(encoding="utf-8"), re.M | re.S)
    assert example.read_text(encoding="utf-8") in blocks
