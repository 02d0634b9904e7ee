"""The file format of ``torch.save``, read and written tensor by tensor.

It is a zip archive, not compressed: a pickle that refers to storages, and a record with the bytes of each. ``torch.load`` with
``mmap=True`` keeps every page in memory that it has read, and ``torch.save`` wants all tensors at once; neither is done here.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Hashable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_partrain import compat

#: Where the bytes of a tensor may begin, as for ``torch.save``: multiples of this.
ALIGNMENT = 64
#: From here on a record is written with the zip format's 64-bit sizes.
LARGE = 1 << 30
PART = 1 << 24


@dataclass(frozen=True, eq=False)
class Unread:
    """A tensor that lies in a file.

    Attributes:
        shape: of the whole.
        dtype: of its numbers.
        read: gives it, contiguous, on the host; anew with each call.
        same: equal for tensors that are known to be the same memory.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    same: Hashable = None

    @classmethod
    def of(cls, tensor: Tensor) -> Unread:
        """One that is in memory already.

        Raises:
            ValueError: for a sparse or quantized tensor.
        """
        _check_dense(tensor, "the checkpoint")
        shape, stride = tuple(tensor.shape), tensor.stride()
        same = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), shape, stride)
        return cls(shape, tensor.dtype, tensor.detach().cpu().contiguous, same if tensor.numel() else None)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def replaced(value: Any, change: Callable[[Any], Any]) -> Any:
    """``value`` with ``change(each)`` for each tensor in it, read or not. Dicts and lists are changed in place."""
    if isinstance(value, Tensor | Unread):
        return change(value)
    if isinstance(value, dict):
        for key in value:
            value[key] = replaced(value[key], change)
    elif isinstance(value, list):
        value[:] = [replaced(each, change) for each in value]
    elif type(value) is tuple:
        return tuple(replaced(each, change) for each in value)
    return value


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, in its own memory."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _check_dense(tensor: Tensor, where: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"{where} holds a sparse or quantized tensor of shape {tuple(tensor.shape)}: not supported.")


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def is_archive(path: Path) -> bool:
    """Whether a file is what torch writes since its version 1.6, or the beginning of it."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def refused_class(error: BaseException) -> str | None:
    """What ``torch.load(weights_only=True)`` has found that is neither tensor nor plain data, where ``error`` names it."""
    found = re.search(r"GLOBAL (\S+)", str(error)) if isinstance(error, pickle.UnpicklingError) else None
    return found[1] if found else None


def record_begin(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    """Where in an archive the bytes of a record begin: behind its header, its name, and what pads it."""
    file.seek(info.header_offset + 26)
    name, extra = file.read(2), file.read(2)
    return info.header_offset + 30 + int.from_bytes(name, "little") + int.from_bytes(extra, "little")


@contextmanager
def refusing(name: str) -> Any:
    """Errors of ``torch.load`` as a ValueError that says what is wrong with the file ``name``."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:  # it cannot be opened
            raise
        if found := refused_class(error):
            raise ValueError(
                f"{name} holds a {found}, which is neither tensor nor plain data. To load it could run code, so nothing of it was "
                "run. Write the checkpoint without it, such as with save_hyperparameters(ignore=[...])."
            ) from None
        first = (str(error) or type(error).__name__).strip().splitlines()[0]
        raise ValueError(f"{name} is no file of torch.save, or it is damaged ({first[:200]}).") from None


def load_plain(file: str | os.PathLike[str] | IO[bytes], name: str) -> Any:
    """``torch.load`` on the host, of tensors and plain data only.

    Raises:
        ValueError: that says what is wrong with ``name``.
    """
    with refusing(name):
        return torch.load(file, map_location="cpu", weights_only=True)


def check_sums(data: IO[bytes], name: str) -> None:
    """Read all of what ``torch.save`` wrote, as ``torch.load`` does not look at check sums.

    Raises:
        ValueError: when it has changed since; names it.
    """
    with refusing(name), zipfile.ZipFile(data) as archive:
        for info in archive.infolist():
            with archive.open(info) if info.CRC else nullcontext(io.BytesIO()) as record:  # torch may write none
                while record.read(PART):
                    pass
    data.seek(0)


def load(path: Path) -> Any:
    """What ``torch.save`` wrote, with an :class:`Unread` in place of every tensor. Of the file, only the pickle is read.

    Raises:
        ValueError: for what is no such file, is damaged, or holds other things than tensors and plain data; names it.
    """
    archive = zipfile.is_zipfile(path)  # before torch 1.6 it was none: then all of it is read
    records = Records(path) if archive else None
    with compat.FakeTensorMode() if archive else nullcontext():
        loaded = load_plain(path, str(path))
    return replaced(loaded, Unread.of if records is None else records.unread)


def _resolved(numbers: Tensor, conjugate: bool, negative: bool) -> Tensor:
    """What views that only say so stand for."""
    numbers = numbers.conj().resolve_conj() if conjugate else numbers
    return numbers.neg() if negative else numbers


