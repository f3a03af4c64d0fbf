# SPDX-License-Identifier: Apache-2.0
"""Contents of a version on this host: a folder of files, or buffers in memory, read and written by chunk.

A folder's files are found once; safetensors files also show the places of their tensors, by which
``manifest.py`` cuts chunks and ``delta.py`` compares versions. A file that was changed since is noticed by
its size and times when a chunk is read, and its chunks then count as unverified. All calls block: they are
made in threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import msgspec
import numpy as np

from mooncake.errors import InvalidArgument, StorageError
from mooncake.files import file_state
from mooncake.p2p.manifest import (
    MAX_CHUNKS,
    MAX_ITEMS,
    Manifest,
    ManifestItem,
    TensorSpan,
    chunk_bytes_for,
    chunk_sizes_of,
    path_trouble,
    sendable_items,
)
from mooncake.transfer.memory import span_and_export

MAX_HEADER_BYTES = 100 << 20
ELEMENT_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
}
"""Bytes of an element by the name of its type in a safetensors file; all other types are compared by byte."""
NUM_HASH_THREADS = 4
MAX_OPEN_FILES = 256
"""Files that a folder keeps open: one may have more files than a process may open."""


class _HeaderTensor(msgspec.Struct):
    """An entry of a safetensors file's header."""

    dtype: str
    data_offsets: tuple[int, int]


_header_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor_decoder = msgspec.json.Decoder(_HeaderTensor)

Noted = Callable[[int, int], None]
"""Callback with (bytes done, bytes in all)."""


class Content(Protocol):
    """Bytes of a version, by item number and offset."""

    def read(self, item: int, offset: int, size_bytes: int) -> bytes:
        """Raises StorageError when the bytes can't be read, or are fewer."""
        ...

    def write(self, item: int, offset: int, content: bytes | memoryview) -> None:
        """Raises StorageError when they can't be written."""
        ...

    def is_unchanged(self, item: int) -> bool:
        """Whether nothing else has changed the item since its digests were computed."""
        ...

    def close(self) -> None: ...


@dataclass
class OpenFile:
    """A file descriptor, and the number of threads that use it."""

    fd: int
    num_users: int = 0


