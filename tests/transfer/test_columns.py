from __future__ import annotations

import numpy as np

from mooncake.transfer.columns import transfer_columns


def test_rows_are_cut_and_remember_where_they_came_from() -> None:
    columns = transfer_columns([1000, 2000, 3000, 4000], [1, 2, 3, 4], [25, 10, 0, 11])
    cut = columns.cut(10)
    assert cut.local.tolist() == [1000, 1010, 1020, 2000, 3000, 4000, 4010]
    assert cut.remote.tolist() == [1, 11, 21, 2, 3, 4, 14]
    assert cut.lengths.tolist() == [10, 10, 5, 10, 0, 10, 1]
    assert cut.origin is not None and cut.origin.tolist() == [0, 0, 0, 1, 2, 3, 3]
    assert cut.whole is columns
    assert {cut.local.dtype, cut.remote.dtype, cut.lengths.dtype} == {np.dtype(np.uint64)}


def test_rows_that_are_small_enough_stay() -> None:
    for columns in (transfer_columns([1], [2], [10]), transfer_columns([], [], [])):
        assert columns.cut(10) is columns


def test_addresses_near_the_end_of_the_world() -> None:
    cut = transfer_columns([2**64 - 30], [2**63], [30]).cut(16)
    assert cut.local.tolist() == [2**64 - 30, 2**64 - 14]
    assert cut.remote.tolist() == [2**63, 2**63 + 16]
