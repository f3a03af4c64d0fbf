"""What was found wrong in a file of records, in words, and the copies that are kept of it.

Nothing is cut off a file, and no file is written anew, before what it was lies beside it.
"""

from __future__ import annotations

from mooncake.files import Directory
from mooncake.files.frames import Damage, Scan

__all__ = ["Damage", "describe_damage", "keep_copy"]


def describe_damage(found: Scan) -> str:
    """The damage, for people: where, and what is left."""
    where = ", ".join(map(str, found.damages[:3]))
    if len(found.damages) > 3:
        where += f" and {len(found.damages) - 3} more places"
    num_behind = len(found.bodies) - found.num_before
    return f"damage of {where}; {found.num_before} whole records before it, {num_behind} behind"


def keep_copy(directory: Directory, name: str, content: bytes, why: str) -> str:
    """Keep ``content`` beside ``name`` under a name that nothing has yet; its path. Raises OSError."""
    there = set(directory.names())
    copies = (f"{name}.{why}" + (f".{number}" if number else "") for number in range(len(there) + 1))
    copy = next(one for one in copies if one not in there)
    file = directory.open(copy)
    try:
        file.append(content)
        file.sync()
    except OSError:
        directory.remove(copy)
        raise
    finally:
        file.close()
    directory.sync()
    return str(directory.path / copy)
