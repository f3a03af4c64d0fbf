"""The master's HTTP side, for people, dashboards and scripts: paths and shapes of the existing package.

Decides nothing: every response comes from the core by a message, or is read from its state. It runs on the
master's event loop, so long responses (a list of all keys) are sent in chunks.
"""
