from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mooncake.store.framing import framed, unframed

bodies = st.lists(st.binary(max_size=50), max_size=10)


@given(bodies)
def test_records_survive_the_trip(parts: list[bytes]) -> None:
    content = framed(parts)
    found, num_bytes = unframed(content)
    assert [bytes(body) for body in found] == parts and num_bytes == len(content)


@given(bodies.filter(len), st.data())
def test_a_torn_tail_is_dropped(parts: list[bytes], data: st.DataObject) -> None:
    """A write that was cut anywhere leaves exactly the records before it."""
    content = framed(parts)
    cut = data.draw(st.integers(0, len(content) - 1))
    found, num_bytes = unframed(content[:cut])
    assert len(found) < len(parts) and [bytes(body) for body in found] == parts[: len(found)]
    assert framed(parts[: len(found)]) == content[:num_bytes]
