# SPDX-License-Identifier: Apache-2.0
"""The package where tokens are computed: a small continuous-batching engine over a paged KV cache.

Read it in this order: ``request`` (prompt, parameters, progress), ``blocks`` (where its KV lies),
``scheduler`` (what runs in the next step), ``engine`` (the step loop), ``runner`` (a step becomes
tensors, logits become tokens), ``model`` (tensors become logits). The
first three are cores without torch. Nothing here knows the client, the protocol it used, or where cached
blocks of other machines lie: an engine reaches those only through a ``KvLink``.

Importing this package imports no torch; its modules do.
"""
