"""Digests of files, by which a change is noticed."""

import hashlib
from pathlib import Path


def digest_of_file(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
