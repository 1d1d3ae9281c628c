"""Tensors that torch saved; the only place where ingest needs torch."""

import pickle
from pathlib import Path
from typing import Any

from hyades.common.errors import DataError
from hyades.deploy.ingest.readers.storage import check_file


def load_saved(path: Path) -> Any:
    """Return what torch.save wrote, tensors memory-mapped; DataError for pickled classes."""
    import torch

    check_file(path)
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(path, mmap=True, **options)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, **options)  # the format before torch 1.6 cannot be mapped
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(
            f"{path}: no tensors that can be read without running code from the file ({text[:120]})"
            ": load it in Python and pass the Data object or its arrays to hyades' ingest"
        ) from error
