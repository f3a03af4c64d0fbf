"""The master's HTTP side, for people, dashboards and scripts: paths and shapes of the existing package.

Decides nothing: every answer comes from the core by a message, or is read off its state. It runs on the
master's loop, so what may be long (a list of all keys) is sent in pieces.
"""
