"""Controllers without sockets: properties, Identify, logs, features, events."""

from struct import unpack_from

import pytest
from tests.reference.nvme_controller import ENABLE, ENTRY, NQN, Link, admin, ask, make_target, want

from hyades.common.nvme import commands
from hyades.common.nvme.commands import Command
from hyades.common.nvme.identify import (
    parse_active_list,
    parse_controller,
    parse_discovery_log,
    parse_namespace,
)
from hyades.common.nvme.layout import DISCOVERY_NQN, Admin, Feature, LogPage, Opcode, Property, Sgl
from hyades.common.nvme.status import DNR, StatusCode


@pytest.fixture
def target():
    return make_target()


@pytest.fixture
def controller(target):
    return admin(target)[0]


def value(controller, offset, wide=False):
    return ask(controller, commands.property_get(offset, wide=wide)).result


def test_properties(target):
    controller, _ = admin(target, enable=False)
    assert value(controller, Property.CAP, wide=True) == 0x200F010000 | 63
    assert value(controller, Property.VS) == 0x10300
    assert value(controller, Property.CSTS) == 0
    ask(controller, commands.property_set(Property.CC, ENABLE & ~1))  # Linux does this first
    assert value(controller, Property.CSTS) == 0
    ask(controller, commands.property_set(Property.CC, ENABLE))
    assert value(controller, Property.CC) == ENABLE
    assert value(controller, Property.CSTS) == 1


@pytest.mark.parametrize(
    "sqe",
    [
        commands.property_get(0x30),
        commands.property_get(Property.CAP),
        commands.property_get(Property.VS, wide=True),
        commands.property_set(Property.CSTS, 0),
    ],
)
def test_other_properties_are_refused(controller, sqe):
    assert ask(controller, sqe).status == StatusCode.INVALID_FIELD | DNR


@pytest.mark.parametrize("cc", [1, ENABLE | 1 << 7, ENABLE | 1 << 4, 7 << 16 | 4 << 20 | 1])
def test_a_configuration_that_cannot_be_is_fatal(target, cc):
    controller, _ = admin(target, enable=False)
    ask(controller, commands.property_set(Property.CC, cc))
    assert value(controller, Property.CSTS) == 2
    ask(controller, commands.property_set(Property.CC, 0))
    ask(controller, commands.property_set(Property.CC, ENABLE))
    assert controller.ready


def test_shutdown_is_complete_at_once_and_ends_service(controller):
    ask(controller, commands.property_set(Property.CC, ENABLE | 1 << 14))
    assert value(controller, Property.CSTS) >> 2 & 3 == 2
    assert controller.shut_down
    assert ask(controller, commands.keep_alive()).status == StatusCode.SEQUENCE_ERROR | DNR


def test_commands_wait_for_the_controller(target):
    controller, _ = admin(target, enable=False)
    assert ask(controller, commands.identify(1), 4096).status == StatusCode.SEQUENCE_ERROR | DNR


# -- Identify


def identify(controller, cns, nsid=0, nbytes=4096):
    return ask(controller, commands.identify(cns, nsid), nbytes)


def test_identify_controller(controller):
    info = parse_controller(identify(controller, 1).data)
    assert info.subnqn == NQN
    assert info.cntlid == controller.cntlid
    assert (info.max_transfer, info.in_capsule) == (1 << 20, 8192)
    assert (info.namespaces, info.max_commands, info.firmware) == (3, 64, "9.8.7")
    assert info.keep_alive == 10
    assert info.cache_epoch == b"e" * 16
    assert len(info.serial) == 20


def test_what_linux_insists_on(controller):
    data = identify(controller, 1).data
    assert unpack_from("<I", data, 536)[0] & 3
    assert unpack_from("<H", data, 320)[0] > 0
    assert unpack_from("<I", data, 1792)[0] >= 4
    assert (data[512], data[513], data[111]) == (0x66, 0x44, 1)


def test_identify_namespaces(controller):
    assert parse_active_list(identify(controller, 2).data) == [1, 3]
    assert parse_active_list(identify(controller, 2, 1).data) == [3]
    assert parse_active_list(identify(controller, 2, 3).data) == []
    plain, small = (parse_namespace(identify(controller, 0, n).data) for n in (1, 3))
    assert (plain.blocks, plain.block_bytes, plain.read_only) == (256, 4096, False)
    assert (small.blocks, small.block_bytes, small.read_only) == (1024, 512, True)
    assert plain.guid != small.guid
    descriptors = identify(controller, 3, 1).data
    assert descriptors[:4] == bytes((2, 16, 0, 0))
    assert descriptors[4:20] == plain.guid


def test_identities_outlive_the_target(controller):
    again = admin(make_target())[0]
    for cns, nsid in ((0, 1), (3, 3)):
        assert identify(controller, cns, nsid).data == identify(again, cns, nsid).data


