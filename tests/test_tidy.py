"""Our few hard rules about text, where a linter has none."""

import functools
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Statements of SQL that belong in sql/ once they are longer than a line.
_SQL = re.compile(
    r"^\s*(CREATE|SELECT|INSERT INTO|UPDATE|DELETE FROM|ALTER|WITH|DO) ", re.MULTILINE
)


def _files() -> list[Path]:
    """What is in the repository, or will be with the next commit."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = [ROOT / name for name in listed.stdout.split("\0") if name]
    return sorted(path for path in found if path.is_file())


def _texts() -> list[tuple[str, str]]:
    result = []
    for path in _files():
        try:
            result.append((str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue  # a golden file, a picture
    return result


if not (ROOT / ".git").exists():
    pytest.skip("not a git work tree", allow_module_level=True)
TEXTS = _texts()
PYTHON = [(name, text) for name, text in TEXTS if name.endswith(".py")]
PRODUCT = [(name, text) for name, text in PYTHON if not name.startswith("tests/")]


def _lines(pattern: str, texts: list[tuple[str, str]]) -> list[str]:
    wanted = re.compile(pattern)
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in texts
        for number, line in enumerate(text.splitlines(), 1)
        if wanted.search(line)
    ]


def _others() -> list[tuple[str, str]]:
    """Everything but this file, which has to name what it forbids, and the hashes of the lock."""
    return [each for each in TEXTS if each[0] not in {"tests/test_tidy.py", "requirements.lock"}]


def test_nothing_is_left_for_later():
    assert not _lines(r"\b(TODO|FIXME|XXX|HACK)\b|\bNotImplementedError\b", _others())


def test_no_path_of_one_machine():
    assert not _lines(r"(?<![\w.])/(root|home/\w+|work)/", _others())


def test_the_lock_names_no_host():
    lock = (ROOT / "requirements.lock").read_text()
    assert "://" not in lock
    for line in lock.splitlines():
        assert re.match(r"[\w.-]+==\S+|    --hash=sha256:[0-9a-f]{64}", line), line


def test_sql_of_many_lines_is_in_sql():
    """A triple-quoted text that begins with a statement of SQL belongs into a file of its own."""
    found = [
        f"{name}: {body.strip().splitlines()[0]}"
        for name, text in PYTHON
        if name.startswith(("walsender_bridge/", "slot_sync/"))
        for body in re.findall(r'(?<!^)(?:[fb]?)"""(.*?)"""', text, flags=re.DOTALL)
        if _SQL.match(body) and body.count("\n") > 1
    ]
    assert not found


def test_every_session_with_a_users_server_has_the_pinned_settings():
    """Among them is the search_path, without which others' functions would be called for those of the catalog."""
    own = ("walsender_bridge/demo/", "walsender_bridge/demo/local_server/", "benchmarks/")
    product = [(name, text) for name, text in PRODUCT if not name.startswith(own)]
    opened = r"\b(psycopg|AsyncConnection|PGconn|dbapi|BoundedConnection)\.connect\("
    assert _lines(opened, product)
    bare = [line for line in _lines(opened, product) if "conninfo" not in line]
    assert not bare, (
        "give these what replication_connection.pinned_conninfo returns:\n" + "\n".join(bare)
    )


def test_every_module_says_what_it_is():
    empty = [name for name, text in PRODUCT if not text.startswith(('"""', 'r"""', "#!"))]
    assert not empty, "no docstring: " + ", ".join(empty)


def test_an_exception_to_a_rule_has_its_reason():
    bare = [
        line
        for line in _lines(r"#\s*(noqa|type: ignore)", PRODUCT)
        if not re.search(r"#\s*(noqa: [A-Z0-9, ]+|type: ignore\[[\w, -]+\])\s+#\s*\S", line)
    ]
    assert not bare, "\n" + "\n".join(bare)


def test_threads_and_sockets_listen_on_this_machine_only():
    assert not _lines(r"0\.0\.0\.0|\[::\]", [t for t in PYTHON if t in _others()])


