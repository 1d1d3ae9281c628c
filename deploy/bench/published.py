"""Published figures that benchmarks stand beside, each with where it was read.

L. Gerstman, A. Dhakal, D. Milojicic, A. Mendelson: LGNNIC: Acceleration of Large-Scale GNN Training
using SmartNICs, arXiv:2608.07733v1, 2026-08-07.  One node with a BlueField-2 that holds the graph
in its DRAM, one with an EPYC 7513 and an A100; PyG's NeighborLoader, batches of 1024 vertices;
GraphSAGE, training.  All cells of tables 2, 4 and 5 are here, and of table 1.

Seconds are those of table 5: of all mini-batches, averaged over runs.  `base` is what table 2
divides by: sampling as weak as the GPU's memory allowed, [-1, -1], or [-1, 256] for Reddit.
Table 2's totals of ogbn-mag over sockets do not follow from table 5 (176.76 s / 2.62 s is 67.5,
table 2 says 62.39); both are as printed.
"""

from dataclasses import dataclass
from typing import Literal

SOURCE = "LGNNIC, arXiv:2608.07733v1"

Mechanism = Literal["sockets", "dma"]
Fanouts = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """A row of table 1."""

    name: str
    vertices: int
    edges: int
    features: int
    classes: int
    base: Fanouts  # what table 2 divides by
    common: Fanouts  # highlighted: what is commonly used with this data set


@dataclass(frozen=True, slots=True)
class Timed:
    """A line of table 5 and the speedups beside it, which are those of table 4."""

    dataset: str
    mechanism: Mechanism
    fanouts: Fanouts
    transfer32: float  # seconds, float32
    transfer16: float
    transfer_speedup: float
    total32: float
    total16: float
    total_speedup: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """A cell of table 2: speedups of sampling, against Dataset.base, float32."""

    dataset: str
    mechanism: Mechanism
    fanouts: Fanouts
    transfer_speedup: float
    total_speedup: float


TABLE_1 = {
    "reddit": Dataset("reddit", 232_965, 114_615_892, 602, 41, (-1, 256), (25, 10)),
    "products": Dataset("products", 2_449_029, 61_859_140, 100, 47, (-1, -1), (15, 10, 5)),
    "mag": Dataset("mag", 1_939_743, 21_111_007, 128, 349, (-1, -1), (10, 10)),
}

TABLE_2 = (
    Sampled("reddit", "sockets", (25, 10), 8.56, 8.76),
    Sampled("reddit", "sockets", (10, 10), 21.32, 21.73),
    Sampled("reddit", "sockets", (-1,), 5.19, 5.33),
    Sampled("reddit", "dma", (25, 10), 5.10, 17.46),
    Sampled("reddit", "dma", (10, 10), 7.99, 29.03),
    Sampled("reddit", "dma", (-1,), 3.88, 15.20),
    Sampled("products", "sockets", (25, 10), 84.49, 75.12),
    Sampled("products", "sockets", (15, 10, 5), 19.53, 18.48),
    Sampled("products", "sockets", (-1,), 118.12, 107.17),
    Sampled("products", "dma", (25, 10), 15.36, 18.43),
    Sampled("products", "dma", (15, 10, 5), 6.45, 7.40),
    Sampled("products", "dma", (-1,), 18.18, 28.89),
    Sampled("mag", "sockets", (25, 10), 52.64, 45.51),
    Sampled("mag", "sockets", (10, 10), 73.57, 62.39),
    Sampled("mag", "sockets", (-1,), 472.08, 353.57),
    Sampled("mag", "dma", (25, 10), 7.44, 7.45),
    Sampled("mag", "dma", (10, 10), 8.73, 8.61),
    Sampled("mag", "dma", (-1,), 47.65, 39.40),
)

TABLE_5 = (
    Timed("reddit", "sockets", (-1, 256), 315.52, 192.87, 1.64, 325.84, 201.43, 1.62),
    Timed("reddit", "sockets", (25, 10), 36.84, 10.11, 3.64, 37.19, 10.45, 3.56),
    Timed("reddit", "sockets", (10, 10), 14.80, 4.11, 3.60, 15.00, 4.31, 3.48),
    Timed("reddit", "sockets", (-1,), 60.75, 16.65, 3.65, 61.10, 17.00, 3.59),
    Timed("reddit", "dma", (-1, 256), 1.73, 1.39, 1.24, 11.54, 11.18, 1.03),
    Timed("reddit", "dma", (25, 10), 0.34, 0.25, 1.36, 0.66, 0.55, 1.20),
    Timed("reddit", "dma", (10, 10), 0.22, 0.17, 1.24, 0.40, 0.35, 1.15),
    Timed("reddit", "dma", (-1,), 0.44, 0.33, 1.37, 0.76, 0.61, 1.24),
    Timed("products", "sockets", (-1, -1), 305.76, 135.99, 2.25, 318.23, 147.03, 2.16),
    Timed("products", "sockets", (15, 10, 5), 15.65, 4.61, 3.39, 17.22, 6.07, 2.84),
    Timed("products", "sockets", (25, 10), 3.62, 1.00, 3.63, 4.24, 1.56, 2.71),
    Timed("products", "sockets", (-1,), 2.59, 0.57, 4.53, 2.97, 0.90, 3.31),
    Timed("products", "dma", (-1, -1), 1.59, 1.28, 1.24, 13.81, 13.60, 1.02),
    Timed("products", "dma", (15, 10, 5), 0.25, 0.17, 1.41, 1.87, 1.79, 1.04),
    Timed("products", "dma", (25, 10), 0.10, 0.09, 1.18, 0.75, 0.73, 1.03),
    Timed("products", "dma", (-1,), 0.09, 0.04, 2.02, 0.48, 0.43, 1.11),
    Timed("mag", "sockets", (-1, -1), 87.02, 28.75, 3.03, 176.76, 59.96, 2.95),
    Timed("mag", "sockets", (25, 10), 1.65, 0.76, 2.16, 3.62, 1.80, 2.01),
    Timed("mag", "sockets", (10, 10), 1.18, 0.60, 1.96, 2.62, 1.43, 1.83),
    Timed("mag", "sockets", (-1,), 0.18, 0.15, 1.20, 0.44, 0.36, 1.20),
    Timed("mag", "dma", (-1, -1), 0.91, 0.69, 1.33, 4.09, 3.62, 1.13),
    Timed("mag", "dma", (25, 10), 0.12, 0.06, 1.93, 0.55, 0.44, 1.25),
    Timed("mag", "dma", (10, 10), 0.10, 0.05, 1.96, 0.47, 0.36, 1.31),
    Timed("mag", "dma", (-1,), 0.02, 0.017, 1.12, 0.10, 0.10, 1.05),
)


def sampled(dataset: str, mechanism: str, fanouts: Fanouts) -> Sampled | None:
    """Return the cell of table 2, None where the table has none."""
    wanted = (dataset, mechanism, fanouts)
    return next((c for c in TABLE_2 if (c.dataset, c.mechanism, c.fanouts) == wanted), None)


def timed(dataset: str, mechanism: str, fanouts: Fanouts) -> Timed | None:
    """Return the line of table 5 (and 4), None where the tables have none."""
    wanted = (dataset, mechanism, fanouts)
    return next((c for c in TABLE_5 if (c.dataset, c.mechanism, c.fanouts) == wanted), None)
