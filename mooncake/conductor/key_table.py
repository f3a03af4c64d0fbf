# SPDX-License-Identifier: Apache-2.0
"""A table from 64-bit keys to small numbers, for ten million entries and whole prompts at a time.

It owns the layout of entries in memory and refuses to know what a key or a number means. A Python dictionary
takes 90 bytes an entry and serialises its cache misses: 0.3 ms for the 256 blocks of a prompt among ten
million. Here eight keys share a bucket, which is one cache line, and numpy looks up all keys of a prompt in a
few passes, so that the misses overlap: 80 us, and 20 to 35 bytes an entry. Entries that don't fit into their
bucket (a few in a hundred) go to an ordinary dictionary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mooncake.prefix import BlockKey

Keys = npt.NDArray[np.uint64]
Values = npt.NDArray[Any]
Places = npt.NDArray[np.int64]

_BUCKET = 8
_MAX_LOAD = 0.7
_FIRST_BUCKETS = 8
_SPLIT_AT_LEAST = 256
_ABSENT, _OVERFLOWN = -1, -2
_ABSENT_PLACE, _BUCKET_BITS = np.array(_ABSENT), np.array(3)
# Keys of a simulation are no hashes: sessions, and the blocks of each, are counted. With the golden ratio as
# the factor a third of such keys did not fit into their buckets late in a day; with this one few do not, as
# of random keys. Constants are arrays without dimensions, which numpy takes faster than scalars.
_MIX, _HALF = np.array(0xBF58476D1CE4E5B9, np.uint64), np.array(32, np.uint64)
_WHICH_BYTE = np.array(sum(byte << 61 - 8 * byte for byte in range(_BUCKET)), np.uint64)
_TOP_THREE = np.array(61, np.uint64)
_FREE = np.array(0, np.uint64)
_INSTEAD_OF_0 = 0xD6E8FEB86659FD93  # 0 marks a free place; a block whose key is 0 gets this one


def key_column(keys: Iterable[BlockKey]) -> Keys:
    """Distinct keys as an array."""
    unique = dict.fromkeys(keys)
    return np.fromiter(unique, np.uint64, len(unique))


class KeyLookup(NamedTuple):
    """Places of keys, for ``KeyTable.put``."""

    keys: Keys
    mixed: Places
    places: Places
    values: Values
    """Values by key; 0 for absent keys."""
    is_all_new: bool


class KeyTable:
    """A map from keys to values above 0 of ``value_type``."""

    def __init__(self, value_type: type[np.unsignedinteger[Any]] = np.uint32) -> None:
        self._num_buckets = _FIRST_BUCKETS  # a power of two
        self._mask = np.array(_FIRST_BUCKETS - 1)
        self._num_split = 0  # while they are being doubled: the number that has been split
        self._keys: Keys = np.zeros((_FIRST_BUCKETS, _BUCKET), np.uint64)
        self._values: Values = np.zeros((_FIRST_BUCKETS, _BUCKET), value_type)
        self._spilled = np.zeros(_FIRST_BUCKETS, np.uint16)  # by bucket before its split: keys in _overflow
        self._overflow: dict[BlockKey, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def find(self, keys: Keys) -> KeyLookup:
        num_keys = len(keys)
        if np.count_nonzero(keys) < num_keys:
            keys = np.where(keys == 0, np.uint64(_INSTEAD_OF_0), keys)
        mixed = _mixed(keys)
        buckets = self._buckets(mixed)
        # Eight comparisons are one word in which at most one byte is 1.
        found = (self._keys.take(buckets, axis=0) == keys[:, None]).view(np.uint64).reshape(-1)
        num_here = np.count_nonzero(found)
        if not num_here and not self._overflow:
            places = np.empty(num_keys, np.int64)
            places.fill(_ABSENT)
            return KeyLookup(keys, mixed, places, np.zeros(num_keys, self._values.dtype), True)
        places = ((found * _WHICH_BYTE) >> _TOP_THREE).view(np.int64)
        places += buckets << _BUCKET_BITS
        values = self._values.reshape(-1).take(places)
        num_overflown = 0
        if num_here < num_keys:
            is_here = found.astype(np.bool_)
            values *= is_here
            is_absent = ~is_here
            np.copyto(places, _ABSENT_PLACE, where=is_absent)
            if self._overflow:
                may_spill = self._spilled.take(mixed & self._mask)
                may_spill *= is_absent
                for at in may_spill.nonzero()[0].tolist():
                    value = self._overflow.get(int(keys[at]))
                    if value is not None:
                        values[at], places[at] = value, _OVERFLOWN
                        num_overflown += 1
        return KeyLookup(keys, mixed, places, values, num_here + num_overflown == 0)

    def put(self, found: KeyLookup, values: Values) -> None:
        """Set the values of keys just looked up (distinct ones); those that get 0 are removed."""
        keys, mixed, places, _, is_all_new = found
        if not is_all_new:
            is_inside = places >= 0
            if _all(is_inside):
                self._overwrite(places, values)
                return
            if np.count_nonzero(is_inside):
                self._overwrite(places[is_inside], values[is_inside])
            for at in (places == _OVERFLOWN).nonzero()[0].tolist():
                self._put_overflown(keys[at : at + 1], int(values[at]))
        if not is_all_new or not _all(values):
            is_new = (places == _ABSENT) & (values != 0)
            keys, mixed, values = keys[is_new], mixed[is_new], values[is_new]
        if len(keys):
            self._make_room(len(keys))
            self._size += len(keys)
            self._insert(keys, mixed, values)

    def keys_with(self, is_wanted: npt.NDArray[np.bool_]) -> Keys:
        """Every key whose value is marked in ``is_wanted``."""
        inside = self._keys[is_wanted[self._values] & (self._keys != 0)]
        outside = [key for key, value in self._overflow.items() if is_wanted[value]]
        return np.concatenate([inside, np.array(outside, np.uint64)])

    def counts(self) -> dict[int, int]:
        """The number of keys with each value."""
        inside = self._values[self._values != 0]
        values = np.concatenate([inside, np.fromiter(self._overflow.values(), inside.dtype)])
        found, counts = np.unique(values, return_counts=True)
        return dict(zip(found.tolist(), counts.tolist(), strict=True))

    def check(self) -> None:
        assert ((self._keys == 0) == (self._values == 0)).all()
        inside = self._keys[self._keys != 0]
        assert len(np.unique(inside)) == len(inside)
        assert len(inside) + len(self._overflow) == self._size
        assert not self._overflow.keys() & set(inside.tolist())
        assert (self._buckets(_mixed(inside)) == self._keys.nonzero()[0]).all()
        spilled = np.zeros_like(self._spilled)
        overflown = np.fromiter(self._overflow, np.uint64)
        np.add.at(spilled, _mixed(overflown) & (self._num_buckets - 1), 1)
        assert (spilled == self._spilled).all()

    def _buckets(self, mixed: Places) -> Places:
        buckets: Places = mixed & self._mask
        if self._num_split:
            is_split = buckets < self._num_split
            buckets += (mixed & self._num_buckets) * is_split
        return buckets

    def _overwrite(self, places: Places, values: Values) -> None:
        self._values.reshape(-1)[places] = values
        if not _all(values):
            gone = places[values == 0]
            self._keys.reshape(-1)[gone] = 0
            self._size -= len(gone)

    def _put_overflown(self, key: Keys, value: int) -> None:
        if value:
            self._overflow[int(key[0])] = value
        else:
            del self._overflow[int(key[0])]
            self._spilled[_mixed(key) & (self._num_buckets - 1)] -= 1
            self._size -= 1

    def _insert(self, keys: Keys, mixed: Places, values: Values) -> None:
        """Put each key into the first free place of its bucket; of several for the same place, one gets
        it."""
        flat, flat_values = self._keys.reshape(-1), self._values.reshape(-1)
        while len(keys):
            buckets = self._buckets(mixed)
            places = (self._keys.take(buckets, axis=0) == _FREE).argmax(axis=1)
            places += buckets << _BUCKET_BITS
            num_taken = np.count_nonzero(flat.take(places))
            if num_taken:
                is_free = flat.take(places) == _FREE
                self._overflow.update(zip(keys[~is_free].tolist(), values[~is_free].tolist(), strict=True))
                np.add.at(self._spilled, mixed[~is_free] & (self._num_buckets - 1), 1)
                keys, mixed, values = keys[is_free], mixed[is_free], values[is_free]
                places = places[is_free]
            flat[places] = keys
            has_won = flat.take(places) == keys
            if _all(has_won):
                flat_values[places] = values
                return
            flat_values[places[has_won]] = values[has_won]
            keys, mixed, values = keys[~has_won], mixed[~has_won], values[~has_won]

    def _make_room(self, num_keys: int) -> None:
        """Begin to double the buckets when they are full enough, and go on until that is done.

        A few buckets at a time: each moves the keys whose next bit is set to its new other half. Only the
        memory for them is allocated at once.
        """
        while self._num_split or self._size + num_keys > _MAX_LOAD * _BUCKET * self._num_buckets:
            if not self._num_split:
                self._keys, self._values = _doubled(self._keys), _doubled(self._values)
            self._split(_SPLIT_AT_LEAST + 4 * num_keys)
            if self._num_split:
                return

    def _split(self, num_buckets: int) -> None:
        first, end = self._num_split, min(self._num_buckets, self._num_split + num_buckets)
        keys, values = self._keys[first:end], self._values[first:end]
        goes = (_mixed(keys) & self._num_buckets != 0) & (keys != 0)
        other = slice(first + self._num_buckets, end + self._num_buckets)
        self._keys[other], self._values[other] = keys * goes, values * goes
        keys *= ~goes
        values *= ~goes
        self._num_split = end
        if end == self._num_buckets:
            self._num_buckets *= 2
            self._mask = np.array(self._num_buckets - 1)
            self._num_split = 0
            self._spilled = np.zeros(self._num_buckets, np.uint16)
            overflow, self._overflow = self._overflow, {}
            keys = np.fromiter(overflow, np.uint64, len(overflow))
            self._insert(keys, _mixed(keys), np.fromiter(overflow.values(), values.dtype, len(overflow)))


def _all(column: npt.NDArray[Any]) -> bool:
    """Whether all are set; four times as fast as ``column.all()`` for short columns."""
    return bool(np.count_nonzero(column) == len(column))


def _mixed(keys: Keys) -> Places:
    """Well-mixed 32 bits of each key."""
    return ((keys * _MIX) >> _HALF).view(np.int64)


def _doubled(column: Values) -> Values:
    larger = np.zeros((2 * len(column), _BUCKET), column.dtype)
    larger[: len(column)] = column
    return larger
