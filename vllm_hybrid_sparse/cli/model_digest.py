"""Tells models apart that have the same name and shape."""

import hashlib
from pathlib import Path

_ENDS_BYTES = 2**20
_WEIGHTS = ("*.safetensors", "*.bin")


def model_digest(model: str) -> str:
    """Return a short digest of a model's configuration and weights; a copied folder keeps it.

    It depends on the size and the first and last MiB of each file with weights; for a model on a hub, only on its name.
    """
    folder = Path(model)
    digest = hashlib.sha256()
    if not folder.is_dir():
        digest.update(model.encode())
        return digest.hexdigest()[:16]
    files = [folder / "config.json", *sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))]
    for path in files:
        if not path.is_file():
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    return digest.hexdigest()[:16]
