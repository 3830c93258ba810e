"""Finds source code for which the host waits for the device: copies from pageable memory, and reads of tensors.

Types come from annotations. A name, field or function result is a tensor if the annotation says `torch.Tensor`, and so
is the result of an operation on a tensor. An expression of unknown type is no tensor, so that numpy's `tolist` and
`nonzero` are not found. The tests of runtime/test_copies_of_features.py observe what this module cannot know.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

# Calls on any object, and on a tensor only. Functions of torch with the same names count too.
ALWAYS = {"item", "cuda", "cpu", "new_tensor", "masked_select", "synchronize", "argwhere", "is_nonzero"}
OF_TENSORS = {"tolist", "numpy", "nonzero", "unique", "unique_consecutive", "bincount", "equal", "allclose"}
FROM_THE_HOST = {"tensor", "as_tensor", "asarray"}         # functions of torch that copy values of the host
READERS = {"int", "float", "bool", "list", "tuple", "sorted", "sum", "max", "min", "any", "all"}
GIVES_NO_TENSOR = OF_TENSORS | {"item", "size", "dim", "numel", "stride", "element_size", "data_ptr", "is_contiguous",
                                "storage_offset", "untyped_storage", "is_floating_point", "split", "unbind", "chunk",
                                "split_with_sizes"}
TENSOR_ATTRIBUTES = {"T", "mT", "values"}
MASK_METHODS = {"isfinite", "isnan", "isinf", "eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or",
                "logical_not"}


@dataclass(frozen=True)
class Types:
    """Names that are tensors in all files: fields of classes, and functions and properties by their result."""

    fields: frozenset[str]
    functions: frozenset[str]

    @staticmethod
    def of(trees: Iterable[ast.Module]) -> "Types":
        tensors, others, functions, other_functions = set(), set(), set(), set()
        for node in (node for tree in trees for node in ast.walk(tree)):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        (tensors if _names_tensor(part.annotation) else others).add(part.target.id)
            elif isinstance(node, ast.FunctionDef):
                (functions if _names_tensor(node.returns) else other_functions).add(node.name)
        return Types(frozenset(tensors - others), frozenset(functions - other_functions))


@dataclass
class _Function(ast.NodeVisitor):
    """Reads the body of one function, in order. `found` gets (line, what the host waits for)."""

    types: Types
    tensors: set[str] = field(default_factory=set)
    masks: set[str] = field(default_factory=set)
    found: list[tuple[int, str]] = field(default_factory=list)

    def is_tensor(self, node: ast.AST | None) -> bool:
        match node:
            case ast.Name():
                return node.id in self.tensors
            case ast.Attribute():
                return node.attr in self.types.fields or node.attr in TENSOR_ATTRIBUTES and self.is_tensor(node.value)
            case ast.Subscript():
                return self.is_tensor(node.value) or _is_send(node.value)
            case ast.UnaryOp():
                return not isinstance(node.op, ast.Not) and self.is_tensor(node.operand)
            case ast.BinOp():
                return self.is_tensor(node.left) or self.is_tensor(node.right)
            case ast.Compare():
                is_elementwise = not any(isinstance(operation, ast.Is | ast.IsNot | ast.In | ast.NotIn)
                                         for operation in node.ops)
                return is_elementwise and any(map(self.is_tensor, [node.left, *node.comparators]))
            case ast.NamedExpr():
                return self.is_tensor(node.value)
            case ast.IfExp():
                return self.is_tensor(node.body) or self.is_tensor(node.orelse)
            case ast.Call(func=ast.Name()):
                return node.func.id in self.types.functions
            case ast.Call(func=ast.Attribute()):
                name = node.func.attr
                if name in GIVES_NO_TENSOR:
                    return False
                if _is_module(node.func.value, "torch"):
                    return name not in ("device", "Size") and not name.startswith(("get_", "is_", "set_"))
                return name in self.types.functions or self.is_tensor(node.func.value)
        return False

    def is_mask(self, node: ast.AST) -> bool:
        match node:
            case ast.Name():
                return node.id in self.masks
            case ast.Compare():
                return self.is_tensor(node)
            case ast.UnaryOp(op=ast.Invert()):
                return self.is_mask(node.operand)
            case ast.BinOp(op=ast.BitAnd() | ast.BitOr() | ast.BitXor()):
                return self.is_mask(node.left) or self.is_mask(node.right)
            case ast.Call(func=ast.Attribute()):
                return node.func.attr in MASK_METHODS and self.is_tensor(node.func.value)
            case ast.Tuple():
                return any(map(self.is_mask, node.elts))
        return False

    def note(self, node: ast.AST, what: str) -> None:
        self.found.append((node.lineno, what))

    def visit_arguments(self, node: ast.arguments) -> None:
        for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs):
            if _names_tensor(argument.annotation):
                self.tensors.add(argument.arg)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            if isinstance(target, ast.Subscript):
                self._store(target, node.value)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                for name, value in zip(target.elts, node.value.elts):
                    self._assign(name, value)
            else:
                self._assign(target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._assign(node.target, node.value)

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        for name in [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]:
            is_tensor = _is_send(value) if isinstance(target, ast.Tuple) else self.is_tensor(value)
            (self.tensors.add if is_tensor else self.tensors.discard)(name)
            (self.masks.add if self.is_mask(value) else self.masks.discard)(name)

    def _store(self, target: ast.Subscript, value: ast.AST) -> None:
        parts = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
        if self.is_tensor(target.value) and _is_number(value) and not any(isinstance(part, ast.Slice | ast.Constant)
                                                                          for part in parts):
            self.note(target, "a number stored by index")

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name):
            if node.func.id in READERS and any(map(self.is_tensor, node.args)):
                self.note(node, f"{node.func.id}() of a tensor")
        elif isinstance(node.func, ast.Attribute):
            self._visit_method(node, node.func)

    def _visit_method(self, node: ast.Call, called: ast.Attribute) -> None:
        name, keywords = called.attr, {keyword.arg: keyword.value for keyword in node.keywords}
        is_torch = _is_module(called.value, "torch")
        if name == "to":
            named = [*node.args, *(keywords[name] for name in ("device", "other") if name in keywords)]
            if any(map(_is_device, named)) and not _is_true(keywords.get("non_blocking")):
                self.note(node, ".to(device)")
        elif name in ALWAYS or name in OF_TENSORS and (is_torch or self.is_tensor(called.value)):
            self.note(node, f".{name}()")
        elif is_torch and name in FROM_THE_HOST and not _is_cpu(keywords.get("device")):
            self.note(node, f"torch.{name}(device)")
        elif name == "where" and is_torch and len(node.args) == 1:
            self.note(node, "torch.where of one argument")
        elif name == "repeat_interleave" and "output_size" not in keywords:
            self.note(node, ".repeat_interleave() without output_size")
        elif _is_module(called.value, "np") and any(map(self.is_tensor, node.args)):
            self.note(node, f"np.{name}() of a tensor")

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.generic_visit(node)
        if self.is_mask(node.slice):
            self.note(node, "an index that is a mask")

    def _visit_condition(self, node: ast.If | ast.While | ast.IfExp | ast.Assert) -> None:
        self.generic_visit(node)
        parts, condition = [], node.test
        while isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            condition = condition.operand
        parts = condition.values if isinstance(condition, ast.BoolOp) else [condition]
        if any(map(self.is_tensor, parts)):
            self.note(node, "a condition that is a tensor")

    visit_If = visit_While = visit_IfExp = visit_Assert = _visit_condition

    def visit_For(self, node: ast.For) -> None:
        self.generic_visit(node)
        if self.is_tensor(node.iter):
            self.note(node, "a loop over a tensor")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Leave out nested functions, which `waits` reads separately."""


