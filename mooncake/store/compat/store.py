"""``MooncakeDistributedStore``: the existing package's store, put together from its kinds of calls."""

from __future__ import annotations

import inspect
from typing import Any

from mooncake.store.compat.config import Words, words_of
from mooncake.store.compat.parallel import ParallelCalls
from mooncake.store.compat.removing import RemoveCalls
from mooncake.store.compat.replicas import ReplicaCalls
from mooncake.store.compat.safetensors import SafetensorCalls
from mooncake.store.compat.segments import SegmentCalls
from mooncake.store.compat.sessions import SessionCalls


class MooncakeDistributedStore(
    ParallelCalls, SafetensorCalls, SessionCalls, RemoveCalls, ReplicaCalls, SegmentCalls
):
    """A client of the store, with the calls and the numbers of the existing package.

    ``setup`` first; before it, and after ``close``, every call answers that there is nothing. New programs
    are better served by ``mooncake.store.Store``, which raises what went wrong.
    """

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Connect to a master and, with a ``global_segment_size``, lend it memory of this process.

        setup(local_hostname: str, metadata_server: str, global_segment_size: int, local_buffer_size: int,
        protocol: str, rdma_devices: str, master_server_addr: str, engine: object = None,
        enable_ssd_offload: bool = False, ssd_offload_path: str = '', tenant_id: str = 'default',
        enable_client_http_server: bool = False, client_http_port: int = 9300) -> int

        setup(config: dict) -> int, with these names as keys; sizes may be written '16MB'.

        Returns 0; -600 when a word cannot be; -1 when the master does not answer. The log says why.
        """
        config = args[0] if args else kwargs.get("config")
        if len(args) + len(kwargs) == 1 and isinstance(config, dict):
            return self._begin(lambda: words_of(config))
        words = Words(*args, **kwargs)
        return self._begin(lambda: words)


MooncakeDistributedStore.setup.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        *inspect.signature(Words).parameters.values(),
    ],
    return_annotation=int,
)
