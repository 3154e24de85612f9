"""Checks the package's signatures while tests run: shapes by jaxtyping, everything else by beartype.

`jaxtyping.install_import_hook` gives its wrapper to every function, and on tiny models most of a test's time goes into
that. Here it goes only to those that name a shape; the others get beartype's, which costs a microsecond. Left out are
closures that name none, made anew at each call of what holds them, and annotations that no running program can resolve.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import beartype
import jaxtyping
from jaxtyping import jaxtyped

_enabled = True


def install(package: str) -> None:
    """Check what is imported of `package` from now on."""
    sys.meta_path.insert(0, _Finder(package))


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, no signature is checked."""
    global _enabled
    _enabled = False
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        _enabled = True
        jaxtyping.config.update("jaxtyping_disable", False)


def shaped(target: Any) -> Any:
    """A function, or a class with annotated fields, whose annotations name shapes."""
    return jaxtyped(typechecker=beartype.beartype)(target)


def typed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose annotations name none."""
    checked = beartype.beartype(function)
    if checked is function:
        return function

    @wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (checked if _enabled else function)(*args, **kwargs)

    return chosen


class _Finder:
    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self._package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """Compiled here, past the folders of compiled files, which hold the code as users run it."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def source_to_code(self, data: Any, path: Any, **_: Any) -> CodeType:
        tree = ast.parse(data, path)
        _Decorate().visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Decorate(ast.NodeVisitor):
    """Decorators go next to the function, below those that are there; at a class above, so that it is a dataclass."""

    inside_function = False
    all_quoted = False

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self.all_quoted |= node.module == "__future__"

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        fields = [child.annotation for child in node.body if isinstance(child, ast.AnnAssign)]
        if any(map(_names_a_shape, fields)):
            node.decorator_list.insert(0, _decorator(shaped, node))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        annotations = [argument.annotation for argument in arguments if argument is not None] + [node.returns]
        if any(map(_names_a_shape, annotations)):
            node.decorator_list.append(_decorator(shaped, node))
        elif any(annotations) and not (self.inside_function or self.all_quoted or any(map(_is_quoted, annotations))):
            node.decorator_list.append(_decorator(typed, node))
        outside, self.inside_function = self.inside_function, True
        self.generic_visit(node)
        self.inside_function = outside


def _decorator(function: Callable[..., Any], node: ast.AST) -> ast.expr:
    expression = ast.parse(f"__import__('sys').modules[{__name__!r}].{function.__name__}", mode="eval").body
    for part in ast.walk(expression):
        ast.copy_location(part, node)
    return expression


def _is_quoted(annotation: ast.expr | None) -> bool:
    """Whether it quotes a name, which its module then imports for type checkers alone."""
    return annotation is not None and any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) for node in ast.walk(annotation)
    )


def _names_a_shape(annotation: ast.expr | None) -> bool:
    """Whether it holds something like Float[Tensor, "batch pos"]."""
    return annotation is not None and any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.slice.elts[-1], ast.Constant)
        and isinstance(node.slice.elts[-1].value, str)
        and not (isinstance(node.value, ast.Name) and node.value.id == "Literal")
        for node in ast.walk(annotation)
    )