def waits(tree: ast.Module, types: Types) -> list[tuple[str, int, str]]:
    """Return (function, line, what the host waits for) for all functions of a file.

    Left out are constructors, Triton kernels, and code outside of functions.
    """
    found: list[tuple[str, int, str]] = []

    def read(node: ast.AST, path: tuple[str, ...]) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                read(part, (*path, part.name))
            elif isinstance(part, ast.FunctionDef):
                if part.name != "__init__" and not any("jit" in ast.dump(mark) for mark in part.decorator_list):
                    function = _Function(types)
                    for inner in (part.args, *part.body):
                        function.visit(inner)
                    found.extend((".".join((*path, part.name)), line, what) for line, what in function.found)
                read(part, (*path, part.name))
            else:
                read(part, path)

    read(tree, ())
    return found


def _names_tensor(annotation: ast.AST | None) -> bool:
    return annotation is not None and ast.unparse(annotation) in ("torch.Tensor", "torch.Tensor | None")


def _is_module(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _is_send(node: ast.AST) -> bool:
    """Whether the expression is a call of a `Send`, which returns tensors on the device."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1].lstrip("_") == "send"


def _is_device(node: ast.AST) -> bool:
    text = ast.unparse(node)
    return isinstance(node, ast.Constant) and isinstance(node.value, str) or (
        text.split("(")[0].split(".")[-1].lower().lstrip("_") in ("device", "cuda"))


def _is_cpu(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value == "cpu"


def _is_true(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def _is_number(node: ast.AST) -> bool:
    text = ast.unparse(node).lstrip("-")
    return text in ("torch.inf", "torch.nan", "np.inf", "np.nan", "math.inf", "math.nan") or (
        text.replace(".", "", 1).isdigit())
