# SPDX-License-Identifier: Apache-2.0
"""Limits of connections that follow from the number of files that the process may open.

A process without free descriptors can't answer, so every server keeps its connections below this limit.
"""

from __future__ import annotations

import contextlib
import resource

MAX_OPEN_FILES = 1 << 16
"""Value to which the soft limit of files is raised, where the hard limit allows it."""

RESERVED_FILES = 64
"""Descriptors that a process needs in addition to its connections: listeners, logs, the store, the model."""

MAX_CONNECTIONS = 1 << 14


def connections_within(num_files: int) -> int:
    """Number of connections for a process that may open ``num_files`` (negative: any number).

    Half of the files are left for answering: a gateway has a connection to a worker for each of its
    clients.
    """
    if num_files < 0:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(8, (num_files - RESERVED_FILES) // 2))


def connection_limit(wanted: int = 0) -> int:
    """Limit of a server's connections: ``wanted`` (0: any number), below the process's limit of files.

    The soft limit is raised first, where it is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted and wanted <= connections_within(soft):
        return wanted
    goal = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < goal:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (goal, hard))
            soft = goal
    room = connections_within(soft)
    return min(wanted, room) if wanted else room


def default_max_connections() -> int:
    """About half of the files that this process may open, so that peers can't take them all."""
    return connections_within(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard one; only for processes of this package."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
