"""The master's part for small puts that ask once: the bytes are there, and become an object or do not.

What PutStart and PutEnd would say of such a put, one after the other, is decided here in one step, by the
same rules. Where its space was given in advance, ``preallocation.py`` says.
"""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.rpc.wire import Failure
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received
from mooncake.store.master.free_space import FreeSpace
from mooncake.store.master.objects import check_put, scoped
from mooncake.store.master.placement import SegmentPlacement
from mooncake.store.master.preallocation import Preallocations
from mooncake.store.master.put import PutRequests, check_policy, check_relations
from mooncake.store.master.tenants import Account


class PreallocatedPuts:
    """Answers PutWritten."""

    def __init__(
        self, catalog: Catalog, space: FreeSpace, advances: Preallocations, writing: PutRequests
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._preallocations = advances
        self._writing = writing

    def put_written(self, message: m.PutWritten, _: Received, now: float) -> m.PutsWritten | Failure:
        count = len(message.keys)
        if not count == len(message.sizes) == len(message.checksums) == len(message.pieces):
            return Failure(
                "invalid_argument", "put_written: keys, sizes, checksums and pieces differ in length"
            )
        if len(message.groups) not in (0, count) or len(message.parents) not in (0, count):
            return Failure("invalid_argument", "put_written: groups or parents, but not one for each key")
        policy = message.policy
        refusal = None if policy is None else check_policy(policy) or _check_simple(policy)
        account: Account | Refusal = refusal or self._writing.admitted(message.tenant)
        outcomes: list[bool | Refusal] = []
        for index in range(count):
            outcome = account if isinstance(account, Refusal) else self._put(message, index, account, now)
            outcomes.append(outcome)
            if isinstance(outcome, Refusal):
                self._catalog.counts.refused_puts += outcome.code != "expired"  # then it is put anew
                key = scoped(message.tenant, message.keys[index])
                self._catalog.tell(now, key, "written in advance, but refused: {}", outcome)
        if isinstance(account, Refusal):
            return m.PutsWritten(outcomes)
        self._catalog.tenants.tidy(account)
        if not message.num_pieces:
            return m.PutsWritten(outcomes)
        placement = SegmentPlacement(self._catalog.segments, message.host, (), now)
        advance = self._preallocations.give(message.num_pieces, message.piece_bytes, placement, now)
        self._space.evict_to_watermark(now)
        return m.PutsWritten(outcomes, advance)

    def _put(self, message: m.PutWritten, index: int, account: Account, now: float) -> bool | Refusal:
        """True: readable, or was by this very request; False: the key is taken."""
        catalog, name, size_bytes = self._catalog, message.keys[index], message.sizes[index]
        refusal = check_put(name, size_bytes, size_bytes) or check_relations(message, index)
        if refusal is not None:
            return refusal
        key, put_id = scoped(message.tenant, name), message.put_id + index
        if self._writing.known(key, put_id, False, now) is not None:
            stored = catalog.objects.readable.get(key)
            return stored is not None and stored.put_id == put_id
        piece = self._preallocations.find(message.pieces[index], put_id, size_bytes, now)
        if piece is None:
            return True  # a late copy of the request that put it; it has gone since
        if isinstance(piece, Refusal):
            return piece
        checksums = message.checksums[index]
        if len(checksums) != 4:
            return Refusal("invalid_checksums", f"{len(checksums)} bytes for 1 chunk")
        refusal = self._space.fit(size_bytes, account, now)
        if refusal is not None:
            return refusal
        self._preallocations.use(message.pieces[index], put_id)
        stored = catalog.begin_written(key, put_id, size_bytes, piece, now)
        if message.policy is not None:
            stored.policy, stored.data_type = message.policy, message.policy.data_type
        self._writing.relate(stored, message, index)
        self._writing.finish(stored, checksums, now)
        catalog.tell(now, key, "put as #{} in one step, readable on {}", stored.object_id, piece.segment.name)
        return True


def _check_simple(policy: m.PutPolicy) -> Refusal | None:
    if policy.num_replicas > 1 or policy.is_durable or policy.preferred_segments or policy.is_same_host:
        return Refusal("invalid_policy", "such a put is started and ended")
    return None
