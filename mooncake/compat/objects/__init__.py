# SPDX-License-Identifier: Apache-2.0
"""The existing package's structured objects: several named values as one object in its store.

``transfer.py`` is the class that programs use. Below it: ``manifest.py`` (what is stored, and checks of what
is read), ``chunk_writer.py`` and ``chunk_reader.py`` (bytes to the store and back), ``bundles.py`` (put and
remove a bundle), ``members.py`` and ``tensor_members.py`` (arrays, bytes and tensors), ``row_codecs.py`` and
``nested_rows.py`` (columns of Python objects), ``dataproto.py`` and ``dataproto_ref.py``, ``catalog.py`` and
``catalog_transfer.py``. The store is any object with ``put``, ``get`` and ``remove``; its faster calls are
used where it has them.
"""