class FolderContent:
    """Files below ``root``.

    Args:
        states: size and times of each file when its digests were computed.
        is_writable: whether ``write`` is called.
        allowed: folder that the files must lie in, wherever links lead.
    """

    def __init__(
        self,
        root: Path,
        items: Sequence[ManifestItem],
        states: Sequence[tuple[int, ...]] | None = None,
        *,
        is_writable: bool = False,
        allowed: Path | None = None,
    ) -> None:
        self.root = root
        self._allowed = None if allowed is None else allowed.resolve()
        self._items = items
        self._states = states
        self._flags = (os.O_RDWR if is_writable else os.O_RDONLY) | os.O_CLOEXEC
        self._files: dict[int, OpenFile] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    @property
    def states(self) -> list[tuple[int, ...]]:
        """Size and times of each file when its digests were computed."""
        assert self._states is not None, "its digests are not computed yet"
        return list(self._states)

    def read(self, item: int, offset: int, size_bytes: int) -> bytes:
        try:
            with self._file(item) as fd:
                found = os.pread(fd, size_bytes, offset)
        except OSError as error:
            raise self._trouble(item, error) from error
        if len(found) != size_bytes:
            path = self.root / self._items[item].name
            raise StorageError(f"{path} is shorter than when it was registered; register it again")
        return found

    def write(self, item: int, offset: int, content: bytes | memoryview) -> None:
        view = memoryview(content)
        try:
            with self._file(item) as fd:
                while view:
                    written = os.pwrite(fd, view, offset)
                    view, offset = view[written:], offset + written
        except OSError as error:
            raise self._trouble(item, error) from error

    def is_unchanged(self, item: int) -> bool:
        if self._states is None:
            return True  # this process alone writes it
        try:
            with self._lock:
                return file_state(os.stat(self.root / self._items[item].name)) == self._states[item]
        except OSError:
            return False

    def make(self) -> None:
        """Create every file that does not exist, with its size."""
        for number, item in enumerate(self._items):
            path = self.root / item.name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(path, flags, 0o644)
                try:
                    os.ftruncate(fd, item.size_bytes)
                finally:
                    os.close(fd)
            except OSError as error:
                raise self._trouble(number, error) from error

    def sync(self) -> None:
        """Make all files and folders survive a loss of power."""
        folders = {self.root}
        for number, item in enumerate(self._items):
            try:
                with self._file(number) as fd:
                    os.fsync(fd)
            except OSError as error:
                raise self._trouble(number, error) from error
            path = self.root / item.name
            folders.update(parent for parent in path.parents if parent.is_relative_to(self.root))
        for folder in folders:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

    def move(self, root: Path) -> None:
        """Rename the folder; reads in other threads go on. From now on changes of its files are noticed."""
        with self._lock:
            os.rename(self.root, root)
            self.root, self._flags = root, os.O_RDONLY | os.O_CLOEXEC
            self._states = file_states(root, self._items)

    def close(self) -> None:
        """Refuse further reads and writes; files that threads are reading are closed by them."""
        with self._lock:
            self._is_closed = True
            files, self._files = self._files, {}
            unused = [one for one in files.values() if not one.num_users]
        for one in unused:
            os.close(one.fd)

    @contextlib.contextmanager
    def _file(self, item: int) -> Iterator[int]:
        """File descriptor of an item, kept open if the folder has few files."""
        with self._lock:
            file = self._files.get(item)
            if self._is_closed:
                raise StorageError(f"{self.root} is no longer served; register it again")
            if file is None:
                file = OpenFile(self._opened(item))
                if len(self._files) < MAX_OPEN_FILES:
                    self._files[item] = file
            file.num_users += 1
        try:
            yield file.fd
        finally:
            with self._lock:
                file.num_users -= 1
                is_last = not file.num_users and self._files.get(item) is not file
            if is_last:
                os.close(file.fd)

    def _opened(self, item: int) -> int:
        path = self.root / self._items[item].name
        fd = os.open(path, self._flags)
        # Looked up once more: it may have become a link since the folder was searched.
        if self._allowed is not None and not _path_of(fd).is_relative_to(self._allowed):
            os.close(fd)
            raise StorageError(f"{path} leads out of {self._allowed}; register files in it")
        return fd

    def _trouble(self, item: int, error: OSError) -> StorageError:
        path = self.root / self._items[item].name
        return StorageError(f"{path}: {error.strerror}; check the disk and the folder's permissions")


class BufferContent:
    """Contiguous buffers of this process, by name. They must not change while they are registered."""

    def __init__(self, buffers: Mapping[str, Any], *, is_writable: bool = False) -> None:
        self._views = [_bytes_of(name, buffers[name]) for name in sorted(buffers)]
        if is_writable and any(view.readonly for view in self._views):
            raise InvalidArgument("buffers", sorted(buffers), "buffers that may be written to")
        self._spans = [_span(view) for view in self._views]
        self._is_final = False
        self._lock = threading.Lock()
        self.items = [
            ManifestItem(name, view.nbytes, [TensorSpan(name, _element_bytes(buffers[name]), 0, view.nbytes)])
            for name, view in zip(sorted(buffers), self._views, strict=True)
        ]

    def read(self, item: int, offset: int, size_bytes: int) -> bytes:
        return bytes(self._view(item)[offset : offset + size_bytes])

    def write(self, item: int, offset: int, content: bytes | memoryview) -> None:
        with self._lock:  # the memory may be given to the next load as soon as this one has ended
            if self._is_final:
                raise StorageError(f"buffer {self.items[item].name} is whole; load it again to change it")
            self._view(item)[offset : offset + len(content)] = content

    def finish(self) -> None:
        """Refuse further writes: a thread of the load may have one left."""
        with self._lock:
            self._is_final = True

    def is_unchanged(self, item: int) -> bool:
        return False  # memory has no times: each chunk is verified again before it is sent

    def is_same_memory(self, other: Content) -> bool:
        """Whether each item has its bytes at the place where ``other`` has them."""
        return isinstance(other, BufferContent) and self._spans == other._spans

    def overlaps(self, other: Content) -> bool:
        """Whether a byte of memory belongs to both."""
        if not isinstance(other, BufferContent):
            return False
        ends = [0, 0]
        spans = [(*span, owner) for owner, one in enumerate((self, other)) for span in one._spans]
        for start, end, owner in sorted(spans):
            if start < ends[1 - owner]:
                return True
            ends[owner] = max(ends[owner], end)
        return False

    def close(self) -> None:
        with self._lock:
            self._views = []

    def _view(self, item: int) -> memoryview:
        try:
            return self._views[item]
        except IndexError:
            name = self.items[item].name
            raise StorageError(f"buffer {name} is no longer served; register it again") from None


