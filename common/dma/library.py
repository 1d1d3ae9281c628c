"""Finding, loading and binding DOCA's shared libraries (DOCA 2.5 and later).

Every function of libdoca_common and libdoca_dma that doca.py calls is listed here with its types,
so that a library without one is refused in words.  Source: DOCA Core and DOCA DMA programming
guides, and the declarations of doca_{dev,mmap,buf_inventory,buf,pe,ctx,dma}.h.
"""

import ctypes as c
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyades.common.errors import BackendMissing

VARIABLE = "HYADES_DOCA_LIB_DIR"
FOLDERS = (
    "/opt/mellanox/doca/lib/aarch64-linux-gnu", "/opt/mellanox/doca/lib/x86_64-linux-gnu",
    "/opt/mellanox/doca/lib64", "/opt/mellanox/doca/lib",
)  # fmt: skip
NAMES = ("libdoca_common.so", "libdoca_dma.so")
_P, _U32, _U64, _SIZE, _E = c.c_void_p, c.c_uint32, c.c_uint64, c.c_size_t, c.c_int
CALLBACK = c.CFUNCTYPE(None, _P, _U64, _U64)  # task, data of the task, data of the context
# name -> (result, arguments); union doca_data is 8 bytes
_COMMON: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "doca_error_get_descr": (c.c_char_p, (_E,)),
    "doca_devinfo_create_list": (_E, (_P, _P)),
    "doca_devinfo_destroy_list": (_E, (_P,)),
    "doca_devinfo_get_pci_addr_str": (_E, (_P, c.c_char_p)),
    "doca_dev_open": (_E, (_P, _P)),
    "doca_dev_close": (_E, (_P,)),
    "doca_mmap_create": (_E, (_P,)),
    "doca_mmap_destroy": (_E, (_P,)),
    "doca_mmap_add_dev": (_E, (_P, _P)),
    "doca_mmap_set_permissions": (_E, (_P, _U32)),
    "doca_mmap_set_memrange": (_E, (_P, _P, _SIZE)),
    "doca_mmap_start": (_E, (_P,)),
    "doca_mmap_stop": (_E, (_P,)),
    "doca_buf_inventory_create": (_E, (_SIZE, _P)),
    "doca_buf_inventory_destroy": (_E, (_P,)),
    "doca_buf_inventory_start": (_E, (_P,)),
    "doca_buf_inventory_stop": (_E, (_P,)),
    # doca_buf_inventory_buf_get_by_addr and ..._by_data are inline functions over this one
    "doca_buf_inventory_buf_get_by_args": (_E, (_P, _P, _P, _SIZE, _P, _SIZE, _P)),
    "doca_buf_dec_refcount": (_E, (_P, _P)),
    "doca_pe_create": (_E, (_P,)),
    "doca_pe_destroy": (_E, (_P,)),
    "doca_pe_connect_ctx": (_E, (_P, _P)),
    "doca_pe_progress": (c.c_uint8, (_P,)),
    "doca_ctx_start": (_E, (_P,)),
    "doca_ctx_stop": (_E, (_P,)),
    "doca_task_submit": (_E, (_P,)),
    "doca_task_free": (None, (_P,)),
    "doca_task_get_status": (_E, (_P,)),
}
_DMA: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "doca_dma_create": (_E, (_P, _P)),
    "doca_dma_destroy": (_E, (_P,)),
    "doca_dma_as_ctx": (_P, (_P,)),
    "doca_dma_cap_task_memcpy_is_supported": (_E, (_P,)),
    "doca_dma_cap_task_memcpy_get_max_buf_size": (_E, (_P, _P)),
    "doca_dma_cap_get_max_num_tasks": (_E, (_P, _P)),
    "doca_dma_task_memcpy_set_conf": (_E, (_P, CALLBACK, CALLBACK, _U32)),
    "doca_dma_task_memcpy_alloc_init": (_E, (_P, _P, _P, _U64, _P)),
    "doca_dma_task_memcpy_as_task": (_P, (_P,)),
}


class Functions:
    """DOCA's functions, by name."""

    def __init__(self, folder: Path | None) -> None:
        """Load from *folder*, or from where ld.so looks; BackendMissing."""
        for name, table in zip(NAMES, (_COMMON, _DMA), strict=True):
            where = str(folder / name) if folder is not None else name
            try:
                library = c.CDLL(where, mode=c.RTLD_GLOBAL)
            except OSError as error:
                raise BackendMissing(f"{where} cannot be loaded: {error}") from error
            for function, (result, arguments) in table.items():
                try:
                    bound = getattr(library, function)
                except AttributeError:
                    raise BackendMissing(
                        f"{where} has no {function}: DOCA 2.5 or newer is needed"
                    ) from None
                bound.restype, bound.argtypes = result, list(arguments)
                setattr(self, function, bound)

    def __getattr__(self, name: str) -> Any:  # for type checkers: all are set above
        raise AttributeError(name)

    def describe(self, status: int) -> str:
        """Return DOCA's words for an error."""
        text = self.doca_error_get_descr(status)
        return f"{text.decode() if text else 'unknown error'} ({status})"


def find(environment: Mapping[str, str] | None = None) -> Path | str:
    """Return the folder of DOCA's libraries, or why there is none and what to do."""
    variables = os.environ if environment is None else environment
    chosen = variables.get(VARIABLE, "")
    for folder in [chosen] if chosen else FOLDERS:
        if all((Path(folder) / name).exists() for name in NAMES):
            return Path(folder)
    what = " and ".join(NAMES)
    if chosen:
        return f"{VARIABLE}={chosen} does not hold {what}: set it to DOCA's lib folder"
    return (
        f"no {what} in {', '.join(FOLDERS)}, and {VARIABLE} is not set: install doca-runtime 2.5 or"
        f" newer on a machine with a BlueField, or set {VARIABLE} to the folder of its .so files"
    )


def load(environment: Mapping[str, str] | None = None) -> Functions:
    """Return DOCA's functions; BackendMissing."""
    found = find(environment)
    if isinstance(found, str):
        raise BackendMissing(found)
    return Functions(found)
