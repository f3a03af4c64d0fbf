# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake.errors import InvalidArgument
from mooncake.sim.traces.trace import (
    MAX_LINE_BYTES,
    TraceError,
    TraceFile,
    TraceOptions,
    TraceRow,
    read_trace,
)

ROWS: list[dict[str, Any]] = [
    {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 700, "output_length": 7, "hash_ids": [0, 3]},
    {"timestamp": 3000, "input_length": 2048, "output_length": 0, "hash_ids": [0, 1, 4, 5]},
]
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def written(folder: Path, rows: list[dict[str, Any]], name: str = "trace.jsonl") -> str:
    return put(folder, b"".join(json.dumps(row).encode() + b"\n" for row in rows), name)


def put(folder: Path, content: bytes, name: str = "trace.jsonl") -> str:
    path = folder / name
    path.write_bytes(content)
    return str(path)


def refused(path: str, **options: Any) -> TraceError:
    with pytest.raises(TraceError) as caught:
        list(read_trace(path, TraceOptions(**options)))
    assert path in str(caught.value)
    return caught.value


def test_rows_are_what_the_file_says(folder: Path) -> None:
    trace = read_trace(written(folder, ROWS))
    assert (trace.format, trace.block_tokens) == ("mooncake", 512)
    assert list(trace) == [
        TraceRow(0.0, 1100, 5, (0, 1, 2)),
        TraceRow(0.0, 700, 7, (0, 3)),
        TraceRow(3.0, 2048, 0, (0, 1, 4, 5)),
    ]
    assert list(trace) == list(trace), "a trace can be read again"
    assert trace.read_bytes == trace.size_bytes > 0


def test_other_fields_are_noted_and_not_read(folder: Path) -> None:
    other = {"chat_id": 7, "type": "text", "turn": 1}
    trace = read_trace(written(folder, [other | row for row in ROWS]))
    assert list(trace) == list(read_trace(written(folder, ROWS, "plain.jsonl")))
    assert trace.notes == ["fields that are not read: chat_id, type, turn"]
    sessions = read_trace(written(folder, [turn("a", 0, 64, [1]) | other], "sessions.jsonl"))
    assert [row.keys for row in sessions] == [(1 << 32 | 1,)] and len(sessions.notes) == 1


@pytest.mark.parametrize(("num_last", "num_ids"), [(30, 2), (30, 1), (32, 2)])
def test_blocks_of_another_size_are_read_when_the_size_is_given(
    folder: Path, num_last: int, num_ids: int
) -> None:
    """Whether the last, partial block has an id or not."""
    row = {"timestamp": 0, "input_length": num_last, "output_length": 1, "hash_ids": [0, 1][:num_ids]}
    path = written(folder, [row])
    if num_ids > 1:
        assert f"1 ids ({num_last} tokens / 512, rounded up); --block-tokens 16 would fit" in str(
            refused(path)
        )
    trace = read_trace(path, TraceOptions(block_tokens=16))
    assert [one.keys for one in trace] == [(0, 1)[:num_ids]] and trace.block_tokens == 16


def test_all_rows_of_a_file_round_alike(folder: Path) -> None:
    row = {"timestamp": 0, "input_length": 30, "output_length": 1}
    path = written(folder, [row | {"hash_ids": [0]}, row | {"hash_ids": [0, 1]}])
    assert "1 ids (30 tokens / 16, rounded down)" in str(refused(path, block_tokens=16))


