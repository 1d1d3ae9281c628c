"""Tensors that torch saved; the only place where ingest needs torch."""

import warnings
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
        with warnings.catch_warnings(action="ignore"):  # about what ends in an error anyway
            try:
                return torch.load(path, mmap=True, **options)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                return torch.load(path, **options)  # the format before torch 1.6
    except Exception as error:  # garbage fails anywhere in torch's reader: IndexError, KeyError...
        raise DataError(
            f"{path}: damaged, or a pickle of Python objects, which is not read since it could run "
            "code: load it in Python and pass the Data object or its arrays to ingest"
        ) from error
