"""Frames: what goes in comes out, and nothing that comes in does harm."""

import contextlib
import math
import random
import struct
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.protocol import messages as m
from cluster.protocol.codec import MAX_FRAME_BYTES, Malformed, decode, encode, encode_malformed
from cluster.protocol.errors import ProtocolError
from cluster.protocol.messages import Epoch, Message, as_tokens

# --- any message ---------------------------------------------------------------------------------------------------

lengths = st.integers(0, 2**31 - 1)
wide = st.integers(0, 2**63 - 1)
epochs = st.builds(Epoch, wide, wide)
names = st.text(min_size=1, max_size=20)
texts = st.text(max_size=50)
durations = st.floats(0, 1e9)
unit = st.floats(0, 1, width=32)
tokens = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20).map(as_tokens)
some_tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20).map(as_tokens)
laws: st.SearchStrategy[m.Law] = st.sampled_from(["point", "sparse"])
finish = st.sampled_from([None, "stop", "length", "preempted", "error"])
samplings = st.builds(
    m.SamplingParams,
    max_tokens=lengths,
    temperature=st.floats(0, 100),
    top_k=lengths,
    top_p=st.floats(0, 1),
    stop_token_ids=st.lists(lengths, max_size=3).map(tuple),
    rule=st.sampled_from(["coupled", "ratio"]),
    key=st.integers(0, 2**64 - 1),
    choice=lengths,
    min_p=unit,
    repetition_penalty=st.floats(0, 2),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    logit_bias=st.lists(st.tuples(lengths, st.floats(-100, 100)), max_size=3).map(tuple),
    bad_words=st.lists(st.lists(lengths, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed_token_ids=st.lists(lengths, max_size=3).map(tuple),
    min_tokens=lengths,
    logprobs=st.none() | lengths,
    prompt_logprobs=st.none() | lengths,
)
speculations = st.builds(m.Speculation, st.booleans(), st.none() | lengths, texts)
stats = st.builds(m.RoundStats, lengths, lengths, durations, durations, durations)
loads = st.lists(st.tuples(lengths, durations), max_size=4).map(tuple)


def logs(size: int) -> st.SearchStrategy[m.Logs]:
    return st.lists(st.floats(-1e9, 0, width=32), min_size=size, max_size=size).map(lambda v: np.array(v, np.float32))


@st.composite
def logprobs(draw: st.DrawFn, count: int | None = None) -> m.TokenLogprobs | None:
    if draw(st.booleans()):
        return None
    n, k = draw(st.integers(0, 4)) if count is None else count, draw(st.integers(0, 3))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=n * k, max_size=n * k))
    return m.TokenLogprobs(draw(logs(n)), as_tokens(ids), draw(logs(n * k)))


@st.composite
def supports(draw: st.DrawFn, depth: int) -> m.DraftSupport | None:
    if draw(st.booleans()):
        return None
    sizes = draw(st.lists(st.integers(0, 4), min_size=depth, max_size=depth))
    total = sum(sizes)
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=total, max_size=total))
    counts = draw(st.lists(st.integers(0, 2**16 - 1), min_size=total, max_size=total))
    return m.DraftSupport(as_tokens(ids), as_tokens(np.cumsum([0, *sizes])), np.array(counts, dtype=np.uint16))


@st.composite
def verify_requests(draw: st.DrawFn) -> m.VerifyRequest:
    ids = draw(tokens)
    support = draw(supports(len(ids)))
    return m.VerifyRequest(draw(names), draw(epochs), draw(wide), draw(lengths), ids, draw(laws), support)


@st.composite
def draft_blocks(draw: st.DrawFn) -> m.DraftBlock:
    ids = draw(tokens)
    size = draw(st.sampled_from([0, len(ids)]))
    confidence = np.array(draw(st.lists(unit, min_size=size, max_size=size)), dtype=np.float32)
    support = draw(supports(len(ids)))
    return m.DraftBlock(draw(names), draw(epochs), draw(wide), draw(lengths), ids, confidence, draw(laws), support)