def find_files(root: Path, allowed: Path | None = None) -> list[ManifestItem]:
    """All files below ``root``, in the order of their names, with the places of tensors.

    Links to files are followed, because model caches consist of them. What can't be sent is an error, because
    a version without it would be taken for a whole one.

    Args:
        allowed: folder that the files themselves must lie in, wherever links lead.

    Raises:
        InvalidArgument: it is no folder, has no files, a file has a name that can't be sent, or there is a
            link to a folder, a link to nothing, or something that is neither a file nor a folder.
        StorageError: a part of it can't be read.
    """
    if not os.path.isdir(root):  # False also where no disk can have it
        raise InvalidArgument("folder", str(root), "a folder with the files of a model or checkpoint")
    found: list[ManifestItem] = []
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        for name in folders:
            if (Path(folder) / name).is_symlink():
                raise InvalidArgument(
                    "folder", str(Path(folder) / name), "files and folders; copy what this link leads to"
                )
        for name in names:
            path = Path(folder) / name
            relative = path.relative_to(root).as_posix()
            try:
                status = path.stat()
            except OSError as error:
                if path.is_symlink() and not path.exists():
                    allowed_here = "files and folders; remove this link, which leads to nothing"
                    raise InvalidArgument("folder", str(path), allowed_here) from error
                _unreadable(error)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument("folder", str(path), "files and folders; remove this special file")
            why = path_trouble(relative)
            if why:
                raise InvalidArgument("folder", str(path), f"files with other names ({why})")
            if allowed is not None and not path.resolve().is_relative_to(allowed.resolve()):
                raise InvalidArgument(
                    "folder", str(path), f"files in {allowed}, which this link leads out of"
                )
            found.append(ManifestItem(relative, status.st_size, _tensors_of(path)))
    if not 0 < len(found) <= MAX_ITEMS:
        raise InvalidArgument("folder", str(root), f"a folder with 1 to {MAX_ITEMS} files, not {len(found)}")
    return sorted(found, key=lambda item: item.name)


def file_states(root: Path, items: Sequence[ManifestItem]) -> list[tuple[int, ...]]:
    """Size and times of each file, by which a later change is noticed.

    Raises:
        StorageError: a file can't be found, or has another size than its item.
    """
    states: list[tuple[int, ...]] = []
    for item in items:
        try:
            status = os.stat(root / item.name)
        except OSError as error:
            _unreadable(error)
        if status.st_size != item.size_bytes:
            raise StorageError(f"{root / item.name} has changed; register the folder when it is complete")
        states.append(file_state(status))
    return states


def _unreadable(error: OSError) -> NoReturn:
    """Raise what says which part of a folder can't be read."""
    raise StorageError(f"{error.filename}: {error.strerror}; check the folder and its permissions") from error


