"""Which columns of a table are source, target and weight."""

from collections.abc import Sequence

from hyades.common.errors import UsageError

# Pairs of names that say source and target, compared in lower case.
_USUAL = (
    ("src", "dst"), ("source", "target"), ("source", "destination"), ("from", "to"), ("u", "v"),
    ("src_id", "dst_id"), ("source_id", "target_id"), ("fromnodeid", "tonodeid"),
    ("from_id", "to_id"), ("id_1", "id_2"), ("id1", "id2"), ("row", "col"), ("head", "tail"),
)  # fmt: skip


def find_column(names: Sequence[str] | None, width: int, asked: str, where: str) -> int:
    """Return the position of the column *asked*, a name or a number from 0; UsageError."""
    if names is not None and asked in names:
        return list(names).index(asked)
    if asked.isdigit() and int(asked) < width:
        return int(asked)
    has = f"columns {', '.join(names)}" if names is not None else f"{width} columns without names"
    raise UsageError(f"{where}: no column {asked!r}: it has {has}")


def find_pair(
    names: Sequence[str] | None, width: int, asked: tuple[str, str] | None, where: str
) -> tuple[int, int]:
    """Return the positions of source and target; UsageError when they cannot be told."""
    if asked is not None:
        if len(asked) != 2:
            raise UsageError(f"--edge-columns {','.join(asked)}: give two, SOURCE,TARGET")
        source, target = (find_column(names, width, name, where) for name in asked)
        return source, target
    if width < 2:
        raise UsageError(f"{where}: one column: an edge list has a source and a target column")
    lower = [name.lower() for name in names or ()]
    for source_name, target_name in _USUAL:
        if source_name in lower and target_name in lower:
            return lower.index(source_name), lower.index(target_name)
    if names is not None and width > 2:
        raise UsageError(
            f"{where}: which of the columns {', '.join(names)} are source and target? "
            "Pass --edge-columns SOURCE,TARGET"
        )
    return 0, 1
