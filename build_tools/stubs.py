"""What type checkers read of the functions whose result depends on a flag: `--check` or `--write`.

``flash_attn_func(q, k, v)`` is a Tensor, and a tuple with ``return_lse=True``: for a type checker
an overload for each flag, six signatures of sixteen parameters. They are written from the one
signature in the module, beside it, to a stub: nothing of them runs, and the module stays readable.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from build_tools.lint import ROOT

COMMAND = "python -m build_tools.stubs"
MODULES = ("flash_attn/flash_attn_interface.py", "flash_attn/distributed/attention.py")
WIDTH = 100


@dataclass(frozen=True)
class Result:
    """What a call returns with some flags set, or with none, and all of some others unset."""

    type: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


_PROBS, _LSE, _SAME, _MAX = FLAGS = (
    "return_attn_probs", "return_lse", "return_softmax_lse", "return_max_logits",
)  # fmt: skip
RESULTS = (
    Result("Tensor", off=FLAGS),
    Result("tuple[Tensor, Tensor]", on=(_LSE,), off=(_PROBS, _MAX)),
    Result("tuple[Tensor, Tensor]", on=(_SAME,), off=(_PROBS, _MAX)),
    Result("tuple[Tensor, Tensor]", on=(_MAX,), off=(_PROBS, _LSE, _SAME)),
    Result("tuple[Tensor, Tensor, Tensor]", on=(_LSE, _MAX), off=(_PROBS,)),
    Result("tuple[Tensor, Tensor, Tensor]", on=(_SAME, _MAX), off=(_PROBS,)),
    Result("tuple[Tensor, Tensor, Tensor]", on=(_PROBS,), off=(_MAX,)),
)


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str
    default: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}" + (f" = {self.default}" if self.default else "")


@dataclass(frozen=True)
class Signature:
    """A public function's parameters, by position and then by keyword alone, and its result."""

    name: str
    positional: tuple[Parameter, ...]
    keyword: tuple[Parameter, ...]
    result: str

    @classmethod
    def of(cls, node: ast.FunctionDef) -> Signature:
        arguments = node.args
        required = len(arguments.args) - len(arguments.defaults)
        defaults = [*[None] * required, *arguments.defaults]
        return cls(
            node.name,
            tuple(map(_parameter, arguments.args, defaults)),
            tuple(map(_parameter, arguments.kwonlyargs, arguments.kw_defaults)),
            ast.unparse(node.returns),
        )

    def __str__(self) -> str:
        star = ["*"] if self.keyword else []
        parts = [*map(str, self.positional), *star, *map(str, self.keyword)]
        return f"def {self.name}(\n{_wrapped(parts)},\n) -> {self.result}: ..."

    def overloads(self) -> Iterator[Signature]:
        """One for each result, and at last the function itself, for flags that are not known."""
        names = {p.name for p in self.positional + self.keyword}
        if names.isdisjoint(FLAGS):
            yield self
            return
        for result in RESULTS:
            if names.issuperset(result.on):
                yield from self._returning(result)._setting(result.on)
        yield self

    def _returning(self, result: Result) -> Signature:
        positional, keyword = (
            tuple(_unset(p) if p.name in result.off else p for p in part)
            for part in (self.positional, self.keyword)
        )
        return Signature(self.name, positional, keyword, result.type)

    def _setting(self, flags: tuple[str, ...]) -> Iterator[Signature]:
        """With flags that are set: by keyword and, where one has a place, by position."""
        names = [p.name for p in self.positional]
        placed = [flag for flag in flags if flag in names]
        if not placed:
            yield replace(
                self, keyword=tuple(_set(p) if p.name in flags else p for p in self.keyword)
            )
        else:
            (flag,) = flags  # no result needs another one beside it
            at = names.index(flag)
            here, after = _set(self.positional[at]), self.positional[at + 1 :]
            before = self.positional[:at]
            # It and what follows by keyword; or it and what precedes by position.
            yield replace(self, positional=before, keyword=(here, *after, *self.keyword))
            yield replace(self, positional=(*map(_given, before), here, *after))


def _parameter(argument: ast.arg, default: ast.expr | None) -> Parameter:
    text = None if default is None else ast.unparse(default)
    return Parameter(argument.arg, ast.unparse(argument.annotation), text)


def _unset(parameter: Parameter) -> Parameter:
    return replace(parameter, type="Literal[False]")


def _set(parameter: Parameter) -> Parameter:
    values = 'True, "row"' if parameter.name == _MAX else "True"
    return replace(parameter, type=f"Literal[{values}]", default=None)


def _given(parameter: Parameter) -> Parameter:
    return replace(parameter, default=None)


def stub(source: str) -> str:
    """The stub of a module: its public functions, its constants, and what it imports for others."""
    tree = ast.parse(source)
    body, overloaded = [], False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            signatures = [*Signature.of(node).overloads()]
            overloaded |= len(signatures) > 1
            decorator = "@overload\n" if len(signatures) > 1 else ""
            body += ["", *(f"{decorator}{signature}" for signature in signatures)]
        elif isinstance(node, ast.AnnAssign):
            body.append(f"{ast.unparse(node.target)}: {ast.unparse(node.annotation)}")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            body.append(f"__all__ = [\n{_wrapped(map(ast.unparse, node.value.elts))},\n]")
    imports = _imports(tree, "\n".join(body), ["Literal", "overload"] if overloaded else [])
    return "\n".join([f'"""Written by {COMMAND} --write."""', "", *imports, "", *body, ""])


def _wrapped(items: Iterable[str]) -> str:
    """The items on lines of some each; no item is broken."""
    text = ", ".join(item.replace(" ", "\0") for item in items)
    indent = " " * 4
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(lines).replace("\0", " ")


def _imports(tree: ast.Module, text: str, typing: list[str]) -> list[str]:
    """The imports that the stub's types need, and those that the module has for others."""
    in_stub = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    in_module = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = [f"from typing import {', '.join(typing)}"] if typing else []
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            used, kept_for_others = name in in_stub, name not in in_module
            if used or kept_for_others:
                as_name = f" as {name}" if kept_for_others or alias.asname else ""
                module = f"from {node.module} " if isinstance(node, ast.ImportFrom) else ""
                lines.append(f"{module}import {alias.name}{as_name}")
    return lines


def main(argv: list[str]) -> int:
    code = 0
    for name in MODULES:
        module = ROOT / name
        path, text = module.with_suffix(".pyi"), stub(module.read_text())
        if "--write" in argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.relative_to(ROOT)} is not up to date: {COMMAND} --write", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