@pytest.mark.parametrize(
    ("cns", "nsid", "status"),
    [
        (0, 2, StatusCode.INVALID_NAMESPACE),
        (0, 4, StatusCode.INVALID_NAMESPACE),
        (0, 0xFFFFFFFF, StatusCode.INVALID_NAMESPACE),
        (3, 2, StatusCode.INVALID_NAMESPACE),
        (2, 0xFFFFFFFE, StatusCode.INVALID_NAMESPACE),
        (6, 0, StatusCode.INVALID_FIELD),  # Linux asks, and lives with this
        (0x1C, 0, StatusCode.INVALID_FIELD),
    ],
)
def test_identify_refuses(controller, cns, nsid, status):
    assert identify(controller, cns, nsid).status == status | DNR


def test_data_of_another_length_is_refused(controller):
    assert identify(controller, 1, nbytes=512).status == StatusCode.SGL_LENGTH_INVALID | DNR


def test_data_in_the_capsule_is_refused_for_what_is_read(controller):
    sqe = commands.identify(1)
    commands.set_sgl(sqe, 1, 4096, Sgl.IN_CAPSULE)
    assert controller.execute(Command(bytes(sqe)), 0.0).status == StatusCode.SGL_TYPE_INVALID | DNR


def test_discovery_identifies_itself_only(target):
    controller, _ = admin(target, subnqn=DISCOVERY_NQN)
    info = parse_controller(identify(controller, 1).data)
    assert (info.discovery, info.subnqn) == (True, DISCOVERY_NQN)
    assert identify(controller, 2).status == StatusCode.INVALID_FIELD | DNR
    assert ask(controller, commands.keep_alive()).status == 0
    assert ask(controller, commands.async_event()) is None


# -- logs


def log(controller, page, nbytes, offset=0):
    return ask(controller, commands.get_log(page, nbytes, offset), nbytes)


def test_the_discovery_log(target):
    controller, _ = admin(target, subnqn=DISCOVERY_NQN)
    whole = log(controller, LogPage.DISCOVERY, 2048).data
    assert parse_discovery_log(whole) == (1, [ENTRY])
    assert log(controller, LogPage.DISCOVERY, 1024, 1024).data == whole[1024:]
    assert log(controller, LogPage.HEALTH, 512).status == StatusCode.INVALID_LOG_PAGE | DNR
    assert log(controller, LogPage.SUPPORTED, 1024).data[4 * 0x70] == 1


def test_a_log_ends_in_zeroes_and_has_an_end(controller):
    assert log(controller, LogPage.HEALTH, 512, 508).data == bytes(512)
    for offset, nbytes in ((516, 4), (2, 4), (1 << 40, 4), (0, 2 << 20)):
        reply = log(controller, LogPage.HEALTH, nbytes, offset)
        assert reply.status == StatusCode.INVALID_FIELD | DNR
        assert reply.data == b""


def test_supported_pages_are_those_that_are_there(controller):
    supported = log(controller, LogPage.SUPPORTED, 1024).data
    pages = [page for page in range(256) if supported[4 * page] & 1]
    assert pages == [0, 1, 2, 3, 4, 5]
    for page in range(256):
        status = log(controller, page, 64).status
        assert status == (0 if page in pages else StatusCode.INVALID_LOG_PAGE | DNR), page


def test_the_health_log_counts(target):
    controller, _ = admin(target)
    io = Link()
    target.connect(want(1, cntlid=controller.cntlid), io, 0.0)
    io.counters.count(False, Opcode.READ, 0, 0.1)
    io.counters.count(False, Opcode.WRITE, StatusCode.WRITE_FAULT, 0.1)
    io.counters.bytes_read += 512_001
    for _ in range(2):  # also when the queue is gone
        data = log(controller, LogPage.HEALTH, 512).data
        found = [int.from_bytes(data[at : at + 16], "little") for at in (32, 48, 64, 80, 160)]
        assert found == [2, 0, 1, 1, 1]
        target.leave(io)


def test_the_error_log_has_the_last_first(controller):
    ask(controller, commands.get_features(0x55), cid=11)
    identify(controller, 0, 9)
    data = log(controller, LogPage.ERRORS, 192).data
    first, second, none = (data[at : at + 64] for at in (0, 64, 128))
    assert unpack_from("<QHHH", first) == (2, 0, 7, (StatusCode.INVALID_NAMESPACE | DNR) << 1)
    assert unpack_from("<I", first, 24) == (9,)
    assert unpack_from("<QHHH", second) == (1, 0, 11, (StatusCode.INVALID_FIELD | DNR) << 1)
    assert none == bytes(64)


def test_firmware_changed_namespaces_and_effects(controller):
    firmware = log(controller, LogPage.FIRMWARE, 512).data
    assert firmware[0] & 7 == 1
    assert firmware[8:16].rstrip() == b"9.8.7"
    assert log(controller, LogPage.CHANGED_NAMESPACES, 4096).data == bytes(4096)
    effects = log(controller, LogPage.EFFECTS, 4096).data
    assert unpack_from("<I", effects, 4 * Admin.IDENTIFY) == (1,)
    assert unpack_from("<I", effects, 1024 + 4 * Opcode.WRITE) == (3,)
    assert unpack_from("<I", effects, 1024 + 4 * Opcode.DATASET_MANAGEMENT) == (0,)


# -- features


def set_feature(controller, feature, value):
    reply = ask(controller, commands.set_features(feature, value))
    return reply.status, reply.result


