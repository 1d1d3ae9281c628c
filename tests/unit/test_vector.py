"""Row functions: exact against plain loops, and the warp's version against the CPU's, bit by bit.

A warp cannot run here.  But its code is the same generator with one column a lane, so each lane is
run in turn on the CPU, which must give what the vectors give.
"""

import ctypes

import numba
import numpy as np
import pytest
from llvmlite import ir

from hyades.gpu_side import vector

F32 = np.float32
FUNCTIONS = {"sum": vector.sum_row, "weighted": vector.weighted_row, "max": vector.max_row}
WIDTHS = (16, 32, 48, 64, 112, 128, 144, 240, 256, 384)


def entry(name):
    """Compile an entry of its own, uncached: the tests below change what is generated."""
    function = FUNCTIONS[name]

    def call(floats, shorts, first, last, base, stride, out, width, factor, weights):
        function(floats, shorts, first, last, base, stride, out, width, factor, weights)

    return numba.njit(error_model="numpy")(call)


@pytest.fixture(scope="module")
def on_cpu():
    return {name: entry(name) for name in FUNCTIONS}


class Case:
    """Rows, one destination's state and weights in one float32 array, as in the arena."""

    def __init__(self, width, edges, seed=0, special=False):
        rng = np.random.default_rng(seed)
        self.rows, self.width, self.stride = 40, width, width + 16
        self.base = 5 * 16
        self.out = self.base + self.rows * self.stride
        self.weights = self.out + width + 32
        self.floats = rng.standard_normal(self.weights + edges + 16).astype(F32)
        if special:
            places = rng.choice(self.floats.size, self.floats.size // 9, replace=False)
            values = np.array([np.inf, -np.inf, np.nan, -0.0, 0.0, 1e-42, 3e38], F32)
            self.floats[places] = rng.choice(values, places.size)
        self.shorts = np.zeros(edges + 9, np.uint16)
        self.first = 4
        self.last = self.first + edges
        self.shorts[self.first : self.last] = rng.integers(0, self.rows, edges)
        self.factor = F32(0.37)

    def call(self, function):
        """Return the floats afterwards."""
        floats = self.floats.copy()
        function(
            floats, self.shorts, self.first, self.last, self.base, self.stride, self.out,
            self.width, self.factor, self.weights,
        )  # fmt: skip
        return floats

    def expected(self, name):
        """Return the floats that plain loops in the edges' order give."""
        floats = self.floats.copy()
        total = np.full(self.width, -np.inf if name == "max" else 0, F32)
        for place, source in enumerate(self.shorts[self.first : self.last]):
            at = self.base + int(source) * self.stride
            row = floats[at : at + self.width]
            if name == "max":
                total = larger(total, row)
            else:
                total = total + (row * floats[self.weights + place] if name == "weighted" else row)
        state = floats[self.out : self.out + self.width]
        state[:] = larger(state, total) if name == "max" else state + total * self.factor
        return floats


def larger(left, right):
    """NaN wins, as in torch.amax."""
    return np.where(np.isnan(left) | (left > right), left, right)


def same(left, right):
    """Equal bits, or both NaN, or two zeros under max."""
    return bool(np.all((left == right) | (np.isnan(left) & np.isnan(right))))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_plain_loops_agree(on_cpu, name, width):
    for edges in (0, 1, 2, 7):
        case = Case(width, edges, seed=edges)
        got = case.call(on_cpu[name])
        assert got.tobytes() == case.expected(name).tobytes()
        touched = np.flatnonzero(got != case.floats)
        assert set(touched) <= set(range(case.out, case.out + width)), "wrote beside the state"


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_special_values(on_cpu, name):
    for seed in range(20):
        case = Case(48, 5, seed, special=True)
        assert same(case.call(on_cpu[name]), case.expected(name))


@pytest.fixture(scope="module")
def by_lanes():
    """Return the row functions as a warp runs them, each lane in turn."""
    word = np.zeros(1, np.int64)

    def lane(builder):
        kind = ir.IntType(64)
        address = ir.Constant(kind, word.ctypes.data).inttoptr(kind.as_pointer())
        return builder.load(address)

    made = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector, "is_cuda", lambda context: True)
        patch.setattr(vector, "_cuda_lane", lane)
        for name in FUNCTIONS:
            made[name] = entry(name)
            Case(16, 1).call(made[name])  # compiles

    def warp(name):
        def call(*arguments):
            for number in range(32):
                ctypes.c_int64.from_address(word.ctypes.data).value = number
                made[name](*arguments)

        return call

    return warp


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_warp_gives_the_same_bits(on_cpu, by_lanes, name, width):
    for edges in (0, 1, 6):
        case = Case(width, edges, seed=edges)
        assert case.call(by_lanes(name)).tobytes() == case.call(on_cpu[name]).tobytes()