#: The first words of dotted names that are not of the project's modules: SQL, settings, names that programs import.
_NOT_MODULES = {
    *("a", "catalog", "df", "jdk", "pa", "pg_attribute", "pg_authid", "public", "schema", "snap"),
    *("source", "spark", "stream", "tuskline", "tuskline_slots"),
}
#: A dotted name in backquotes, or one that begins with a package of the project.
_DOTTED = re.compile(
    r"(?<!`)`([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?:\(\))?`"
    r"|\b((?:walsender_bridge|spark_consumers|slot_sync|tests|benchmarks)(?:\.[A-Za-z_]\w*)+)\b"
)
#: The ends of names of files, which have dots as well.
_FILE_ENDINGS = {
    *("c", "conf", "db", "h", "json", "jsonl", "lock", "md", "pem", "py"),
    *("sh", "signal", "sql", "sqlite", "toml", "txt", "zip"),
}


def _modules() -> dict[str, str]:
    """The text of each module by its dotted name; a package without a module of its own is one, too."""
    found = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): text
        for name, text in PYTHON
    }
    for name in list(found):
        parts = name.split(".")
        for end in range(1, len(parts)):
            found.setdefault(".".join(parts[:end]), "")
    return found


@functools.cache
def _code_names(path: str) -> set[str]:
    """The identifiers of a module's code, without those of its comments and strings; of another file none."""
    if not path.endswith(".py"):
        return set()
    text = (ROOT / path).read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {each.string for each in tokens if each.type == tokenize.NAME}


def _by_end(modules: dict[str, str]) -> dict[str, list[str]]:
    """The texts of the modules whose dotted names end with a name: `a.b.c` is found as itself, `b.c` and `c`."""
    found: dict[str, list[str]] = {}
    for name, text in modules.items():
        parts = name.split(".")
        for start in range(len(parts)):
            found.setdefault(".".join(parts[start:]), []).append(text)
    return found


def _exists(dotted: str, by_end: dict[str, list[str]]) -> bool | None:
    """Whether `dotted` is a module, or something in one; None: no module is called like its beginning."""
    if dotted in by_end:
        return True
    parts = dotted.split(".")
    known = False
    for end in range(len(parts) - 1, 0, -1):
        for text in by_end.get(".".join(parts[:end]), ()):
            known = True
            if re.search(rf"\b{parts[end]}\b", text):
                return True
    return False if known else None


def _is_lost(dotted: str, by_end: dict[str, list[str]], path: str) -> bool:
    parts = dotted.split(".")
    if parts[0] in _NOT_MODULES or parts[-1] in _FILE_ENDINGS or parts[-1].startswith("__"):
        return False
    found = _exists(dotted, by_end)
    if found is not None:
        return not found
    return parts[0] not in sys.stdlib_module_names and parts[0] not in _code_names(path)


def test_modules_that_a_text_names_exist():
    """A reader follows such a name; that of a module that was moved or renamed leads nowhere."""
    everything = _modules()
    product = {name: text for name, text in everything.items() if not name.startswith("tests")}
    all_ends, product_ends = _by_end(everything), _by_end(product)
    lost = []
    for path, text in _others():
        if not path.endswith((".py", ".md", ".sql", ".c", ".h")) or path == "CHANGELOG.md":
            continue
        short_ends = all_ends if path.startswith("tests/") else product_ends
        lost += [
            f"{path}:{number}: {short or full}"
            for number, line in enumerate(text.splitlines(), 1)
            for short, full in _DOTTED.findall(line)
            if _is_lost(short or full, all_ends if full else short_ends, path)
        ]
    assert not lost, "\n".join(lost)


def test_test_files_and_pages_that_a_text_names_exist():
    there = {Path(name).name for name, _ in TEXTS}
    named = re.compile(r"(\btest_\w+\.py|(?<![\w/])docs/[\w/-]+\.md)\b")
    lost = [
        f"{path}:{number}: {name}"
        for path, text in _others()
        if path != "CHANGELOG.md"
        for number, line in enumerate(text.splitlines(), 1)
        for name in named.findall(line)
        if Path(name).name not in there
    ]
    assert not lost, "\n".join(lost)
