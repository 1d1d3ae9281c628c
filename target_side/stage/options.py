"""How much a stage may take: memory, threads and cores; and what that buys."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from hyades.common.encodings import encoded_row_bytes
from hyades.common.errors import UsageError
from hyades.common.pages import PageShape
from hyades.common.units import MIB, format_size
from hyades.common.viewspec import ViewSpec
from hyades.target_side.stage.meter import Meter

_MOST_PAGES = 64
_HELD = 2  # ranges that are kept for the pages that are asked for next


@dataclass(frozen=True, slots=True)
class StageOptions:
    """`threads` compute ahead and `readers` wait for the device; 0: who asks does it.

    `cores` pins both kinds to CPU cores, None leaves them where they run.
    """

    memory: int = 256 * MIB
    threads: int = 1
    readers: int = 2
    cores: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.threads, self.readers) < 0:
            raise UsageError(f"a stage of {self.threads} threads and {self.readers} readers")
        missing = set(self.cores or ()) - os.sched_getaffinity(0)
        if missing or self.cores == ():
            have = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise UsageError(f"stage cores {self.cores}: this process may use {have}")


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What a view's stage holds at most.

    threads and `ahead` ranges that are made before they are asked for, `held` ranges of pages that
    may be asked for again, `window` source pages read ahead, all within `nbytes`.
    """

    threads: int
    ahead: int
    held: int
    window: int
    nbytes: int


def plan_stage(
    options: StageOptions, spec: ViewSpec, source: PageShape, width_in: int, fixed: int,
    tile_page: int = 0,
) -> StagePlan:  # fmt: skip
    """Divide the memory; UsageError says the least where it does not do.

    *source* and *width_in* describe the rows read, *fixed* are bytes for tables, *tile_page* the
    bytes of a page of tiles where there is sampling.
    """
    shape = spec.shape()
    made = shape.pages_per_range * shape.page_bytes
    encoded = spec.range_rows * encoded_row_bytes(spec.encoding, spec.width)
    # While a range is made: a page, its rows taken out, as floats and encoded; the product and its
    # operand; the encoded rows twice, as blocks and as one; then the pages.
    rows = spec.block_rows if spec.projections else min(source.rows_per_page, source.range_rows)
    floats = 4 * rows * (width_in + (2 * spec.width if spec.projections else 0))
    work = 2 * source.page_bytes + floats + 2 * encoded + made + 4 * tile_page
    page = max(source.page_bytes, 2 * tile_page)
    least = fixed + work + _HELD * made + page
    if least > options.memory:
        raise UsageError(
            f"a view of {spec.source!r} in ranges of {spec.range_rows} rows takes at least "
            f"{format_size(least)} of stage memory, not {format_size(options.memory)}: raise "
            "--stage-memory"
        )
    left = options.memory - least
    threads = ahead = 0
    for _ in range(options.threads):  # a range that is made ahead waits as pages
        if left < work + 2 * made:
            break
        threads, ahead, left = threads + 1, ahead + 2, left - work - 2 * made
    window = 1 + min(_MOST_PAGES - 1, left // page) if options.readers else 0
    used = options.memory - left + max(window - 1, 0) * page
    return StagePlan(threads, ahead, _HELD, window, used)


def make_pool(
    threads: int, name: str, options: StageOptions, meter: Meter
) -> ThreadPoolExecutor | None:
    """Return a pool of pinned threads that the meter can tell apart; None for no threads."""
    if threads == 0:
        return None
    numbers = count()
    return ThreadPoolExecutor(threads, name, _initializer(options.cores, meter, numbers.__next__))


def _initializer(
    cores: tuple[int, ...] | None, meter: Meter, number: Callable[[], int]
) -> Callable[[], None]:
    def enter() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # of the calling thread
        meter.enter_thread(number())

    return enter
