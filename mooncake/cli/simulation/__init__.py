"""Commands that ask "what if": replay a trace on virtual time, and look for the cluster that is enough.

What runs is ``mooncake.sim``; here is only how people say what they want and how they see what came out.
"""
