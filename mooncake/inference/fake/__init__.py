# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, a fast and exact test of a connection between engine and cache.

``model`` computes with whole numbers what a transformer computes with tensors: every layer's keys and values
depend on all those below, and the answer on reading them, so that a block that is wrong, torn, late
or another prompt's changes the answer. ``runner`` runs it in our engine, ``faults`` corrupts what a
link loads, ``server`` puts it behind our worker's API. Nothing here loads torch.
"""
