# SPDX-License-Identifier: Apache-2.0
"""The console: pages in a browser that show a running cluster, or a store without a gateway.

Every page has a twin in JSON under the same path with ``.json``. ``site.py`` serves both and ``access.py``
decides what a visitor may see; the other modules turn the answers of the gateway and of the store's master
into the content of one page each. Nothing below this room knows it: the command that starts a gateway or a
master adds it (``docs/decisions/040-rooms-for-seeing.md``).
"""
