"""The Python of the documents: each block compiles, what it imports is there, and each name and argument is known."""

import ast
import builtins
import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_READMES = [ROOT / "README.md", *ROOT.glob("[!.]*/**/README.md")]
PAGES = [
    path
    for path in [*sorted((ROOT / "docs").rglob("*.md")), *_READMES]
    if _BLOCK.search(path.read_text())
]


def undefined(page: Path) -> list[str]:
    """What is wrong with the blocks of a page, which go on from each other. Raises `SyntaxError`, and as `imported`."""
    known: dict[str, Any] = dict(vars(builtins))
    wrong: list[str] = []
    for number, block in enumerate(_BLOCK.findall(page.read_text()), 1):
        tree = ast.parse(block, filename=f"{page.name}, block {number}")
        nodes = list(ast.walk(tree))
        for each in nodes:
            known |= imported(each)
        names = [each for each in nodes if isinstance(each, ast.Name)]
        own = {each.id for each in names if isinstance(each.ctx, ast.Store)}
        own |= {each.arg for each in nodes if isinstance(each, ast.arg)}
        own |= {each.name for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        known |= dict.fromkeys(own - known.keys())
        wrong += [f"block {number}: {each.id}" for each in names if each.id not in known]
        calls = [each for each in nodes if isinstance(each, ast.Call)]
        wrong += [f"block {number}: {why}" for call in calls if (why := refused(call, known))]
    return wrong


def imported(node: ast.AST) -> dict[str, Any]:
    """The names that an import binds, and their values. Raises `ImportError`, `AttributeError`."""
    if isinstance(node, ast.Import):
        modules = {name.asname or name.name: import_module(name.name) for name in node.names}
        return {name.partition(".")[0]: module for name, module in modules.items()}
    if isinstance(node, ast.ImportFrom):
        module = import_module(node.module or "")
        return {name.asname or name.name: getattr(module, name.name) for name in node.names}
    return {}


def refused(call: ast.Call, known: dict[str, Any]) -> str:
    """Why a function that a block imports would not take these arguments; empty: it would."""
    function = known.get(call.func.id) if isinstance(call.func, ast.Name) else None
    if function is None or hasattr(builtins, getattr(function, "__name__", "")):
        return ""
    keywords = {each.arg: each.value for each in call.keywords if each.arg}
    try:
        inspect.signature(function).bind(*call.args, **keywords)
    except TypeError as error:
        return f"{ast.unparse(call.func)}: {error}"
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_python_of_a_page_imports_names_and_calls_what_there_is(page: Path) -> None:
    assert undefined(page) == []


def test_a_page_that_names_what_is_not_there_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nfrom pathlib import Path\nPath.cwd()\nelsewhere(1)\n```\n")
    assert undefined(page) == ["block 1: elsewhere"]
    page.write_text("```python\nfrom os.path import join, basename\nbasename('a', b=1)\n```\n")
    assert undefined(page) == ["block 1: basename: got an unexpected keyword argument 'b'"]
    page.write_text("```python\nfrom pathlib import Elsewhere\n```\n")
    with pytest.raises(AttributeError, match="Elsewhere"):
        undefined(page)
