"""Jars from Maven Central for servers that tests start, each fetched once and compared with its SHA-256."""

import urllib.request
from hashlib import sha256
from pathlib import Path


def fetched(path: str, digest: str, file: Path) -> bool:
    """Whether `file` is the jar at this path of the repository, fetched if need be. The caller has its folder for itself."""
    if file.exists():
        return True
    draft = file.with_suffix(".draft")
    address = f"https://repo1.maven.org/maven2/{path}"
    found = sha256()
    try:
        with urllib.request.urlopen(address, timeout=60) as answer, draft.open("wb") as out:
            while chunk := answer.read(1 << 20):
                found.update(chunk)
                out.write(chunk)
    except OSError:
        return False
    if found.hexdigest() != digest:
        return False
    draft.rename(file)
    return True
