# SPDX-License-Identifier: Apache-2.0
"""The cluster on virtual time: the real cores, a simulated network, and faults drawn from a seed.

No shell is imported here. What a socket, a transfer or a clock would do, ``kernel.py``, ``network.py``
and ``transfer_run.py`` do; what the master, a node's membership, a client's operations and a batch
over several rails decide is the code that runs in production. ``python -m mooncake.sim --seeds 100``
runs a sweep.
"""
