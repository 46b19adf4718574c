import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats import rsp
from tests.build.stub import packet


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_a_framed_payload_comes_back_whatever_follows(payload: bytes, after: bytes) -> None:
    framed = rsp.frame(payload)

    assert rsp.next_packet(framed + after) == (payload, True, len(framed))


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_packets_and_acks_in_one_stream_come_back_in_order(payloads: list[bytes]) -> None:
    stream = b"".join(b"+" + rsp.frame(payload) for payload in payloads) + b"+"
    found: list[bytes] = []

    while (packet := rsp.next_packet(stream)) is not None:
        found.append(packet.payload)
        stream = stream[packet.end :]

    assert found == payloads


@given(st.binary(max_size=60), st.data())
def test_a_packet_cut_anywhere_is_not_complete(payload: bytes, data: st.DataObject) -> None:
    framed = rsp.frame(payload)
    cut = data.draw(st.integers(0, len(framed) - 1))

    assert rsp.next_packet(framed[:cut]) is None


@pytest.mark.parametrize(
    ("stream", "payload"),
    [
        (b"$OK#9a", b"OK"),
        (b"$OK#9A", b"OK"),
        (b"++$#00", b""),
        (b"$0* #7a", b"0000"),
        (b"$a}\x03*\x22b#8f", b"a" + b"#" * 6 + b"b"),
    ],
)
def test_the_manuals_encodings_are_read(stream: bytes, payload: bytes) -> None:
    assert rsp.next_packet(stream) == (payload, True, len(stream))


def test_a_wrong_checksum_is_seen() -> None:
    packet = rsp.next_packet(b"$OK#9b$OK#9a")

    assert packet is not None
    assert (packet.is_intact, packet.end) == (False, 6)


@pytest.mark.parametrize(
    "stream",
    [
        b"SSH-2.0-OpenSSH",
        b"+HTTP",
        b"$}#7d",
        b"$* #4a",
        b"$a*\x1d#a8",
        b"$" + b"a" * (rsp.MAX_PACKET + 1),
        b"+" * (rsp.MAX_PACKET + 1),
        rsp.frame(b"").join([b"x"] * 2),
    ],
)
def test_what_is_no_packet_is_refused(stream: bytes) -> None:
    with pytest.raises(FormatError):
        rsp.next_packet(stream)


def test_runs_cannot_blow_a_packet_up() -> None:
    raw = b"a" + b"*~" * 20_000

    with pytest.raises(FormatError, match="decodes to more"):
        rsp.next_packet(b"$" + raw + b"#%02x" % (sum(raw) & 0xFF))


@given(st.binary(max_size=60))
def test_any_bytes_make_a_packet_nothing_or_a_format_error(stream: bytes) -> None:
    try:
        packet = rsp.next_packet(b"$" + stream)
    except FormatError:
        return

    assert packet is None or packet.end <= len(stream) + 1


@pytest.mark.parametrize(
    ("payload", "signal", "cpu"),
    [
        (b"T02thread:01;", 2, 1),
        (b"T05thread:p01.0a;", 5, 10),
        (b"S05", 5, None),
    ],
)
def test_stop_replies_tell_signal_and_vcpu(payload: bytes, signal: int, cpu: int | None) -> None:
    assert rsp.is_stop(payload)
    assert rsp.parse_stop(payload) == rsp.StopReply(signal=signal, cpu=cpu)


@pytest.mark.parametrize("kind", [b"watch", b"rwatch", b"awatch"])
def test_stop_replies_tell_what_was_touched_that_is_watched(kind: bytes) -> None:
    found = rsp.parse_stop(b"T05" + kind + b":ffff;thread:02;")
    assert found == rsp.StopReply(signal=5, cpu=2, watched=kind + b":ffff")


def test_a_clients_requests_and_its_interrupts_are_told_apart() -> None:
    stream = b"+" + packet(b"m1,2") + b"+\x03" + packet(b"?")
    found = list[bytes]()
    while (request := rsp.next_request(stream)) is not None:
        found.append(request.payload)
        stream = stream[request.end :]
    assert found == [b"m1,2", rsp.INTERRUPT, b"?"]


@pytest.mark.parametrize("payload", [b"", b"OK", b"T", b"T0", b"TEXT", b"W00"])
def test_other_packets_are_no_stop_replies(payload: bytes) -> None:
    assert not rsp.is_stop(payload)
    with pytest.raises(FormatError):
        rsp.parse_stop(payload)


@pytest.mark.parametrize(
    ("payload", "ids"),
    [(b"m01,02", (1, 2)), (b"mp01.01,p01.0f", (1, 15)), (b"l", ())],
)
def test_thread_lists_are_read_in_both_forms(payload: bytes, ids: tuple[int, ...]) -> None:
    assert rsp.parse_thread_list(payload) == ids


@pytest.mark.parametrize("payload", [b"", b"m", b"mxyz", b"m" + b"1" * 9, b"E22"])
def test_what_is_no_thread_list_is_refused(payload: bytes) -> None:
    with pytest.raises(FormatError):
        rsp.parse_thread_list(payload)


@pytest.mark.parametrize(
    ("payload", "error", "ended", "output"),
    [
        (b"E14", True, False, False),
        (b"E.no such thing", True, False, False),
        (b"e1", False, False, False),
        (b"W00", False, True, False),
        (b"OK", False, False, False),
        (b"O6f6b", False, False, True),
    ],
)
def test_answers_are_told_apart(payload: bytes, error: bool, ended: bool, output: bool) -> None:
    found = rsp.is_error(payload), rsp.is_exit(payload), rsp.is_output(payload)

    assert found == (error, ended, output)


def test_features_have_values_and_signs() -> None:
    features = rsp.parse_supported(b"PacketSize=1000;qXfer:features:read+;multiprocess-;")

    assert features == {
        "PacketSize": "1000",
        "qXfer:features:read": "+",
        "multiprocess": "-",
    }
    assert rsp.packet_size(features) == 4096


@pytest.mark.parametrize("text", ["", "0", "3f", "-1", "zz", "1" * 9])
def test_a_senseless_packet_size_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        rsp.packet_size({"PacketSize": text})


def test_console_text_is_put_together_from_its_packets() -> None:
    assert rsp.console_text([b"O6f6b", b"O0a"]) == "ok\n"


@pytest.mark.parametrize("digits", [b"0", b"zz", b"0 1 "])
def test_what_is_not_hex_is_refused(digits: bytes) -> None:
    with pytest.raises(FormatError):
        rsp.from_hex(digits)
