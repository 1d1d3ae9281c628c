import numpy as np
import pytest

from hyades.common.errors import UsageError
from hyades.deploy.bench.graphs import GraphSpec, make_csc
from hyades.deploy.bench.published import TABLE_1
from hyades.deploy.bench.shapes import SHAPES, scaled


@pytest.mark.parametrize("name", SHAPES)
def test_one_factor_for_vertices_and_edges(name: str) -> None:
    full, small = SHAPES[name], scaled(name, 0.01)
    assert small.vertices == round(full.vertices / 100)
    assert small.edges == round(full.edges / 100)
    assert (small.features, small.classes) == (full.features, full.classes)
    graph = small.graph()
    expected = (small.vertices, small.edges, full.features)
    assert (graph.vertices, graph.edges, graph.width) == expected


def test_widths_take_the_factor_where_that_is_asked_for() -> None:
    small = scaled("reddit", 0.1, widths=True)
    assert (small.features, small.classes) == (60, 4)
    assert small.describe() == "23,296 vertices, 11,461,589 edges, 60 features, 4 classes"
    assert scaled("reddit", 1.0) == SHAPES["reddit"]


def test_the_published_counts_are_those_but_for_what_the_module_says() -> None:
    for name in ("reddit", "products", "mag"):
        ours, theirs = SHAPES[name], TABLE_1[name]
        assert (ours.features, ours.classes) == (theirs.features, theirs.classes)
    assert (SHAPES["reddit"].vertices, SHAPES["reddit"].edges) == (232_965, 114_615_892)
    assert SHAPES["products"].edges == 2 * TABLE_1["products"].edges


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5, float("nan")])
def test_factors_that_cannot_be_meant(factor: float) -> None:
    with pytest.raises(UsageError, match="--scale"):
        scaled("mag", factor)


def test_a_name_that_is_none() -> None:
    with pytest.raises(UsageError, match="reddit, products, mag"):
        scaled("papers", 1.0)


def test_a_graph_has_exactly_the_edges_of_its_shape() -> None:
    shape = scaled("mag", 0.002)
    indptr, indices = make_csc(shape.graph())
    assert len(indptr) == shape.vertices + 1
    assert len(indices) == shape.edges == indptr[-1]
    assert np.all(indices < shape.vertices)


def test_whole_degrees_give_the_same_graph_as_before() -> None:
    """Stored graphs of the other benchmarks stay what they are."""
    indptr, indices = make_csc(GraphSpec(500, 8, 4))
    again = make_csc(GraphSpec(500, 8.0, 4))
    assert np.array_equal(indptr, again[0])
    assert np.array_equal(indices, again[1])
