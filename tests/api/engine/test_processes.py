"""Messages between server and solver process."""

from hypothesis import given
from hypothesis import strategies as st

from optpipe_api.engine.processes import Message, decode, encode

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = st.builds(
    Message,
    st.sampled_from(["job", "progress", "result"]),
    st.dictionaries(st.sampled_from(["seconds", "method"]), st.text() | st.none() | st.integers()),
    TEXTS,
    TEXTS,
)


@given(MESSAGES)
def test_a_message_comes_back_from_its_text_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message
