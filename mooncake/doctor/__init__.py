# SPDX-License-Identifier: Apache-2.0
"""Finds the broken link of a live KV cache deployment, ours or one of plain vLLM or SGLang servers.

``examination.py`` collects facts (``facts.py``) through probes and canaries, ``checks.py`` turns facts into
findings, whose codes and remedies are ``findings.py``'s. It changes nothing in the cluster: its prompts are
random, short and few, and its object in the store is removed.
"""
