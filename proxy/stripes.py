"""The members of a ``stripe:`` URL: reading their labels, and labelling blank ones."""

import re
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from uuid import uuid4

from hyades.common.blocks import is_blank, make_blank
from hyades.common.errors import HyadesError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.stripe import (
    DEFAULT_UNIT,
    MAX_MEMBERS,
    MAX_UNIT,
    StripeLabel,
    order_members,
    unpack,
)
from hyades.common.units import KIB, format_size, parse_size
from hyades.proxy.transport_blocks import TransportBlocks
from hyades.proxy.urls import Url

_NEXT_MEMBER = re.compile(r",(?=[A-Za-z][A-Za-z0-9+.-]*:|[/.])")  # options hold commas, too
_UNIT = re.compile(r"unit=([^,]*),(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StripeSet:
    """The members of a set in order, and its unit in bytes."""

    members: tuple[str, ...]
    unit: int


def split_members(url: Url) -> tuple[tuple[str, ...], int | None]:
    """Return the members that ``stripe:[unit=SIZE,]URL,...`` names, and the unit if it is given."""
    text, unit = url.path, None
    stated = _UNIT.match(text)
    if stated is not None:
        unit, text = parse_size(stated[1]), stated[2]
        if unit % BLOCK or not BLOCK <= unit <= MAX_UNIT:
            raise UsageError(
                f"{url}: unit={stated[1]} is no multiple of {BLOCK} bytes up to"
                f" {format_size(MAX_UNIT)}"
            )
    members = tuple(_NEXT_MEMBER.split(text))
    if "" in members or len(members) > MAX_MEMBERS:
        raise UsageError(f"{url}: name 1 to {MAX_MEMBERS} members, stripe:URL,URL")
    if len(members) == 1 and "," in text:
        raise UsageError(
            f"{url}: names one member, {text!r}: write relative paths as ./name, so that the comma"
            " before them ends a member"
        )
    for member in members:
        if Url(member).scheme == "stripe":
            raise UsageError(f"{url}: a stripe cannot be the member of a stripe")
    return members, unit


def map_members(text: str, change: Callable[[str], str]) -> str:
    """Return the URL *text* with *change* applied to it, or to each member of a ``stripe:``."""
    url = Url(text)
    if url.scheme != "stripe":
        return change(text)
    members, _ = split_members(url)
    head = text.removesuffix(",".join(members))  # stripe:, and the unit
    return head + ",".join(map(change, members))


def find_set(url: Url, *, create: bool) -> StripeSet:
    """Return the set whose members *url* names, labelled first with *create* if all are blank.

    DataError for members that make no whole set.
    """
    members, unit = split_members(url)
    with ExitStack() as stack:
        devices = []
        for member in members:
            devices.append(_open(member, writable=create))
            stack.callback(devices[-1].close)
        new = create and all(is_blank(device) for device in devices)
        try:
            if new:
                _write_labels(devices, unit or DEFAULT_UNIT)
            labels = [unpack(device.read(0, min(device.nblocks, 1))) for device in devices]
            order = order_members(members, labels)
        except BaseException:
            if new:  # one is too small, or two are the same
                _erase_labels(devices)
            raise
    first = labels[0]
    assert isinstance(first, StripeLabel)
    if unit is not None and unit != first.unit:
        raise UsageError(
            f"{url}: this stripe has units of {format_size(first.unit)}: leave unit= out"
        )
    return StripeSet(tuple(members[place] for place in order), first.unit)


def _write_labels(devices: list[TransportBlocks], unit: int) -> None:
    """Make *devices* a new set."""
    uuid = uuid4()
    for index, device in enumerate(devices):
        device.grow(unit // BLOCK)
        device.write(0, StripeLabel(uuid, index, len(devices), unit).pack())
        device.flush()


def _erase_labels(devices: list[TransportBlocks]) -> None:
    """Make *devices* blank again, as far as those that may have failed let it."""
    for device in devices:
        with suppress(HyadesError):
            device.write(0, bytes(min(device.nblocks, 1) * BLOCK))
            device.flush()


def erase_members(url: Url) -> None:
    """Make the members of *url* blank, so that a new set can be made of them."""
    for member in split_members(url)[0]:
        blocks = _open(member, writable=True)
        try:
            make_blank(blocks)
        finally:
            blocks.close()


def _open(member: str, *, writable: bool) -> TransportBlocks:
    from hyades.proxy.registry import open_transport

    transport = open_transport(member, create=writable, writable=writable)
    return TransportBlocks(transport, member, buffer=128 * KIB)
