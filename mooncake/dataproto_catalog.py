# SPDX-License-Identifier: Apache-2.0
"""Upstream's ``mooncake.dataproto_catalog``, by its name; see ``compat/objects/catalog.py``."""

from mooncake.compat.objects.catalog_transfer import DataProtoCatalog, DataProtoCatalogTransfer

__all__ = ["DataProtoCatalog", "DataProtoCatalogTransfer"]
