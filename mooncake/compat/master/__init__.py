# SPDX-License-Identifier: Apache-2.0
"""The master's HTTP side, for people, dashboards and scripts: paths and shapes of the existing package.

Decides nothing: every response comes from the core by a message, or is read from its state. It runs on the
master's event loop, so long responses (a list of all keys) are sent in chunks.
"""

from mooncake.store.master.context import MasterHttp


def load_http() -> MasterHttp:
    """Import the HTTP side, for the program that starts a master."""
    from mooncake.compat.master import app, master_metrics  # late: a web framework takes half a second

    return MasterHttp(app.make_app, app.OPEN_PATHS, master_metrics.summary)