BROKEN: dict[str, tuple[Edit, str, str]] = {
    "negative time": (lambda row: row.update(timestamp=-1), "timestamp is -1", "from 0 to"),
    "time goes back": (
        lambda row: row.update(timestamp=2000.5),
        "timestamp is 2000.5",
        "3000 (the row before)",
    ),
    "time is text": (lambda row: row.update(timestamp="4000"), "timestamp is '4000'", "milliseconds"),
    "time is null": (lambda row: row.update(timestamp=None), "timestamp is None", "milliseconds"),
    "a silence": (
        lambda row: row.update(timestamp=10**7),
        "timestamp is '9997 s after",
        "--max-silence 0 allows",
    ),
    "no prompt": (lambda row: row.update(input_length=0), "input_length is 0", "from 1 to"),
    "half a token": (lambda row: row.update(input_length=600.5), "input_length is 600.5", "whole number"),
    "true is no number": (lambda row: row.update(output_length=True), "output_length is True", "from 0"),
    "negative output": (lambda row: row.update(output_length=-2), "output_length is -2", "from 0"),
    "a field is missing": (lambda row: row.pop("output_length"), "output_length is None", "from 0"),
    "ids are no list": (lambda row: row.update(hash_ids=7), "hash_ids is 7", "whole numbers"),
    "a negative id": (lambda row: row.update(hash_ids=[0, -3]), "hash_ids[1] is -3", "from 0"),
    "an id too large": (
        lambda row: row.update(hash_ids=[0, 2**60]),
        f"hash_ids[1] is {2**60}",
        f"0 to {2**60 - 1}",
    ),
    "an id of text": (lambda row: row.update(hash_ids=[0, "a"]), "hash_ids[1] is 'a'", "from 0"),
    "too few ids": (lambda row: row.update(hash_ids=[0]), "hash_ids is '1 ids'", "2 ids (700 tokens / 512"),
    "too many ids": (lambda row: row.update(hash_ids=[0, 3, 9]), "hash_ids is '3 ids'", "2 ids"),
    "an id twice": (lambda row: row.update(hash_ids=[6, 6]), "hash_ids is 6", "once in a row"),
    "a gap in the prefix": (
        lambda row: row.update(hash_ids=[8, 1]),
        "hash_ids[1] is '1 after 8'",
        "after 0 as before",
    ),
    "reuse elsewhere": (
        lambda row: row.update(hash_ids=[1, 9]),
        "hash_ids[0] is '1 in first place'",
        "after 0",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_row_is_named_with_its_field_its_value_and_what_is_allowed(folder: Path, kind: str) -> None:
    edit, what, allowed = BROKEN[kind]
    row = {"timestamp": 3000, "input_length": 700, "output_length": 1, "hash_ids": [0, 3]}
    edit(row)
    error = refused(written(folder, [*ROWS, row]))
    assert error.row == 4 and "row 4: " in str(error)
    assert what in str(error) and allowed in str(error)


WRONG_LINES = {
    "not JSON": b"{timestamp: 0}\n",
    "cut off": b'{"timestamp": 3000, "input_length": 70',
    "a list": b"[1, 2]\n",
    "not a number": b'{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": [9]}\n',
    "not UTF-8": b'{"timestamp\xff": 0}\n',
    "two rows in a line": b'{"timestamp": 0} {"timestamp": 0}\n',
    "an empty line": b"\n" + json.dumps(ROWS[2]).encode(),
    "zeros": b"\0" * 100,
}


@pytest.mark.parametrize("kind", WRONG_LINES)
def test_a_line_that_is_no_row_is_named(folder: Path, kind: str) -> None:
    path = written(folder, ROWS)
    put(folder, Path(path).read_bytes() + WRONG_LINES[kind])
    assert refused(path).row == 4


@pytest.mark.parametrize("kind", ["mooncake", "sessions"])
@pytest.mark.parametrize("length", [b"64", b"-1"])
def test_a_first_row_that_is_not_utf8_where_it_is_not_read_is_named(
    folder: Path, kind: str, length: bytes
) -> None:
    row = b'{"timestamp": 0, "input_length": %s, "output_length": 1, "hash_ids": [0], "text": "\xff"' % length
    more = b', "session": "a"}\n' if kind == "sessions" else b"}\n"
    error = refused(put(folder, row + more), block_tokens=64, format=kind)
    assert error.row == 1 and "line is" in str(error) and "one JSON object" in str(error)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_no_bytes_do_worse_than_a_trace_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = put(tmp_path_factory.mktemp("noise"), content)
    with pytest.raises(TraceError):
        list(read_trace(path))


@settings(deadline=None)
@given(cut=st.integers(1, 150))
def test_a_file_that_was_cut_off_never_passes_for_a_whole_one(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """Unless it was cut between two rows, or where only the last line end is missing."""
    folder = tmp_path_factory.mktemp("cut")
    plain = Path(written(folder, ROWS)).read_bytes()
    packed = gzip.compress(plain)[:-cut]
    error = refused(put(folder, packed, "trace.jsonl.gz"))
    assert len(packed) < 2 or "gzip" in str(error)
    path = put(folder, plain[:-cut])
    if plain[-cut - 1 : -cut] not in (b"\n", b"}"):
        assert refused(path).row == plain[:-cut].count(b"\n") + 1


def test_an_empty_file_and_no_file_are_errors(folder: Path) -> None:
    assert "file is 'empty'; allowed: at least one row" in str(refused(put(folder, b"")))
    assert "file is 'empty'" in str(refused(put(folder, gzip.compress(b""), "empty.gz")))
    zstd = put(folder, b"\x28\xb5\x2f\xfd" + bytes(20), "trace.jsonl.zst")
    assert "file is 'compressed with zstd'; allowed: a plain file, or one of gzip" in str(refused(zstd))
    assert "No such file" in str(refused(str(folder / "none.jsonl")))
    assert "directory" in str(refused(str(folder)))


def test_a_byte_order_mark_is_no_part_of_the_first_row(folder: Path) -> None:
    plain = Path(written(folder, ROWS)).read_bytes()
    assert list(read_trace(put(folder, b"\xef\xbb\xbf" + plain, "mark.jsonl"))) == list(
        read_trace(put(folder, plain))
    )
    assert read_trace(put(folder, b"\xef\xbb\xbf" + AZURE)).format == "csv"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_file_in_utf_16_is_named(folder: Path, encoding: str) -> None:
    """As a shell of Windows writes what is redirected to a file."""
    text = AZURE.decode() if encoding == "utf-16" else "\ufeff" + json.dumps(ROWS[0])
    error = refused(put(folder, text.encode(encoding)))
    assert "file is 'text in UTF-16'; allowed: UTF-8; iconv -f UTF-16 -t UTF-8" in str(error)


def test_an_id_that_is_twice_in_a_long_row_is_found_in_one_pass(folder: Path) -> None:
    """Each id was looked for among all before it, which took hours for a row of a million."""
    num_ids = 200_000
    row = {"timestamp": 0, "input_length": num_ids * 16, "output_length": 1}
    path = written(folder, [row | {"hash_ids": [*range(num_ids - 1), num_ids - 2]}])
    assert f"hash_ids is {num_ids - 2}; allowed: each id once" in str(refused(path, block_tokens=16))


def test_arrays_and_conversations_are_named(folder: Path) -> None:
    array = put(folder, json.dumps(ROWS).encode())
    assert f"not an array; jq -c '.[]' {array} makes lines of it" in str(refused(array))
    talk = {"id": "x", "conversations": [{"from": "human", "value": "Hello"}]}
    assert "not an array" in str(refused(put(folder, json.dumps([talk]).encode())))
    assert "which conversations (as ShareGPT's) lack" in str(refused(written(folder, [talk])))


def test_a_line_without_end_is_not_taken_into_memory(folder: Path) -> None:
    path = folder / "endless.jsonl"
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(50 * MAX_LINE_BYTES)  # a hole: takes no space
    error = refused(str(path))
    assert error.row == 1 and "at most" in str(error)


def test_a_file_is_streamed(folder: Path) -> None:
    row = {"timestamp": 0, "input_length": 5000, "output_length": 1, "hash_ids": list(range(10))}
    path = put(folder, (json.dumps(row).encode() + b"\n") * 60_000)
    lines = TraceFile(path)
    rows = iter(lines)
    next(rows)
    assert lines.read_bytes < lines.size_bytes / 2, "more is read than the first row needs"
    trace = read_trace(path)
    assert len({row.keys for row in trace}) == 1


def test_compressed_or_not_is_the_same(folder: Path) -> None:
    path = written(folder, ROWS)
    packed = put(folder, gzip.compress(Path(path).read_bytes()), "trace.jsonl.gz")
    assert list(read_trace(packed)) == list(read_trace(path))


# Azure

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"


def test_azure_gives_arrivals_and_lengths(folder: Path) -> None:
    trace = read_trace(put(folder, AZURE + b"2023-11-16 18:17:04.2299600,31,8"))
    assert trace.format == "csv"
    assert list(trace) == list(read_trace(trace.path, TraceOptions(format="azure")))
    assert list(trace) == [TraceRow(0.0, 4808, 10, ()), TraceRow(0.25, 31, 8, ())]


@pytest.mark.parametrize(
    "second",
    ["2024-05-10 00:00:00.259930+00:00", "2024-05-10T02:00:00.25993+0200", "2024-05-10T00:00:00.25993Z"],
)
def test_azure_times_may_state_their_zone(folder: Path, second: str) -> None:
    """The files of 2024 do."""
    header = AZURE.split(b"\n")[0]
    rows = f"\n2024-05-10 00:00:00.009930+00:00,2162,5\n{second},2399,6\n"
    trace = read_trace(put(folder, header + rows.encode()))
    assert list(trace) == [TraceRow(0.0, 2162, 5, ()), TraceRow(0.25, 2399, 6, ())]


CSV_FILES = {
    "BurstGPT": """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
5.25,GPT-4,1087,0,1087,API log""",
    "BurstGPT, quoted": """Timestamp,Time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.0,1,ChatGPT,472,18,490,"Conversation, log"
5.25,,GPT-4,1087,0,1087,API log""",
    "Vidur": """arrived_at,num_prefill_tokens,num_decode_tokens
5,472.0,18
5.25,1087,0.0""",
    "Vidur with an index": """,arrived_at,num_prefill_tokens,num_decode_tokens
0,5,472,18
1,5.25,1087,0""",
    "another order, case and delimiter": """generated_tokens; CONTEXT_TOKENS; Timestamp\r
18; 472; 5\r
0; 1087; 5.25\r""",
}


@pytest.mark.parametrize("kind", CSV_FILES)
def test_columns_of_other_public_traces_are_known(folder: Path, kind: str) -> None:
    trace = read_trace(put(folder, CSV_FILES[kind].encode()))
    assert list(trace) == [TraceRow(5.0, 472, 18, ()), TraceRow(5.25, 1087, 0, ())]
    assert any("Log Type" in note for note in trace.notes) == kind.startswith("BurstGPT")


@pytest.mark.parametrize(("unit", "per_s"), [("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_times_since_1970_count_from_the_first_row(folder: Path, unit: str, per_s: float) -> None:
    rows = [{**row, "timestamp": 1.7e9 * per_s + row["timestamp"] / 1e3 * per_s} for row in ROWS]
    trace = read_trace(written(folder, rows))
    assert [row.timestamp_s for row in trace] == [0.0, 0.0, 3.0]
    assert [f"read as {unit} since 1970" in note for note in trace.notes] == [True]
    numbers = "".join(f"{row['timestamp']:.0f},1,1\n" for row in rows)
    table = read_trace(put(folder, f"timestamp,input_tokens,output_tokens\n{numbers}".encode(), "t.csv"))
    assert [row.timestamp_s for row in table] == [0.0, 0.0, 3.0] and table.notes == trace.notes
    rows[2]["timestamp"] = 1
    assert "(the row before) or more; sort the rows by time" in str(refused(written(folder, rows)))


def test_a_time_unit_that_is_given_counts(folder: Path) -> None:
    path = written(folder, ROWS)
    assert [row.timestamp_s for row in read_trace(path, TraceOptions(time_unit="s"))] == [0.0, 0.0, 3000.0]
    small = read_trace(written(folder, [{**ROWS[0], "timestamp": 61.5}], "small.jsonl"))
    assert [row.timestamp_s for row in small] == [0.0615]
    assert small.notes == ["its times are read as milliseconds; --time-unit s if they are seconds"]
    late = written(folder, [{**row, "timestamp": row["timestamp"] + 1.7e9} for row in ROWS], "late.jsonl")
    times = [row.timestamp_s for row in read_trace(late, TraceOptions(time_unit="ms"))]
    assert times == [1.7e6, 1.7e6, 1.7e6 + 3]
    with pytest.raises(InvalidArgument, match=r"time_unit is 's'.*milliseconds"):
        read_trace(written(folder, SESSIONS), TraceOptions(time_unit="s"))


def test_a_missing_column_is_named(folder: Path) -> None:
    lengths_only = b"num_prefill_tokens,num_decode_tokens\n3772,54\n"
    error = str(refused(put(folder, lengths_only)))
    assert "allowed: a column of times, named timestamp, arrivedat" in error and "in any case" in error
    mixed = CSV_FILES["Vidur"].encode() + b"\n2023-11-16 18:17:03,1,1\n"
    assert "arrived_at is '2023-11-16 18:17:03'; allowed: seconds" in str(refused(put(folder, mixed)))


def test_rows_without_ids_share_nothing(folder: Path) -> None:
    rows = [
        {**ROWS[0], "hash_ids": []},
        {name: ROWS[1][name] for name in ROWS[1] if name != "hash_ids"},
        ROWS[2],
    ]
    trace = read_trace(written(folder, rows))
    assert [row.keys for row in trace] == [(), (), (0, 1, 4, 5)]
    assert trace.notes == ["the first row has no hash_ids: it shares no prefix"]


WRONG_AZURE = {
    b"2023-11-16 18:17:03,1,1": "TIMESTAMP is '2023-11-16 18:17:03'; allowed: not before",
    b"2023-13-16 18:17:04,1,1": "TIMESTAMP is '2023-13-16 18:17:04'",
    b"yesterday,1,1": "TIMESTAMP is 'yesterday'",
    b"2023-11-16 18:17:04,0,1": "ContextTokens is '0'; allowed: a whole number from 1",
    b"2023-11-16 18:17:04,1,-1": "GeneratedTokens is '-1'; allowed: a whole number from 0",
    b"2023-11-16 18:17:04,1": "allowed: 3 values",
    b"2023-11-16 21:17:04,1,1": "allowed: at most 3600 s",
}


@pytest.mark.parametrize("line", WRONG_AZURE)
def test_a_broken_azure_row_is_named(folder: Path, line: bytes) -> None:
    error = refused(put(folder, AZURE + line + b"\n"))
    assert error.row == 3 and WRONG_AZURE[line] in str(error)


def test_an_azure_file_needs_its_header_and_a_row(folder: Path) -> None:
    assert "header" in str(refused(put(folder, AZURE.split(b"\n")[1])))
    assert "only a header" in str(refused(put(folder, AZURE.split(b"\n")[0])))


# Sessions


def turn(session: str, timestamp: int, num_input: int, ids: list[int]) -> dict[str, Any]:
    row = {"timestamp": timestamp, "input_length": num_input, "output_length": 3, "hash_ids": ids}
    return {"session": session, "think_ms": 0, "api_ms": 10, **row}


SESSIONS = [
    turn("a", 0, 100, [1]),
    turn("a", 5000, 200, [1, 2, 3]),
    turn("a", 9000, 210, [1, 2, 4]),
    turn("b", 0, 64, [1]),
    turn("b", 1000, 128, [1, 2]),
    turn("c", 0, 64, [1]),
]


def test_sessions_run_side_by_side_and_share_no_ids(folder: Path) -> None:
    path = written(folder, SESSIONS)
    rows = list(read_trace(path, TraceOptions(num_concurrent=2, stagger_s=4.5)))
    assert [(row.session, row.timestamp_s) for row in rows] == [
        *[("a", 0.0), ("b", 4.5), ("a", 5.0), ("b", 5.5), ("c", 5.5), ("a", 9.0)]
    ]
    assert read_trace(path).block_tokens == 64
    first, second, third = (row.keys for row in rows if row.session == "a")
    assert first == second[:1] and second[:2] == third[:2] and second[2] != third[2]
    by_session = {name: {key for row in rows if row.session == name for key in row.keys} for name in "abc"}
    assert len(by_session["a"] | by_session["b"] | by_session["c"]) == 4 + 2 + 1


def test_a_long_pause_between_turns_is_cut(folder: Path) -> None:
    path = written(folder, [turn("a", 0, 64, [1]), turn("a", 9_000_000, 64, [1])])
    assert [row.timestamp_s for row in read_trace(path)] == [0.0, 3600.0]
    assert [row.timestamp_s for row in read_trace(path, TraceOptions(max_silence_s=0))] == [0.0, 9000.0]


def test_turns_may_have_equal_times(folder: Path) -> None:
    # In binary, 2007 / 1e3 * 1e3 is more than 2007.
    rows = list(read_trace(written(folder, [turn("a", 2007, 64, [1]), turn("a", 2007, 64, [1])])))
    assert rows[0].timestamp_s == rows[1].timestamp_s
    refusal = refused(written(folder, [turn("a", 2007, 64, [1]), turn("a", 2006, 64, [1])]))
    assert (refusal.row, refusal.field) == (2, "timestamp")


def test_broken_sessions_are_named(folder: Path) -> None:
    again = refused(written(folder, [*SESSIONS, turn("a", 0, 64, [1])]))
    assert (again.row, again.field) == (7, "session")
    back = refused(written(folder, [turn("a", 5, 64, [1]), turn("a", 4, 64, [1])]))
    assert (back.row, back.field) == (2, "timestamp")
    large = refused(written(folder, [turn("a", 0, 100, [2**32])]))
    assert large.field == "hash_ids[0]"
    count = refused(written(folder, [turn("a", 0, 100, [1, 2])]))
    assert "1 ids (100 tokens / 64, rounded down)" in str(count)


# Options


def test_the_first_rows_only_and_never_fewer(folder: Path) -> None:
    path = written(folder, ROWS)
    assert len(list(read_trace(path, TraceOptions(num_rows=2)))) == 2
    assert "num_rows is 4; allowed: 1 to 3" in str(refused(path, num_rows=4))


def test_rows_of_one_instant_may_come_evenly_until_the_next(folder: Path) -> None:
    row = {"input_length": 10, "output_length": 9, "hash_ids": [1]}
    path = written(folder, [{"timestamp": at, **row} for at in (0, 0, 0, 3000, 5000, 5000)])
    spread = TraceOptions(is_spread=True)
    assert [row.timestamp_s for row in read_trace(path, spread)] == [0, 1, 2, 3, 5, 6]
    assert [row.timestamp_s for row in read_trace(path, dataclasses.replace(spread, num_rows=2))] == [0, 1]
    alone = written(folder, [{"timestamp": 7000, **row}] * 2)
    assert [row.timestamp_s for row in read_trace(alone, spread)] == [7, 7], "nothing says how long"


def test_speed_and_blocks_of_another_size(folder: Path) -> None:
    path = written(folder, ROWS)
    assert [row.timestamp_s for row in read_trace(path, TraceOptions(speedup=2))] == [0, 0, 1.5]
    coarse = read_trace(path, TraceOptions(coarsen=2))
    assert coarse.block_tokens == 1024
    assert [row.keys for row in coarse] == [(1, 2), (3,), (1, 5)]


def test_halved_blocks_are_full_ones_and_share_the_half_behind_the_first_block(folder: Path) -> None:
    rows = list(read_trace(written(folder, ROWS), TraceOptions(is_halved=True)))
    assert [len(row.keys) for row in rows] == [1100 // 256, 700 // 256, 8]
    assert rows[0].keys[:4] == rows[2].keys[:4] and rows[0].keys[3] == 2 * 1 + 1
    assert rows[1].keys == rows[0].keys[:2]


@settings(deadline=None)
@given(st.integers(1, 5000), st.sampled_from([2, 4, 32, 512]))
def test_shorter_prompts_have_as_many_blocks_as_before(
    tmp_path_factory: pytest.TempPathFactory, num_input: int, divisor: int
) -> None:
    num_blocks = -(-num_input // 512)
    row = {"timestamp": 0, "input_length": num_input, "output_length": 9, "hash_ids": list(range(num_blocks))}
    trace = read_trace(written(tmp_path_factory.mktemp("short"), [row]), TraceOptions(divide_lengths=divisor))
    (short,) = trace
    assert short.keys == tuple(range(num_blocks))
    assert -(-short.num_input // trace.block_tokens) == num_blocks


def test_options_are_checked(folder: Path) -> None:
    path = written(folder, ROWS)
    wrong: list[dict[str, Any]] = [{"speedup": 0.0}, {"coarsen": 0}, {"divide_lengths": 3}, {"num_rows": -1}]
    for options in wrong:
        with pytest.raises(InvalidArgument):
            read_trace(path, TraceOptions(**options))


def test_rejected_requests_of_a_recording_have_answers_of_the_mean_length(folder: Path) -> None:
    header = {"recording": 1, "block_tokens": 512, "key_id": "x", "began_at": 1.0, "longest_s": 1.0}
    row = {"input_length": 1000, "hash_ids": [1]}
    ends = [("rejected", 0), ("done", 300), ("failed", 2), ("rejected", 0), ("done", 500)]
    rows = [
        {**row, "timestamp": 10_000 * number, "output_length": num_output, "status": status}
        for number, (status, num_output) in enumerate(ends)
    ]
    trace = read_trace(written(folder, [header, *rows]))
    assert [one.num_output for one in trace] == [400, 300, 2, 400, 500]
    [note] = trace.notes
    assert note.startswith("2 of its requests were rejected") and "400 tokens" in note
    done = read_trace(written(folder, [header, *rows[1:2]]))
    assert [one.num_output for one in done] == [300] and not done.notes
    none = read_trace(written(folder, [header, *rows[:1]]))
    assert [one.num_output for one in none] == [1]


def test_a_recording_may_be_silent_for_a_week(folder: Path) -> None:
    header = {"recording": 1, "block_tokens": 512, "key_id": "x", "began_at": 1.0, "longest_s": 1.0}
    row = {"input_length": 1000, "output_length": 5, "hash_ids": [1]}
    week_ms = 7 * 86_400_000
    path = written(folder, [header, *({**row, "timestamp": at} for at in (0, week_ms))])
    assert [one.timestamp_s for one in read_trace(path)] == [0.0, week_ms / 1000]
    path = written(folder, [header, *({**row, "timestamp": at} for at in (0, week_ms + 1))])
    with pytest.raises(
        TraceError, match=r"timestamp is '604800.* s after the row before'.*--max-silence 0 allows"
    ):
        list(read_trace(path))
    longer = TraceOptions(max_silence_s=1e6)
    assert (
        len(list(read_trace(path, longer))) == len(list(read_trace(path, TraceOptions(max_silence_s=0)))) == 2
    )


@pytest.mark.parametrize("damage", [b"\n", b"{", b"x" * (MAX_LINE_BYTES + 1)])
def test_damage_behind_the_rows_of_a_recording_that_are_read_does_not_matter(
    folder: Path, damage: bytes
) -> None:
    header = {"recording": 1, "block_tokens": 512, "key_id": "x", "began_at": 1.0, "longest_s": 1.0}
    row = {"input_length": 1000, "output_length": 300, "hash_ids": [1]}
    rows = [{**row, "timestamp": 10_000 * number} for number in range(4)]
    rows[0] |= {"status": "rejected", "output_length": 0}
    content = b"".join(json.dumps(one).encode() + b"\n" for one in [header, *rows]) + damage
    path = put(folder, content)
    trace = read_trace(path, TraceOptions(num_rows=3))
    assert [one.num_output for one in trace] == [300, 300, 300]
    with pytest.raises(TraceError, match="row 6: line is"):
        list(read_trace(path))