class Records:
    """The storages of a torch file, by where their bytes begin."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at: dict[int, zipfile.ZipInfo] = {}
        self._good: set[int] = set()
        try:
            with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
                for info in archive.infolist():
                    self._at[record_begin(file, info)] = info
                    record = info.filename.partition("/")[2]
                    if record == "data.pkl" and info.CRC:  # torch does not look at it, and may write none
                        archive.read(info)
                    if record == "byteorder" and archive.read(info) != b"little":
                        raise ValueError(f"{path} was written on a machine with another byte order: not supported.")
        except (zipfile.BadZipFile, EOFError) as error:
            raise self._damaged(str(error)) from None

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is damaged: {what}.")

    def unread(self, fake: Tensor) -> Unread:
        """What stands for a tensor without memory that ``torch.load`` gave."""
        _check_dense(fake, str(self.path))
        shape, stride, offset = tuple(fake.shape), fake.stride(), int(fake.storage_offset())
        if not fake.numel():
            return Unread(shape, fake.dtype, lambda: torch.empty(shape, dtype=fake.dtype))
        begin, dtype, conjugate, negative = compat.checkpoint_offset(fake), fake.dtype, fake.is_conj(), fake.is_neg()
        if begin not in self._at:
            raise self._damaged(f"it has no record at {begin}, where a tensor should be")
        return Unread(
            shape,
            fake.dtype,
            lambda: _resolved(self._read(begin, dtype, offset, shape, stride), conjugate, negative),
            (self.path, begin, offset, shape, stride, conjugate, negative),
        )

    def _read(
        self, begin: int, dtype: torch.dtype, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> Tensor:
        info = self._at[begin]
        skip = offset * dtype.itemsize
        numbers = torch.empty(1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)), dtype=dtype)
        view = as_bytes(numbers)
        if info.compress_type != zipfile.ZIP_STORED or skip < 0 or skip + len(view) > info.file_size:
            raise self._damaged(f"{info.filename} has {info.file_size} bytes, and a tensor ends at {skip + len(view)}")
        with open(self.path, "rb") as file:
            if begin not in self._good and len(view) < info.file_size:
                self._check(info, _check_sum(file, begin, info.file_size))
            file.seek(begin + skip)
            if file.readinto(view) != len(view):
                raise self._damaged(f"it ends within {info.filename}")
        if len(view) == info.file_size:
            self._check(info, zlib.crc32(view))
        self._good.add(begin)
        return numbers.as_strided(shape, stride).contiguous()

    def _check(self, info: zipfile.ZipInfo, found: int) -> None:
        if info.CRC and found != info.CRC:
            raise self._damaged(f"{info.filename} has changed since it was written (check sum {found}, not {info.CRC})")


def _check_sum(file: IO[bytes], begin: int, size: int) -> int:
    file.seek(begin)
    found = 0
    while size and (part := file.read(min(size, PART))):
        found, size = zlib.crc32(part, found), size - len(part)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Storage:
    kind: type
    key: str
    count: int


class _Pickler(pickle.Pickler):
    """Writes tensors as ``torch.save`` does, and remembers which bytes have to follow."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=2)
        self.tensors: list[Unread] = []
        self._keys: dict[Hashable, str] = {}

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = Unread.of(value)
        if not isinstance(value, Unread):
            return NotImplemented
        key = self._keys.get(value.same) if value.same is not None else None
        if key is None:
            key = str(len(self.tensors))
            self.tensors.append(value)
            if value.same is not None:
                self._keys[value.same] = key
        return compat.saved_tensor(value.dtype, value.shape, lambda kind, count: _Storage(kind, key, count))

    def persistent_id(self, value: Any) -> Any:
        return ("storage", value.kind, value.key, "cpu", value.count) if isinstance(value, _Storage) else None


def save(value: Any, path: Path) -> None:
    """Write ``value``, in which tensors may be :class:`Unread`, to a new file that ``torch.load`` reads, with ``mmap=True`` too.

    One tensor is in memory at a time.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    with open(path, "wb") as file:
        with zipfile.ZipFile(file, "w") as archive:
            _put(archive, file, "data.pkl", buffer.getbuffer())
            _put(archive, file, "byteorder", b"little")
            for number, tensor in enumerate(pickler.tensors):
                _put(archive, file, f"data/{number}", as_bytes(tensor.read()))
            _put(archive, file, "version", b"3\n")
        file.flush()
        os.fsync(file.fileno())


def _put(archive: zipfile.ZipFile, file: IO[bytes], name: str, data: bytes | memoryview) -> None:
    info, large = zipfile.ZipInfo(f"archive/{name}"), len(data) >= LARGE
    header = file.tell() + 30 + len(info.filename) + 20 * large + 4
    padding = -header % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + bytes(padding)
    with archive.open(info, "w", force_zip64=large) as out:
        out.write(data)
