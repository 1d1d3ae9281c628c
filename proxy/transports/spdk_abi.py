"""SPDK's C structures as ctypes, with sizes and offsets asserted at import (LP64 only).

Rules, for SPDK 24.01 and newer:
1. Every options structure is followed by zeroed room, and the library is told that all of it is
   the structure (`opts_size`).  A newer library then finds space for fields that are not known
   here and fills in their defaults.  A size smaller than the library's own is not safe: v26.05
   read the fields past it from an uninitialised stack.
2. Only the fields named here are set; everything else keeps what the library wrote.
Must stay in sync: spdk/env.h and spdk/nvme.h.  Sizes seen: spdk_env_opts 112 (24.01) and 128
(24.09), spdk_nvme_transport_id 564, spdk_nvme_ctrlr_opts 824 (24.01) and 856 (24.09),
spdk_nvme_io_qpair_opts 72 (24.01) and 80 (25.05), spdk_nvme_cpl 16.
"""

import ctypes as c

_ROOM = 1024  # bytes behind each structure, for fields of later versions


class EnvOpts(c.Structure):
    """struct spdk_env_opts; `opts_size` is set before spdk_env_opts_init."""

    _fields_ = (
        ("name", c.c_char_p),
        ("core_mask", c.c_char_p),
        ("lcore_map", c.c_char_p),
        ("shm_id", c.c_int),
        ("mem_channel", c.c_int),
        ("main_core", c.c_int),
        ("mem_size", c.c_int),  # MiB
        ("no_pci", c.c_bool),
        ("hugepage_single_segments", c.c_bool),
        ("unlink_hugepage", c.c_bool),
        ("no_huge", c.c_bool),
        ("reserved", c.c_uint32),
        ("num_pci_addr", c.c_size_t),
        ("hugedir", c.c_char_p),
        ("pci_blocked", c.c_void_p),
        ("pci_allowed", c.c_void_p),
        ("iova_mode", c.c_char_p),
        ("base_virtaddr", c.c_uint64),
        ("env_context", c.c_char_p),
        ("vf_token", c.c_char_p),
        ("opts_size", c.c_size_t),
        ("room", c.c_uint8 * _ROOM),
    )


class TransportId(c.Structure):
    """struct spdk_nvme_transport_id, which spdk_nvme_transport_id_parse fills."""

    _fields_ = (
        ("trstring", c.c_char * 33),
        ("trtype", c.c_int),
        ("adrfam", c.c_int),
        ("traddr", c.c_char * 257),
        ("trsvcid", c.c_char * 33),
        ("subnqn", c.c_char * 224),
        ("priority", c.c_int),
        ("room", c.c_uint8 * _ROOM),
    )


class CtrlrOpts(c.Structure):
    """struct spdk_nvme_ctrlr_opts."""

    _fields_ = (
        ("num_io_queues", c.c_uint32),
        ("use_cmb_sqs", c.c_bool),
        ("no_shn_notification", c.c_bool),
        ("reserved6", c.c_uint8 * 2),
        ("arb_mechanism", c.c_int),
        ("arbitration", c.c_uint8 * 4),
        ("keep_alive_timeout_ms", c.c_uint32),
        ("transport_retry_count", c.c_uint8),
        ("reserved21", c.c_uint8 * 3),
        ("io_queue_size", c.c_uint32),
        ("hostnqn", c.c_char * 224),
        ("io_queue_requests", c.c_uint32),
        ("src_addr", c.c_char * 257),
        ("src_svcid", c.c_char * 33),
        ("host_id", c.c_uint8 * 8),
        ("extended_host_id", c.c_uint8 * 16),
        ("reserved570", c.c_uint8 * 2),
        ("command_set", c.c_int),
        ("admin_timeout_ms", c.c_uint32),
        ("header_digest", c.c_bool),
        ("data_digest", c.c_bool),
        ("disable_error_logging", c.c_bool),
        ("transport_ack_timeout", c.c_uint8),  # TCP: 2**n ms until unanswered data breaks the path
        ("admin_queue_size", c.c_uint16),
        ("reserved586", c.c_uint8 * 6),
        ("opts_size", c.c_size_t),
        ("fabrics_connect_timeout_us", c.c_uint64),
        ("room", c.c_uint8 * _ROOM),
    )


class QpairOpts(c.Structure):
    """struct spdk_nvme_io_qpair_opts; libraries before 25.05 do not know `opts_size`."""

    _fields_ = (
        ("qprio", c.c_int),
        ("io_queue_size", c.c_uint32),
        ("io_queue_requests", c.c_uint32),
        ("delay_cmd_submit", c.c_bool),
        ("reserved13", c.c_uint8 * 3),
        ("sq", c.c_uint64 * 3),
        ("cq", c.c_uint64 * 3),
        ("create_only", c.c_bool),
        ("async_mode", c.c_bool),
        ("disable_pcie_sgl_merge", c.c_bool),
        ("reserved67", c.c_uint8 * 5),
        ("opts_size", c.c_size_t),
        ("room", c.c_uint8 * _ROOM),
    )


# struct spdk_nvme_cpl is read as two int64 words by the compiled callback: the status field is the
# upper 16 bits of the second, its phase bit the lowest of them.
CPL_STATUS_SHIFT = 49
CPL_STATUS_MASK = 0x7FFF  # SC bits 0-7, SCT 8-10, CRD 11-12, M 13, DNR 14
NS_FLUSH_SUPPORTED = 1 << 1  # of spdk_nvme_ns_get_flags

assert c.sizeof(c.c_void_p) == 8, "SPDK runs on 64-bit machines only"
assert EnvOpts.no_pci.offset == 40
assert EnvOpts.opts_size.offset == 112
assert EnvOpts.room.offset == 120
assert TransportId.subnqn.offset == 334
assert TransportId.priority.offset == 560
assert TransportId.room.offset == 564
assert CtrlrOpts.hostnqn.offset == 28
assert CtrlrOpts.src_addr.offset == 256
assert CtrlrOpts.command_set.offset == 572
assert CtrlrOpts.header_digest.offset == 580
assert CtrlrOpts.opts_size.offset == 592
assert CtrlrOpts.room.offset == 608
assert QpairOpts.sq.offset == 16
assert QpairOpts.create_only.offset == 64
assert QpairOpts.opts_size.offset == 72
assert QpairOpts.room.offset == 80