@st.composite
def with_prompt(draw: st.DrawFn, kind: type[m.Generate] | type[m.OpenSession]) -> m.Generate | m.OpenSession:
    ids = draw(some_tokens)
    prompt_len = draw(st.integers(1, len(ids)))
    if kind is m.Generate:
        return m.Generate(draw(names), draw(wide), ids, prompt_len, draw(samplings), draw(speculations))
    return m.OpenSession(draw(names), draw(epochs), ids, prompt_len, draw(samplings), draw(texts))


@st.composite
def committed(draw: st.DrawFn) -> m.Committed:
    ids = draw(tokens)
    burst = m.Committed(draw(names), draw(wide), draw(lengths), ids, draw(finish), draw(st.none() | stats), draw(texts))
    return replace(burst, logprobs=draw(logprobs(len(ids))), prompt_logprobs=draw(logprobs()))


@st.composite
def draft_requests(draw: st.DrawFn) -> m.DraftRequest:
    new = draw(tokens)
    base_len = draw(st.integers(len(new), 2**31 - 1))
    ends = draw(lengths), draw(st.none() | samplings)
    return m.DraftRequest(draw(names), draw(epochs), draw(wide), base_len, draw(lengths), new, *ends, draw(texts))


@st.composite
def feature_rows(draw: st.DrawFn) -> m.FeatureRows:
    rows, width = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    head = draw(names), draw(epochs), draw(texts), draw(lengths)
    return m.FeatureRows(*head, width, draw(logs(rows * width)), draw(lengths))


any_message: st.SearchStrategy[Message] = st.one_of(
    with_prompt(m.Generate),
    with_prompt(m.OpenSession),
    draft_requests(),
    draft_blocks(),
    committed(),
    verify_requests(),
    st.builds(
        m.VerifyResult,
        names, epochs, wide, lengths, lengths, st.integers(-1, 2**31 - 1), finish, texts, durations, lengths,
        logprobs(), logprobs(),
    ),
    st.builds(m.FeatureRequest, names, epochs, texts, lengths),
    feature_rows(),
    st.builds(m.Close, names, epochs, st.integers(-1, 2**31 - 1)),
    st.builds(m.Stale, names, wide, epochs, lengths),
    st.builds(
        m.Refused, names, epochs, st.sampled_from(["overloaded", "invalid", "unavailable"]), texts, durations
    ),
    st.builds(m.LoadReport, names, lengths, lengths, lengths, lengths, st.floats(0, 1), loads, wide, wide, wide, wide),
)  # fmt: skip


def plain(value: Any) -> Any:
    """`value` with arrays as (dtype, list), so that == compares everything."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), [plain(getattr(value, field.name)) for field in fields(value)]
    return value


# --- round trip ----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(any_message, max_size=6))
def test_a_batch_comes_out_as_it_went_in_with_the_same_types(batch: list[Message]) -> None:
    assert plain_all(decode(encode(batch))) == plain_all(batch)


def plain_all(batch: list[Any]) -> list[Any]:
    return [plain(message) for message in batch]


def test_every_kind_of_message_has_its_place_in_the_frame() -> None:
    drawn: set[type] = set()

    @settings(deadline=None, max_examples=500, database=None, derandomize=True)
    @given(any_message)
    def draw(message: Message) -> None:
        (back,) = decode(encode([message]))
        drawn.add(type(back))

    draw()
    assert drawn == set(get_args(Message))


def test_decoded_arrays_are_aligned_read_only_views_of_the_frame() -> None:
    odd = replace(block([0.5] * 3), law="sparse", support=support_of([1, 1, 1]))
    frame = encode([m.Close("odd", Epoch(0, 0), 1), request(3), odd, request(5)])
    for message in decode(frame):
        if isinstance(message, m.VerifyRequest | m.DraftBlock):
            assert message.token_ids.flags.aligned
            assert not message.token_ids.flags.writeable
            assert not message.token_ids.flags.owndata


def test_numbers_are_little_endian_on_the_wire_whatever_the_memory_layout() -> None:
    backwards = np.array([1, 256, -2], dtype=np.int32)[::-1]
    frame = encode([replace(request(0), token_ids=backwards)])
    assert frame.endswith(struct.pack("<3i", -2, 256, 1))


def test_the_bytes_of_a_batch_of_short_blocks_stay_few() -> None:
    """A round's messages must fit a packet: 16 sessions at depth 8."""
    assert len(encode([replace(request(8), session_id=f"session-{i:08d}") for i in range(16)])) < 16 * 75


