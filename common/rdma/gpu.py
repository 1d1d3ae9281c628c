"""GPU memory as a dma-buf, which an RDMA device can register without help of the GPU's driver.

Through libcuda (CUDA 11.7 and newer): cuMemGetHandleForAddressRange gives a descriptor for a range
of device memory whose ends lie on pages.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint64, c_ulonglong

from hyades.common.errors import BackendMissing

_PAGE = 4096
_DMA_BUF = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD


def export(pointer: int, nbytes: int) -> tuple[int, int]:
    """Return (descriptor, offset of *pointer* in it) of GPU memory; BackendMissing says why not.

    The caller closes the descriptor; a region that was registered by it does not need it.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        call = library.cuMemGetHandleForAddressRange
    except (OSError, AttributeError) as error:
        raise BackendMissing(f"no dma-buf of GPU memory: {error}") from error
    start = pointer // _PAGE * _PAGE
    end = -(-(pointer + nbytes) // _PAGE) * _PAGE
    fd = c_int(-1)
    code = call(byref(fd), c_uint64(start), c_size_t(end - start), _DMA_BUF, c_ulonglong(0))
    if code:
        raise BackendMissing(
            f"no dma-buf of GPU memory: CUDA error {code} (the open kernel modules of the NVIDIA"
            " driver have them)"
        )
    return fd.value, pointer - start
