"""The surface of the existing package's ``mooncake.store``, on this store.

Programs written for that package keep their calls and their numbers. Where it answers with a bare number,
the reason is logged here (logger ``mooncake.store``); where it crashed, blocked or went on in silence,
this one answers. ``docs/store.md`` lists what differs. ``store.py`` puts the class together, ``lifecycle.py``
is what every call goes through, ``codes.py`` the one table of numbers.
"""
