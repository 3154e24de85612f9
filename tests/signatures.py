"""Checks the package's signatures while tests run: shapes by jaxtyping, everything else by beartype.

`jaxtyping.install_import_hook` gives its wrapper to every function, and on tiny models most of a test's time goes into
that. Here it goes only to those that name a shape; other functions and dataclasses get beartype's check, which costs a
microsecond. Left out are closures that name no shape, made anew at each call of what holds them, and annotations that
name what a module imports for type checkers alone.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, get_type_hints

import beartype
import jaxtyping
from beartype.door import die_if_unbearable
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
    """A function whose annotations name none; they are resolved at its first call, when all they name is defined."""

    @cache
    def checked() -> Callable[..., Any]:
        if (hints := _hints(function)) is None:
            return function
        function.__annotations__ = hints
        return beartype.beartype(function)

    @wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (checked() if _enabled else function)(*args, **kwargs)

    return chosen


def typed_fields(owner: type) -> type:
    """A dataclass whose fields name no shape; it is checked when it is made, after its own `__post_init__`."""
    if not is_dataclass(owner) or "__init__" not in vars(owner):
        return owner
    made: Callable[..., None] = owner.__init__

    @cache
    def hints() -> dict[str, Any]:
        found = _hints(owner) or {}
        return {field.name: found[field.name] for field in fields(owner) if field.name in found}

    @wraps(made)
    def make_and_check(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if _enabled:
            for name, hint in hints().items():
                die_if_unbearable(getattr(self, name), hint, exception_prefix=f"{owner.__name__}.{name} ")

    owner.__init__ = make_and_check
    return owner


def _hints(target: Any) -> dict[str, Any] | None:
    """What its annotations mean; None where one names what only type checkers import."""
    try:
        return get_type_hints(target, include_extras=True)
    except (NameError, AttributeError):
        return None


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

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        annotations = [child.annotation for child in node.body if isinstance(child, ast.AnnAssign)]
        check = shaped if any(map(_names_a_shape, annotations)) else typed_fields
        node.decorator_list.insert(0, _decorator(check, node))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
        annotations = [argument.annotation for argument in arguments if argument is not None] + [node.returns]
        if any(map(_names_a_shape, annotations)):
            node.decorator_list.append(_decorator(shaped, node))
        elif any(annotations) and not self.inside_function:
            node.decorator_list.append(_decorator(typed, node))
        outside, self.inside_function = self.inside_function, True
        self.generic_visit(node)
        self.inside_function = outside


def _decorator(function: Callable[..., Any], node: ast.AST) -> ast.expr:
    expression = ast.parse(f"__import__('sys').modules[{__name__!r}].{function.__name__}", mode="eval").body
    for part in ast.walk(expression):
        ast.copy_location(part, node)
    return expression


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
