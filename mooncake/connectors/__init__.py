"""The room between an engine's KV memory and the store: whose engine it is doesn't matter here.

``link`` has the promises (what any engine may ask of a KV cache outside its process), ``memory`` says
where an engine's blocks lie, ``blocks`` moves them layer by layer. These know no framework. A shell for
one engine (``vllm``) says in that engine's words what is asked of them; only shells may know torch.
"""