# --- what a sender does wrong --------------------------------------------------------------------------------------


def request(count: int) -> m.VerifyRequest:
    return m.VerifyRequest("s", Epoch(1, 2), 3, 4, as_tokens(range(count)))


def block(confidence: list[float]) -> m.DraftBlock:
    return m.DraftBlock("s", Epoch(1, 2), 3, 4, as_tokens(range(3)), np.array(confidence, dtype=np.float32))


def support_of(sizes: list[int]) -> m.DraftSupport:
    total = sum(sizes)
    counts = np.full(total, 2**16 - 1, dtype=np.uint16)
    return m.DraftSupport(as_tokens(range(total)), as_tokens(np.cumsum([0, *sizes])), counts)


def logprobs_of(tokens: int, best: int) -> m.TokenLogprobs:
    return m.TokenLogprobs(np.zeros(tokens, np.float32), as_tokens(range(best)), np.zeros(best, np.float32))


@pytest.mark.parametrize("wrong", [np.arange(3), np.zeros((2, 2), dtype=np.int32), np.zeros(2, np.float32), [1, 2]])
def test_an_array_of_another_type_or_shape_is_refused_at_the_sender(wrong: Any) -> None:
    with pytest.raises(TypeError, match="one-dimensional int32"):
        encode([replace(request(0), token_ids=wrong)])


def test_a_batch_above_the_limit_is_refused_at_the_sender_with_both_figures() -> None:
    too_many = np.zeros(MAX_FRAME_BYTES // 4, dtype=np.int32)
    with pytest.raises(ProtocolError, match=rf"67108\d+ bytes, the limit is {MAX_FRAME_BYTES}"):
        encode([replace(request(0), token_ids=too_many)])


SAMPLING = m.SamplingParams(4)
BAD: list[tuple[Any, str]] = [
    (block([0.5, math.nan, 0.5]), "confidences in"),
    (block([0.5, 1.5, 0.5]), "confidences in"),
    (block([0.5]), "3 draft tokens came with 1"),
    (replace(block([]), support=support_of([1, 1])), "3 draft tokens came with a support of 3 starts"),
    (replace(request(2), support=support_of([1, 1, 1])), "2 draft tokens came with a support of 4 starts"),
    (replace(request(1), support=replace(support_of([2]), ids=as_tokens([5]))), "1 ids, 2 counts"),
    (replace(request(1), support=replace(support_of([2]), starts=as_tokens([0, 1]))), "rise from 0 to 2"),
    (replace(request(2), support=replace(support_of([2, 1]), starts=as_tokens([0, 4, 3]))), "rise from 0 to 3"),
    (replace(request(2), support=replace(support_of([2, 1]), starts=as_tokens([1, 2, 3]))), "rise from 0 to 3"),
    (replace(request(0), support=m.DraftSupport(as_tokens(), as_tokens(), np.empty(0, np.uint16))), "0 starts"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 2, SAMPLING), "prompt_len in 1..1, got 2"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens(), 0, SAMPLING), "prompt_len"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, temperature=math.nan)), "float"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, temperature=math.inf)), "float"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, max_tokens=-1)), ">= 0"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, rule="lucky")), "lucky"),  # type: ignore[arg-type]
    (m.DraftRequest("s", Epoch(1, 2), 3, 2, 1, as_tokens(range(3)), 4, SAMPLING), "3 new tokens"),
    (m.FeatureRows("s", Epoch(1, 2), "f", 3, 2, np.zeros(5, np.float32)), "5 values do not make rows of 2"),
    (m.FeatureRows("s", Epoch(1, 2), "f", 3, 0, np.zeros(0, np.float32)), "0 values do not make rows of 0"),
    (m.FeatureRequest("s", Epoch(1, 2), "f", -1), ">= 0"),
    (replace(request(1), base_len=-1), ">= 0"),
    (replace(request(1), base_len=2**31), "<= 2147483647"),
    (replace(request(1), base_len=2**63), "int"),
    (replace(request(1), block_id="3"), "Expected `int`, got `str`"),  # type: ignore[arg-type]
    (replace(request(1), law="vague"), "vague"),  # type: ignore[arg-type]
    (m.Close("s", Epoch(1, 2), -2), ">= -1"),
    (m.VerifyResult("s", Epoch(1, 2), 3, 4, 0, -2), ">= -1"),
    (m.VerifyResult("s", Epoch(1, 2), 3, 4, 0, 1, error="x" * 70_000), "length <= 65536"),
    (
        m.VerifyResult("s", Epoch(1, 2), 3, 4, 0, 1, logprobs=logprobs_of(2, 3)),
        "2 tokens came with 3 best ids, 3 values",
    ),
    (m.VerifyResult("s", Epoch(1, 2), 3, 4, 0, 1, logprobs=logprobs_of(0, 1)), "0 tokens came with 1 best ids"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, presence_penalty=math.nan)), "float"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, min_p=-0.1)), ">= 0"),
    (m.OpenSession("s", Epoch(1, 2), as_tokens([1]), 1, replace(SAMPLING, logit_bias=((-1, 1.0),))), ">= 0"),
]