def _path_of(fd: int) -> Path:
    return Path(os.readlink(f"/proc/self/fd/{fd}"))


def make_manifest(
    kind: str, items: Sequence[ManifestItem], content: Content, progress: Noted | None = None
) -> Manifest:
    """Compute the digests of all chunks of ``content``.

    Raises:
        InvalidArgument: it would have too many chunks, or names that no peer accepts.
        StorageError: it can't be read.
    """
    items = sendable_items(items)
    size_bytes = sum(item.size_bytes for item in items)
    chunk_bytes = chunk_bytes_for(size_bytes)
    places: list[tuple[int, int, int]] = []
    for number, item in enumerate(items):
        offset = 0
        for size in chunk_sizes_of(item.size_bytes, item.tensors, chunk_bytes):
            places.append((number, offset, size))
            offset += size
    if len(places) > MAX_CHUNKS:
        raise InvalidArgument("size", size_bytes, f"contents of at most {MAX_CHUNKS} chunks")
    done = 0
    digests = bytearray()
    with ThreadPoolExecutor(min(NUM_HASH_THREADS, os.cpu_count() or 1)) as threads:
        # In groups, because map() would queue every chunk at once.
        for at in range(0, len(places), 256):
            group = places[at : at + 256]
            for digest in threads.map(lambda place: hashlib.sha256(content.read(*place)).digest(), group):
                digests += digest
            done += sum(size for _, _, size in group)
            if progress is not None:
                progress(done, size_bytes)
    return Manifest(kind, items, [size for _, _, size in places], bytes(digests))


def _tensors_of(path: Path) -> list[TensorSpan]:
    """Places of the tensors in a safetensors file; empty for any other file, or a damaged one."""
    if path.suffix != ".safetensors":
        return []
    try:
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, path.stat().st_size - 8):
                return []
            header = _header_decoder.decode(file.read(header_bytes))
        start, size = 8 + header_bytes, path.stat().st_size
        spans = []
        for name, encoded in header.items():
            if name == "__metadata__":
                continue
            one = _tensor_decoder.decode(encoded)
            begin, end = one.data_offsets
            element = ELEMENT_BYTES.get(one.dtype, 1)
            if not 0 <= begin <= end <= size - start or (end - begin) % element:
                return []
            spans.append(TensorSpan(name, element, start + begin, end - begin))
    except (OSError, msgspec.MsgspecError, RecursionError):
        return []
    return sorted(spans, key=lambda span: (span.offset, span.name))


def _bytes_of(name: str, buffer: Any) -> memoryview:
    if path_trouble(name):
        raise InvalidArgument("buffers", name, f"another name ({path_trouble(name)})")
    if hasattr(buffer, "data_ptr"):  # a tensor: its bytes without a copy, bfloat16 included
        address, size, *_ = span_and_export(buffer)
        memory = (ctypes.c_ubyte * size).from_address(address)
        memory.owner = buffer  # type: ignore[attr-defined]  # the memory lives as long as any view of it
        return memoryview(memory).cast("B")
    if isinstance(buffer, tuple):  # an address, which keeps no memory alive
        raise InvalidArgument("buffers", name, "an array, a tensor on the CPU, or another buffer")
    export = span_and_export(buffer)[3]
    return memoryview(bytearray()) if export is None else memoryview(export)  # type: ignore[arg-type]


def _span(view: memoryview) -> tuple[int, int]:
    """Addresses of the first byte and of the one after the last; of no bytes, both are 0."""
    start = np.frombuffer(view, dtype=np.uint8).ctypes.data if view.nbytes else 0
    return start, start + view.nbytes


def _element_bytes(buffer: Any) -> int:
    if hasattr(buffer, "element_size"):
        size = buffer.element_size()
    else:  # not all of numpy's types have a format that a view may have
        size = buffer.itemsize if hasattr(buffer, "itemsize") else memoryview(buffer).itemsize
    return int(size) if 0 < size <= 16 else 1  # a record is not one number
