"""Who may connect to which queue, without sockets, and how associations end."""

import pytest
from tests.reference.nvme_controller import (
    OTHER,
    Link,
    admin,
    ask,
    make_target,
    want,
)

from hyades.common.nvme import commands
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.common.nvme.status import DNR, StatusCode


@pytest.fixture
def target():
    return make_target()


def refused(target, what, link=None):
    controller, reply = target.connect(what, link or Link(), 0.0)
    assert controller is None
    return reply.status, reply.result


def in_data(at):
    return StatusCode.CONNECT_INVALID | DNR, at | 1 << 16


def in_command(at):
    return StatusCode.CONNECT_INVALID | DNR, at


def test_an_unknown_subsystem_is_refused_by_name(target):
    assert refused(target, want(subnqn=OTHER)) == in_data(256)


def test_a_host_that_is_not_allowed_is_refused():
    target = make_target(hosts=frozenset((OTHER,)))
    assert refused(target, want()) == (StatusCode.CONNECT_INVALID_HOST | DNR, 0)
    assert admin(target, hostnqn=OTHER)[0].ready


def test_a_host_without_a_name_is_taken_where_any_is_allowed():
    assert admin(make_target(), hostnqn="")[0].ready


@pytest.mark.parametrize("depth", [1, 65, 65536])
def test_a_depth_of_nothing_or_beyond_mqes_is_refused(target, depth):
    assert refused(target, want(depth=depth)) == in_command(44)


def test_the_largest_depth_is_taken(target):
    admin(target, depth=64)


def test_another_record_format_is_refused(target):
    assert refused(target, want(recfmt=1)) == (StatusCode.CONNECT_INCOMPATIBLE | DNR, 0)


def test_a_named_controller_for_an_admin_queue_is_refused(target):
    assert refused(target, want(cntlid=5)) == in_data(16)


def test_io_queues_name_their_controller_and_host(target):
    controller, _ = admin(target)
    good = {"qid": 1, "cntlid": controller.cntlid}
    assert refused(target, want(**{**good, "cntlid": 99})) == in_data(16)
    assert refused(target, want(**good, hostnqn=OTHER)) == in_data(512)
    assert refused(target, want(**good, hostid=bytes(16))) == in_data(0)
    assert refused(target, want(**good, subnqn=DISCOVERY_NQN)) == in_data(256)
    assert refused(target, want(**{**good, "qid": 5})) == in_command(42)
    link = Link()
    assert target.connect(want(**good), link, 0.0)[1].status == 0
    assert (link.qid, link.controller) == (1, controller)


def test_a_queue_id_is_taken_once_until_its_connection_goes(target):
    controller, _ = admin(target)
    first = Link()
    good = want(1, cntlid=controller.cntlid)
    assert target.connect(good, first, 0.0)[0] is controller
    assert refused(target, good) == (StatusCode.INVALID_QUEUE_ID | DNR, 0)
    assert target.leave(first) == []
    assert target.connect(good, Link(), 0.0)[0] is controller


def test_a_second_connect_on_a_connection_is_refused(target):
    link = admin(target)[1]
    assert refused(target, want(), link) == (StatusCode.SEQUENCE_ERROR | DNR, 0)


def test_io_queues_wait_for_the_controller(target):
    controller, _ = admin(target, enable=False)
    queue = want(1, cntlid=controller.cntlid)
    assert refused(target, queue) == (StatusCode.SEQUENCE_ERROR | DNR, 0)


def test_discovery_has_no_io_queues(target):
    controller, _ = admin(target, subnqn=DISCOVERY_NQN)
    queue = want(1, cntlid=controller.cntlid, subnqn=DISCOVERY_NQN)
    assert refused(target, queue) == in_command(42)


def test_the_end_of_the_admin_queue_ends_the_association(target):
    controller, link = admin(target)
    queues = [Link(), Link()]
    for qid, io in enumerate(queues, 1):
        target.connect(want(qid, cntlid=controller.cntlid), io, 0.0)
    assert target.leave(link) == queues
    assert target.controllers == {}
    assert refused(target, want(3, cntlid=controller.cntlid)) == in_data(16)
    assert [target.leave(io) for io in queues] == [[], []]


def test_controller_ids_go_around_and_skip_those_in_use():
    target = make_target(first=0xFFEF)
    assert [admin(target)[0].cntlid for _ in range(3)] == [0xFFEF, 1, 2]
    target.controllers[4] = target.controllers[3] = target.controllers[1]
    assert admin(target)[0].cntlid == 5


def test_keep_alive_expires_by_the_clock_it_is_given(target):
    controller, link = admin(target, kato=2500, now=100.0)
    io = Link()
    target.connect(want(1, cntlid=controller.cntlid), io, 100.0)
    assert ask(controller, commands.keep_alive(), now=104.0).status == 0
    assert target.expire(107.0) == []  # 2.5 s are three units of one second
    io.last_heard = 107.0
    assert target.expire(110.0) == []
    assert target.expire(110.1) == [(controller, [link, io])]
    assert target.controllers == {}
    assert not controller.ready
    assert target.expire(111.0) == []


def test_without_a_timeout_keep_alive_never_expires(target):
    admin(target)
    assert target.expire(1e9) == []