@pytest.mark.parametrize(("bad", "reason"), BAD)
def test_a_malformed_message_says_why_names_its_session_and_spares_its_batch(bad: Any, reason: str) -> None:
    first, middle, last = decode(encode([request(2), bad, request(3)]))
    assert isinstance(middle, Malformed)
    assert (middle.kind, middle.session_id, middle.epoch) == (type(bad), "s", Epoch(1, 2))
    assert reason in middle.reason
    assert plain_all([first, last]) == plain_all([request(2), request(3)])


def test_a_burst_brings_a_log_probability_for_each_of_its_tokens() -> None:
    (bad,) = decode(encode([m.Committed("s", 1, 4, as_tokens([1, 2]), logprobs=logprobs_of(1, 2))]))
    assert isinstance(bad, Malformed)
    assert "2 tokens came with 1 log-probabilities" in bad.reason


def test_a_reason_quotes_only_the_beginning_of_what_came() -> None:
    (bad,) = decode(encode([replace(request(1), law="x" * 10**6)]))  # type: ignore[arg-type]
    assert isinstance(bad, Malformed)
    assert len(bad.reason) <= 500


def test_a_message_without_a_session_id_is_malformed_and_nameless() -> None:
    (bad,) = decode(encode([replace(request(1), session_id="")]))
    assert isinstance(bad, Malformed)
    assert bad.session_id == ""


@settings(deadline=None)
@given(any_message)
def test_a_message_cut_short_keeps_its_session_and_epoch(message: Message) -> None:
    (bad,) = decode(encode_malformed(message))
    assert isinstance(bad, Malformed)
    match message:
        case m.LoadReport():
            named = "", Epoch(0, 0)
        case m.Generate() | m.Committed():
            named = message.session_id, Epoch(message.incarnation, 0)
        case m.Stale():
            named = message.session_id, Epoch(0, 0)
        case _:
            named = message.session_id, message.epoch
    assert (bad.kind, bad.session_id, bad.epoch) == (type(message), *named)


# --- what the network brings ---------------------------------------------------------------------------------------


