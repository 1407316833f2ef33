"""`model_fingerprint` of formats/dump.md: what ties an artifact to a model."""

import hashlib
from pathlib import Path


def model_fingerprint(folder: Path) -> str:
    """SHA-256 over the SHA-256 of config.json and every *.safetensors file of a model folder, sorted by name."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")], key=lambda path: path.name)
    return hashlib.sha256("".join(f"{_sha256(path)}  {path.name}\n" for path in files).encode()).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