def get_feature(controller, feature, select=0, dword11=0, reads=0):
    return ask(
        controller, commands.build(Admin.GET_FEATURES, 0, feature | select << 8, dword11), reads
    )


@pytest.mark.parametrize(
    ("asked", "granted"), [((1, 1), 1), ((4, 4), 4), ((100, 100), 4), ((2, 3), 3)]
)
def test_queues_are_granted_up_to_the_limit(controller, asked, granted):
    word = (asked[0] - 1) | (asked[1] - 1) << 16
    assert set_feature(controller, Feature.QUEUES, word) == (0, (granted - 1) * 0x10001)
    assert controller.granted == granted


def test_queues_cannot_be_asked_for_late_or_wrongly(target):
    controller, _ = admin(target)
    bad = set_feature(controller, Feature.QUEUES, 0xFFFF)
    assert bad == (StatusCode.INVALID_FIELD | DNR, 0)
    target.connect(want(1, cntlid=controller.cntlid), Link(), 0.0)
    late = set_feature(controller, Feature.QUEUES, 0)
    assert late == (StatusCode.SEQUENCE_ERROR | DNR, 0)


def test_keep_alive_is_rounded_up_and_read_back(controller):
    assert set_feature(controller, Feature.KEEP_ALIVE, 1500) == (0, 2000)
    assert get_feature(controller, Feature.KEEP_ALIVE).result == 2000
    assert get_feature(controller, Feature.KEEP_ALIVE, select=1).result == 0


def test_the_write_cache_can_be_turned_off(controller):
    assert get_feature(controller, Feature.WRITE_CACHE).result == 1
    assert not controller.write_through
    assert set_feature(controller, Feature.WRITE_CACHE, 0) == (0, 0)
    assert controller.write_through
    assert get_feature(controller, Feature.WRITE_CACHE).result == 0


def test_the_host_id_comes_from_connect(controller):
    reply = get_feature(controller, Feature.HOST_ID, dword11=1, reads=16)
    assert reply.data == b"h" * 16
    assert get_feature(controller, Feature.HOST_ID).status == StatusCode.INVALID_FIELD | DNR
    refused = set_feature(controller, Feature.HOST_ID, 1)
    assert refused == (StatusCode.SEQUENCE_ERROR | DNR, 0)


@pytest.mark.parametrize(
    "feature", [Feature.ASYNC_EVENTS, Feature.TEMPERATURE, Feature.ARBITRATION]
)
def test_other_features_are_kept(controller, feature):
    default = get_feature(controller, feature).result
    assert set_feature(controller, feature, 0x100) == (0, 0)
    assert get_feature(controller, feature).result == 0x100
    assert get_feature(controller, feature, select=1).result == default
    assert get_feature(controller, feature, select=2).result == default
    assert get_feature(controller, feature, select=3).result == 4


def test_features_that_are_not_there(controller):
    invalid = StatusCode.INVALID_FIELD | DNR
    assert set_feature(controller, 0x84, 0) == (invalid, 0)
    assert set_feature(controller, Feature.POWER, 3) == (invalid, 0)
    assert get_feature(controller, 0x84).status == invalid
    assert get_feature(controller, Feature.POWER, select=4).status == invalid
    save = set_feature(controller, Feature.POWER | 1 << 31, 0)
    assert save == (StatusCode.FEATURE_NOT_SAVEABLE | DNR, 0)


# -- events, abort, the rest


def test_four_event_requests_stay_out(controller):
    for cid in range(4):
        assert ask(controller, commands.async_event(), cid=cid) is None
    reply = ask(controller, commands.async_event(), cid=4)
    assert reply.status == StatusCode.ASYNC_EVENT_LIMIT | DNR


def test_abort_ends_an_event_request_and_nothing_else(controller):
    ask(controller, commands.async_event(), cid=3)
    assert ask(controller, commands.abort(0, 3)).result & 1 == 0
    ((cid, reply),) = controller.take_ended()
    assert (cid, reply.status) == (3, StatusCode.ABORTED)
    assert controller.take_ended() == []
    assert ask(controller, commands.abort(0, 3)).result & 1 == 1
    assert ask(controller, commands.abort(1, 3)).result & 1 == 1


def test_a_reset_forgets_event_requests(controller):
    for cid in range(4):
        ask(controller, commands.async_event(), cid=cid)
    ask(controller, commands.property_set(Property.CC, 0))
    assert not controller.ready
    ask(controller, commands.property_set(Property.CC, ENABLE))
    assert ask(controller, commands.async_event(), cid=5) is None


@pytest.mark.parametrize("opcode", [0x00, 0x01, 0x04, 0x10, 0x80, 0xC0])
def test_unknown_commands_are_refused(controller, opcode):
    reply = ask(controller, commands.build(opcode))
    assert reply.status == StatusCode.INVALID_OPCODE | DNR


def test_commands_without_sgls_and_fused_ones_are_refused(controller):
    for flags in (0x00, 0x80, 0x41):
        sqe = commands.keep_alive()
        sqe[1] = flags
        assert ask(controller, sqe).status == StatusCode.INVALID_FIELD | DNR
