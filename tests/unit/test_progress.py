"""The progress bar: a line a phase, sizes and counts, silence where nobody looks."""

from io import StringIO

from hyades.deploy.progress import Counted, ProgressBar


def test_a_phase_has_rate_total_and_its_own_line() -> None:
    stream = StringIO()
    with ProgressBar(force=True, stream=stream) as bar:
        for done in (1 << 20, 3 << 20, 4 << 20):
            bar("layer 1 of 2, pass 1 of 3", done, 4 << 20, "B")
        bar("edges", 5000, 20_000, "edge")
        bar("lanes", 5, 20, "lane")
    text = stream.getvalue()
    first, second, third = text.split("\n")[:3]
    assert "layer 1 of 2, pass 1 of 3: 100%" in first
    assert "4.00M/4.00M" in first
    assert "B/s]" in first
    assert "edges:  25%" in second
    assert "5.00k/20.0k" in second
    assert "edge/s]" in second
    assert "5/20 " in third


def test_a_phase_that_ended_says_so_once() -> None:
    stream = StringIO()
    with ProgressBar(force=True, stream=stream) as bar:
        for done in (1, 2, 2, 2):
            bar("x", done, 2, "page")
        assert stream.getvalue().count("\n") == 1
        bar("x", 1, 2, "page")  # once more from the start
        bar("x", 2, 2, "page")
        assert stream.getvalue().count("\n") == 2


def test_quiet_where_there_is_no_terminal() -> None:
    stream = StringIO()
    with ProgressBar(stream=stream) as bar:
        bar("x", 1, 2, "B")
    assert stream.getvalue() == ""


def test_counting_up() -> None:
    calls: list[tuple[str, int, int, str]] = []
    counted = Counted(lambda *call: calls.append(call), "export", 30)
    counted(10)
    counted(20)
    assert calls == [("export", 10, 30, "B"), ("export", 30, 30, "B")]
