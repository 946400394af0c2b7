"""Turn a family from a notebook or a script into a file that the ranks can import. Nothing is pickled. The file
contains only the statements that the family needs, found by the names that they bind and read. So a cell that starts a
training, or plots, does not run again on every rank."""

from __future__ import annotations

import ast
import hashlib
import symtable
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from phalanx.core.errors import UserError

if TYPE_CHECKING:
    from phalanx.model.family import Family


def reference_of(family: Family, folder: Path) -> str:
    """Return `file.py:NAME` of a family: its own file, or one written to `folder` if it was made in `__main__`."""
    for module in (sys.modules.get(family.build.__module__), sys.modules["__main__"], *list(sys.modules.values())):
        name = next((key for key, value in vars(module).items() if value is family), "") if module else ""
        if name and module:
            break
    else:
        raise _refusal("it is not bound to a name", "write FAMILY = phalanx.Family(...) and pass FAMILY")
    if module.__name__ != "__main__":
        return f"{Path(module.__file__ or '').absolute()}:{name}"
    text = closure(_cells(module), name)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.absolute() / f"family_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    if not file.exists():
        near = file.with_suffix(".tmp")
        near.write_text(text)
        near.rename(file)
    return f"{file}:{name}"


def _cells(main: ModuleType) -> list[str]:
    """Return the executed source, in order."""
    if isinstance(cells := vars(main).get("In"), list):  # IPython and Jupyter
        return [cell for cell in cells if isinstance(cell, str)]
    file = getattr(main, "__file__", None)
    if not file:
        raise _refusal("its source is not known here", 'write it to a file, and name it: family="model.py:FAMILY"')
    return [Path(file).read_text()]


def closure(cells: Sequence[str], name: str) -> str:
    """Collect the top-level statements that bind the name and, transitively, those that bind what they read."""
    statements: list[tuple[str, set[str], set[str]]] = []
    for cell in cells:
        try:
            body = ast.parse(cell).body
        except SyntaxError:
            continue  # it did not run either
        for node in body:
            source = ast.get_source_segment(cell, node, padded=True) or ""
            decorated = [d.lineno for d in getattr(node, "decorator_list", [])]
            if decorated:  # include the decorators, which come before the statement
                source = "\n".join(cell.splitlines()[min(decorated) - 1 : node.end_lineno])
            bound, read = _names(source)
            if not _is_main_guard(node):
                statements.append((source, bound, read))
    wanted, taken = {name}, set[int]()
    while more := {i for i, (_, bound, _) in enumerate(statements) if bound & wanted and i not in taken}:
        taken |= more
        wanted |= {each for i in more for each in statements[i][2]}
    if not taken:
        raise _refusal(f"no statement that makes {name} was found", f"write {name} = phalanx.Family(...) at top level")
    return "\n\n".join(statements[i][0] for i in sorted(taken)) + "\n"


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the names that a statement binds at top level, and those that it reads from there, nested scopes
    included."""
    table = symtable.symtable(source, "cell", "exec")
    bound = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    read = {s.get_name() for s in table.get_symbols() if s.is_referenced()}
    inner = list(table.get_children())
    while inner:
        each = inner.pop()
        inner += each.get_children()
        read |= {s.get_name() for s in each.get_symbols() if s.is_global() and s.is_referenced()}
    return bound, read


def _is_main_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _refusal(message: str, remedy: str) -> UserError:
    return UserError(message, field="family", remedy=remedy)