def frame_of(head: Any, arrays: bytes = b"", version: int = m.PROTOCOL_VERSION) -> bytes:
    packed = msgspec.msgpack.encode(head)
    header = struct.pack("<4sHHII", b"OUTR", version, 0, len(packed), len(arrays))
    return header + packed + bytes(-len(packed) % 8) + arrays


CLOSE = msgspec.msgpack.encode(["s", [1, 2], 3])


def verify_body(count: int) -> bytes:
    return msgspec.msgpack.encode(["s", [1, 2], 3, 4, count, "point", None])


def test_the_hand_made_frame_of_these_tests_is_a_good_one() -> None:
    assert decode(frame_of([[8, 0, CLOSE]])) == [m.Close("s", Epoch(1, 2), 3)]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "0 bytes, a header takes 16"),
        (b"OUTR", "4 bytes"),
        (b"HTTP" + frame_of([])[4:], "magic"),
        (frame_of([], version=9), f"expected protocol version {m.PROTOCOL_VERSION}, got 9"),
        (frame_of([])[:-1], "the frame has"),
        (frame_of([]) + b"\0", "the frame has"),
        (frame_of([])[:-1] + b"\1", "padding"),
        (frame_of({}), "unreadable"),
        (frame_of([[8, 0]]), "unreadable"),
        (frame_of([[8, -4, CLOSE]]), "unreadable"),
        (frame_of([[8, 0, "text"]]), "unreadable"),
        (frame_of([[8, 4, CLOSE]]), "claim 4 bytes of arrays, the frame has 0"),
        (frame_of([[8, 0, CLOSE]], arrays=b"1234"), "claim 0 bytes of arrays, the frame has 4"),
        (bytes(MAX_FRAME_BYTES + 1), "the limit is"),
    ],
)
def test_a_damaged_frame_is_refused_with_expected_and_got(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(frame)


@pytest.mark.parametrize(
    ("entry", "arrays", "reason"),
    [
        ([99, 0, CLOSE], b"", "tag"),
        ([8, 0, msgspec.msgpack.encode(["s", [1, 2], 3, 4])], b"", "length 3, got 4"),
        ([8, 0, CLOSE + b"\1"], b"", "trailing"),
        ([8, 0, b""], b"", "truncated"),
        ([8, 0, b"\x91" * 100_000], b"", "Expected"),
        ([8, 4, CLOSE], b"1234", "take 0 bytes, the message has 4"),
        ([6, 4, verify_body(2)], b"1234", "take 8 bytes, the message has 4"),
        ([6, 4, verify_body(2**31 - 1)], b"1234", "the message has 4"),
        ([6, 4, verify_body(-1)], b"1234", ">= 0"),
    ],
)
def test_a_damaged_body_harms_only_its_message(entry: list[Any], arrays: bytes, reason: str) -> None:
    bad, good = decode(frame_of([entry, [8, 0, CLOSE]], arrays=arrays))
    assert isinstance(bad, Malformed)
    assert reason in bad.reason
    assert good == m.Close("s", Epoch(1, 2), 3)


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_protocol_error(noise: bytes) -> None:
    for frame in (noise, frame_of([])[:8] + noise, frame_of([[8, 0, noise]])):
        with contextlib.suppress(ProtocolError):
            assert all(isinstance(item, Malformed) for item in decode(frame))


def test_flipped_bits_raise_nothing_but_a_protocol_error() -> None:
    rng = random.Random(1)
    sampling = m.SamplingParams(4, 0.7, 3, 0.9, (1, 2), key=2**64 - 1)
    frame = encode([m.Generate("s", 1, as_tokens([1, 2]), 1, sampling), block([0.1] * 3), request(4)])
    outcomes = {"refused": 0, "malformed": 0, "read": 0}
    for _ in range(3000):
        damaged = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        try:
            items = decode(bytes(damaged))
            outcomes["malformed" if any(isinstance(item, Malformed) for item in items) else "read"] += 1
        except ProtocolError:
            outcomes["refused"] += 1
    assert all(outcomes.values()), outcomes
