"""The tables of the SPDK process, all int64; spdk_pump.py has the rules."""

# What `pump` returns.
IDLE, BUSY, FAULT, BROKEN = range(4)

# columns of `slots`
(
    S_STATE, S_OP, S_SECTOR, S_SECTORS, S_ADDRESS, S_NBYTES, S_COOKIE, S_ATTEMPT, S_MARK,
) = range(9)  # fmt: skip
S_COLUMNS = 9
FREE, WAITING, RUNNING, PARKED = range(4)

# columns of `tickets`; the first is the one that the callback writes
K_STATUS, K_SLOT, K_ATTEMPT, K_QUEUE, K_DONE, K_INDEX = range(6)
K_COLUMNS = 8
PENDING, UNUSED = -1, -2  # values of K_STATUS besides NVMe's

# columns of `queues`
Q_PAIR, Q_OUT, Q_COLUMNS = 0, 1, 2

# words of `state`
(
    W_NAMESPACE, W_CALLBACK, W_ARENA, W_ARENA_BYTES, W_SECTORS_PER_BLOCK, W_FLUSHES, W_BELL,
    W_HEAD, W_WAITING, W_RUNNING, W_PARKED, W_FREE_TICKETS, W_FAULTY, W_LOST, W_COMPLETED,
    W_WRITES, W_FLUSHED, W_IN_DOUBT,
) = range(18)  # fmt: skip
W_WORDS = 18
