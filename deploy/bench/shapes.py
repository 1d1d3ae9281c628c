"""Generated graphs with the counts of well-known data sets, times one factor.

Vertices and edges take the factor, so that a vertex has as many neighbours as in the data set.
Features and classes take it only where that is asked for: the stage works on rows, and rows of
another width would be another experiment.  Of ogbn-mag this is the part that has features: papers
and their citations; the published runs trained on all of its kinds of vertices.  Edges of
ogbn-products count in both directions, as PyG and OGB load them.
"""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.deploy.bench.graphs import GraphSpec


@dataclass(frozen=True, slots=True)
class Shape:
    """Counts of a graph."""

    name: str
    vertices: int
    edges: int
    features: int
    classes: int

    def describe(self) -> str:
        """Return the counts as text."""
        return (
            f"{self.vertices:,} vertices, {self.edges:,} edges, {self.features} features, "
            f"{self.classes} classes"
        )

    def graph(self) -> GraphSpec:
        """Return a graph of these counts."""
        return GraphSpec(self.vertices, self.edges / self.vertices, self.features)


SHAPES = {
    "reddit": Shape("reddit", 232_965, 114_615_892, 602, 41),
    "products": Shape("products", 2_449_029, 123_718_280, 100, 47),
    "mag": Shape("mag", 736_389, 5_416_271, 128, 349),
}


def scaled(name: str, factor: float, *, widths: bool = False) -> Shape:
    """Return the shape *name* times *factor*; with *widths* features and classes, too."""
    if name not in SHAPES:
        raise UsageError(f"--shape {name}: one of {', '.join(SHAPES)}")
    if not 0 < factor <= 1:
        raise UsageError(f"--scale {factor:g}: more than 0, at most 1")
    full = SHAPES[name]
    vertices = max(1, round(full.vertices * factor))
    edges = max(1, round(full.edges * factor))
    if not widths:
        return Shape(name, vertices, edges, full.features, full.classes)
    features, classes = (max(1, round(n * factor)) for n in (full.features, full.classes))
    return Shape(name, vertices, edges, features, classes)
