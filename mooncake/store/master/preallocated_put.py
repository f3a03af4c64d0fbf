"""The master's handler for small puts in one request: the bytes are written already.

The checks of PutStart and PutEnd are made here in one step, by the same rules. Space for such a put is
preallocated (``preallocation.py``).
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
        self, catalog: Catalog, space: FreeSpace, preallocations: Preallocations, put: PutRequests
    ) -> None:
        self._catalog = catalog
        self._space = space
        self._preallocations = preallocations
        self._put_requests = put

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
        account: Account | Refusal = refusal or self._put_requests.admitted(message.tenant)
        outcomes: list[bool | Refusal] = []
        for index in range(count):
            outcome = account if isinstance(account, Refusal) else self._put(message, index, account, now)
            outcomes.append(outcome)
            if isinstance(outcome, Refusal):
                self._catalog.counts.refused_puts += outcome.code != "expired"  # then it is put again
                key = scoped(message.tenant, message.keys[index])
                self._catalog.add_story(now, key, "put into preallocated space refused: {}", outcome)
        if isinstance(account, Refusal):
            return m.PutsWritten(outcomes)
        self._catalog.tenants.tidy(account)
        if not message.num_pieces:
            return m.PutsWritten(outcomes)
        placement = SegmentPlacement(self._catalog.segments, message.host, (), now)
        preallocated = self._preallocations.give(message.num_pieces, message.piece_bytes, placement, now)
        self._space.evict_to_watermark(now)
        return m.PutsWritten(outcomes, preallocated)

    def _put(self, message: m.PutWritten, index: int, account: Account, now: float) -> bool | Refusal:
        """True: readable now, or since an earlier copy of this request; False: the key is taken."""
        catalog, name, size_bytes = self._catalog, message.keys[index], message.sizes[index]
        refusal = check_put(name, size_bytes, size_bytes) or check_relations(message, index)
        if refusal is not None:
            return refusal
        key, put_id = scoped(message.tenant, name), message.put_id + index
        if self._put_requests.known(key, put_id, False, now) is not None:
            stored = catalog.objects.readable.get(key)
            return stored is not None and stored.put_id == put_id
        piece = self._preallocations.find(message.pieces[index], put_id, size_bytes, now)
        if piece is None:
            return True  # a late copy of the request that put it; the object was removed since
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
        self._put_requests.relate(stored, message, index)
        self._put_requests.finish(stored, checksums, now)
        where = piece.segment.name
        catalog.add_story(now, key, "put as #{} in one step, readable on {}", stored.object_id, where)
        return True


def _check_simple(policy: m.PutPolicy) -> Refusal | None:
    if policy.num_replicas > 1 or policy.is_durable or policy.preferred_segments or policy.is_same_host:
        return Refusal("invalid_policy", "a put with such a policy takes PutStart and PutEnd")
    return None
