"""When a flush may succeed: rule 5 of hyades.proxy.transport on controllers that come and go.

A flush covers what a controller completed before it came, so it is sent to every live link through
which writes completed since its last one.  A link that is lost leaves such writes behind:
1. While another path stays live, so does the subsystem with its cache: the flush goes there.
2. When all paths were lost, a new association may lead to a target that lost power in between,
   and its volatile write cache with the writes in it.  The next flush succeeds only where that is
   ruled out: the controller has no volatile write cache (VWC 0), or shows the same cache epoch as
   before (a Hyades target does, unless its machine or an in-memory namespace started anew), or the
   user trusts it (trust_cache=1, what Linux does always).
3. Else that flush ends with Status.LOST, once: whoever gets it knows that writes since the flush
   before may be gone, and begins there again.  It is not IO, which is tried again.
"""

from hyades.common.nvme.identify import ControllerInfo, is_same_cache


class Flushes:
    """Which flushes are out, and whether earlier writes are in doubt."""

    def __init__(self, *, trust: bool) -> None:
        self.in_doubt = False
        self._trust = trust
        self._left_behind: ControllerInfo | None = None  # whose unflushed writes nobody covers
        self._parts: dict[int, list[int]] = {}  # row: [parts that are out, first error, again]

    def link_lost(self, controller: ControllerInfo, *, unflushed: bool, alone: bool) -> bool:
        """Note a link that was lost; return whether the other live links have to be flushed."""
        if not unflushed:
            return False
        if alone:
            self._left_behind = controller
        return not alone

    def link_found(self, controller: ControllerInfo) -> bool:
        """Note a new link; return whether it has to be flushed for the sake of lost ones."""
        before, self._left_behind = self._left_behind, None
        if before is None:
            return False
        same = is_same_cache(before.cache_epoch, controller.cache_epoch)
        if before.write_cache and not same and not self._trust:
            self.in_doubt = True
        return True

    def sent(self, row: int, parts: int) -> None:
        """Note that the flush in *row* went out to *parts* links."""
        self._parts[row] = [parts, 0, 0]

    def answered(self, row: int, code: int) -> tuple[bool, int, bool]:
        """Take one answer: (that was the last, first error code, it must be sent again)."""
        state = self._parts[row]
        state[0] -= 1
        state[1] = state[1] or code
        return self._ended(row, state)

    def lost(self, row: int) -> tuple[bool, int, bool]:
        """As `answered`, for an answer that will not come."""
        state = self._parts[row]
        state[0] -= 1
        state[2] = 1
        return self._ended(row, state)

    def _ended(self, row: int, state: list[int]) -> tuple[bool, int, bool]:
        if state[0] == 0:
            del self._parts[row]
        return state[0] == 0, state[1], bool(state[2])
