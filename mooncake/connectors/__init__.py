# SPDX-License-Identifier: Apache-2.0
"""The layer between an engine's KV memory and the store, for our engine and for others.

``kv_link`` has the contract (what any engine may expect of a KV cache outside its process), ``memory`` says
where an engine's blocks lie, ``store_link`` moves them layer by layer. These know no framework. A shell for
one engine (``vllm``, ``sglang``, ``lmcache``) implements that engine's interface with them; only shells may
know torch.
"""
