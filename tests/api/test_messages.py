"""Frames between server and solver process."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from optpipe_api.engine.messages import FrameBuffer, Message, encode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = st.builds(
    Message,
    st.sampled_from(["job", "progress", "result"]),
    st.dictionaries(st.sampled_from(["seconds", "method"]), st.text() | st.none() | st.integers()),
    TEXTS,
    TEXTS,
)


@given(st.lists(MESSAGES, max_size=4), st.integers(1, 40))
def test_messages_survive_being_cut_into_any_pieces(sent: list[Message], size: int) -> None:
    data = b"".join(map(encode, sent))
    buffer = FrameBuffer()
    received = [
        message
        for begin in range(0, len(data), size)
        for message in buffer.feed(data[begin : begin + size])
    ]
    assert received == sent
