"""CONTRIBUTING.md: every file, folder, function and target that it names is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
_FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir()}


def test_every_path_that_it_names_is_there() -> None:
    words = re.findall(r"[\w.-]+(?:/[\w.-]+)+/?|[\w-]+\.(?:md|toml)", TEXT)
    paths = [word for word in words if word.split("/")[0] in _FOLDERS or "/" not in word]
    assert len(paths) > 50
    # mutants.py stands beside each model, metadata beside nothing: a path has its folder.
    missing = sorted({path for path in paths if not (ROOT / path).exists()} - {"tuskline.toml"})
    assert not missing


def test_every_function_that_it_names_is_in_its_file() -> None:
    rows = re.findall(r"((?:`\w+`(?: and )?)+) in `([\w/]+\.py)`", TEXT)
    assert len(rows) >= 2
    for names, path in rows:
        text = (ROOT / path).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in text, (name, path)


def test_every_target_that_it_names_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE))
    assert {"venv", "check", "test"} <= named <= targets
