# SPDX-License-Identifier: Apache-2.0
"""The existing package's structured objects: several named values as one object in its store.

``transfer.py`` is the class of programs. Below it: ``values.py`` (arguments and results), ``manifest.py``
(what is stored, and checks of what is read), ``bundles.py`` (bytes to the store and back, in chunks),
``members.py`` (arrays, bytes and tensors), ``row_codecs.py``, ``nested_rows.py`` and ``columns.py`` (columns
of Python objects), ``dataproto.py``, ``catalog.py`` and ``catalog_transfer.py``. The store is any object with
``put``, ``get`` and ``remove``; its faster calls are used where it has them.
"""
