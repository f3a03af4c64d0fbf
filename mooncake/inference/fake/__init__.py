"""An engine without a model, so that whoever connects an engine to a cache can be told the truth fast.

``model`` computes with whole numbers what a transformer computes with tensors: every layer's keys and values
come from all those below, and the answer from reading them, so that a block that is wrong, torn, late
or somebody else's changes the answer. ``runner`` runs it in our engine, ``faults`` spoils what a
link brings, ``server`` puts it behind our worker's API. Nothing here loads torch.
"""
