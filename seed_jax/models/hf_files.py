"""Files of a model, on a disk or in an object store: ranges of rows of safetensors, a writer that streams, a directory
that is replaced as a whole.

A safetensors file is 8 bytes (the length of the header, little-endian), a JSON header of `name: {dtype, shape,
data_offsets}` with offsets from the header's end, and the tensors, row-major. Here a tensor is a matrix: its first axis
[rows] by all others [columns]. Nothing is copied whole and nothing is mapped: a mapped file counts as memory of the
process, and an object store cannot be mapped.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import math
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence

import ml_dtypes
import numpy as np
from etils import epath

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
CODES = {np.dtype(dtype): code for code, dtype in DTYPES.items()}
WEIGHTS = (".safetensors", ".bin", ".pth", ".h5", ".msgpack", ".onnx")  # what nobody needs a copy of
BLOCK = 16 << 20  # bytes that are read or written at once
TILE = 64  # rows that are copied at once
READERS = 4  # blocks under way from an object store, where one stream is slower than the network
MAX_HEADER = 100 << 20  # bytes; the format's own limit


class Safetensors:
  """The tensors of one file or of an index of shards: headers are read at once, rows when they are asked for.

  Attributes: `where` for messages; `shapes` and `dtypes` by name (a dtype is None where it is no float); `bytes_read`,
  of tensors.

  Raises:
    FileNotFoundError: no weights, or a shard that the index names is missing.
    ValueError: a damaged file or index.
  """

  def __init__(self, directory: epath.Path):
    self.where, self.bytes_read = str(directory), 0
    self.shapes: dict[str, tuple[int, ...]] = {}
    self.dtypes: dict[str, np.dtype | None] = {}
    self._places: dict[str, tuple[epath.Path, int]] = {}  # name -> its file and first byte
    self._idle: dict[epath.Path, collections.deque] = {}  # open files that nobody reads just now
    self._pool = None
    placed = _weight_map(directory)
    for name in [SINGLE] if placed is None else sorted(set(placed.values())):
      file = directory / name
      if not file.exists():
        raise FileNotFoundError(f"{directory / INDEX} names {name}, which is not there")
      self._idle[file] = collections.deque()
      for key, dtype, shape, start in _header(file):
        if key in self._places:
          raise ValueError(f"{directory}: tensor {key} is in {name} and in another shard too")
        self._places[key], self.shapes[key] = (file, start), shape
        self.dtypes[key] = np.dtype(DTYPES[dtype]) if dtype in DTYPES else None
    lost = sorted(set(placed or ()) - set(self._places))
    if lost:
      raise ValueError(f"{directory / INDEX} names {len(lost)} tensors that its files do not hold, such as {lost[0]}")
    for key, name in (placed or {}).items():
      if self._places[key][0] != directory / name:  # which of the two is the mistake, nobody knows
        raise ValueError(f"{directory / INDEX} names {name} for {key}, which is in {self._places[key][0].name}")
    if "://" in self.where:
      self._pool = concurrent.futures.ThreadPoolExecutor(READERS)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self._pool is not None:
      self._pool.shutdown(cancel_futures=True)
    for files in self._idle.values():
      while files:
        files.pop().close()

  def read(self, name: str) -> np.ndarray:
    """A whole tensor."""
    rows, columns = self._matrix(name)
    out = np.empty((rows, columns), self._dtype(name))
    self.fill(name, [((0, rows), (0, columns), out)])
    return out.reshape(self.shapes[name])

  def fill(self, name: str, parts: Sequence[tuple[tuple[int, int], tuple[int, int], np.ndarray]]) -> None:
    """Writes parts of a tensor to where they belong; a row that several parts need is read once.

    Args:
      name: the tensor.
      parts: of each its rows (start, stop), its columns (start, stop), and the array [rows, columns] to fill, of any
        dtype and strides. Whole rows are read: a store has no cheap access to columns.
    """
    for first, block in self._blocks(name, [rows for rows, _, _ in parts]):
      for (start, stop), columns, out in parts:
        low, high = max(start, first), min(stop, first + len(block))
        if low < high:
          _copy(out[low - start : high - start], block[low - first : high - first, slice(*columns)])

  def same(self, one: str, other: str) -> bool:
    """Whether two tensors are equal, compared a block of rows at a time."""
    if self.shapes[one] != self.shapes[other]:
      return False
    spans = [(0, self._matrix(one)[0])]
    blocks = zip(self._blocks(one, spans), self._blocks(other, spans, self._step(one)), strict=True)
    return all(np.array_equal(left, right) for (_, left), (_, right) in blocks)

  def _blocks(self, name, spans, step: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
    """The first row and the rows of each block that covers `spans`, ascending."""
    step = step or self._step(name)
    jobs = [(at, min(at + step, stop)) for start, stop in _union(spans) for at in range(start, stop, step)]
    for start, block in self._ahead(name, jobs):
      self.bytes_read += block.nbytes
      yield start, block

  def _ahead(self, name, jobs):
    if self._pool is None:
      yield from ((job[0], self._rows(name, *job)) for job in jobs)
      return
    waiting: collections.deque = collections.deque()
    for job in [*jobs, *[None] * READERS]:
      if len(waiting) == READERS or (job is None and waiting):
        start, block = waiting.popleft()
        yield start, block.result()
      if job is not None:
        waiting.append((job[0], self._pool.submit(self._rows, name, *job)))

  def _rows(self, name, start, stop) -> np.ndarray:
    (file, at), (_, columns), dtype = self._places[name], self._matrix(name), self._dtype(name)
    row = columns * dtype.itemsize
    try:
      handle = self._idle[file].pop()
    except IndexError:
      handle = file.open("rb")
    handle.seek(at + start * row)
    content = handle.read((stop - start) * row)
    self._idle[file].append(handle)
    if len(content) != (stop - start) * row:
      raise ValueError(f"{file} ended within tensor {name}: {len(content)} of {(stop - start) * row} bytes")
    return np.frombuffer(content, dtype).reshape(stop - start, columns)

  def _matrix(self, name) -> tuple[int, int]:
    shape = self.shapes[name]
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)

  def _step(self, name) -> int:
    return max(BLOCK // (self._matrix(name)[1] * self._dtype(name).itemsize), 1)

  def _dtype(self, name) -> np.dtype:
    if self.dtypes[name] is None:
      raise ValueError(f"{self.where}: {name} is not stored as one of {', '.join(DTYPES)}")
    return self.dtypes[name]


class Writer:
  """One safetensors file, written front to back: the header first, then the tensors in the order of `tensors`.

  with Writer(path, {name: (dtype, shape)}) as file: file.write(matrix), for each tensor.
  """

  def __init__(self, path: epath.Path, tensors: dict[str, tuple[np.dtype, tuple[int, ...]]]):
    self._path, at, header = path, 0, {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in tensors.items():
      end = at + math.prod(shape) * dtype.itemsize
      header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [at, end]}
      at = end
    head = json.dumps(header, separators=(",", ":")).encode()
    self._head, self._left = head + b" " * (-len(head) % 8), at  # the format asks for tensors that begin at words

  def __enter__(self):
    self._file = self._path.open("wb")
    self._file.write(len(self._head).to_bytes(8, "little") + self._head)
    return self

  def write(self, matrix: np.ndarray) -> None:
    """The next rows [rows, columns], of any strides; a block at a time, so that no second copy is made."""
    step = max(BLOCK // max(matrix[:1].nbytes, 1), 1)
    for start in range(0, len(matrix), step):
      self._file.write(matrix[start : start + step].tobytes())
    self._left -= matrix.nbytes

  def __exit__(self, kind, *_):
    self._file.close()
    if kind is None and self._left:
      raise ValueError(f"{self._path} lacks {self._left} bytes of what its header promises")


@contextlib.contextmanager
def local_copy(path):
  """`path` itself, or a temporary copy of a remote file, or of what is no weights but GGUF in a remote directory."""
  if "://" not in str(path):
    yield pathlib.Path(path)
    return
  remote = epath.Path(path)
  if not remote.exists():
    raise FileNotFoundError(f"no such model: {path}")
  with tempfile.TemporaryDirectory() as temporary:
    local = pathlib.Path(temporary, remote.name)
    if remote.is_dir():
      local.mkdir()
      for file in remote.iterdir():
        if file.is_file() and file.suffix not in WEIGHTS:
          file.copy(local / file.name)
    else:
      remote.copy(local)
    yield local


@contextlib.contextmanager
def replacing(path):
  """A directory to fill, which then takes the place of `path`; on an error it goes, and the old one is untouched.

  A store has no rename of directories. There the place itself is filled: the former config.json and weights go first,
  and a reader without config.json finds no model; whoever fills writes it last.
  """
  path = epath.Path(path)
  if path.exists() and not (path.is_dir() and ((path / "config.json").exists() or not any(path.iterdir()))):
    raise ValueError(f"{path} exists and is not a model directory; choose another path or remove it")
  if "://" in str(path):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").unlink(missing_ok=True)
    for file in list(path.iterdir()):
      if file.suffix == ".safetensors" or file.name == INDEX:
        file.unlink()
    yield path
    return
  path = pathlib.Path(path).absolute()
  path.parent.mkdir(parents=True, exist_ok=True)
  fresh, old = (path.with_name(f".{path.name}.{kind}-{uuid.uuid4().hex[:8]}") for kind in ("new", "old"))
  fresh.mkdir()
  try:
    yield fresh
    if path.exists():
      path.rename(old)
    try:
      fresh.rename(path)
    except OSError:
      if old.exists():
        old.rename(path)
      raise
  finally:
    shutil.rmtree(fresh, ignore_errors=True)
    if path.exists():
      shutil.rmtree(old, ignore_errors=True)


def read_json(path: epath.Path) -> dict:
  """An object in a JSON file; ValueError in one line where it holds something else."""
  try:
    values = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error
  if not isinstance(values, dict):
    raise ValueError(f"{path} holds a {type(values).__name__}, not an object")
  return values


def write_json(path: epath.Path, values: dict) -> None:
  path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _copy(out: np.ndarray, block: np.ndarray) -> None:
  """Rows into the rows of `out`, which may lie transposed: few at a time, so that both stay in the cache."""
  for start in range(0, len(block), TILE):
    out[start : start + TILE] = block[start : start + TILE].astype(out.dtype, copy=False)


def _weight_map(directory) -> dict[str, str] | None:
  """Tensor -> file of the index, or None where there is one file without an index."""
  index = directory / INDEX
  if index.exists():
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not all(isinstance(file, str) and "/" not in file for file in placed.values()):
      raise ValueError(f"{index} has no weight_map of tensor names to file names beside it")
    return placed
  if not (directory / SINGLE).exists():
    pickles = ", ".join(sorted(file.name for file in directory.glob("*.bin")))
    hint = f"; {pickles} is a pickle and is not read: convert it to safetensors" if pickles else ""
    raise FileNotFoundError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")
  return None


def _header(file: epath.Path) -> list[tuple[str, str, tuple[int, ...], int]]:
  """(name, dtype code, shape, first byte) of each tensor of a file, checked against the file's length."""
  length = file.stat().length

  def fault(why):
    return ValueError(f"{file} is not a readable safetensors file: {why}")

  with file.open("rb") as handle:
    size = int.from_bytes(handle.read(8), "little")
    if not 0 < size <= min(length - 8, MAX_HEADER):
      raise fault(f"its header would have {size} bytes, the file has {length}")
    try:
      header = json.loads(handle.read(size))
      tensors = [
        (name, str(entry["dtype"]), tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
        for name, entry in header.items()
        if name != "__metadata__"
      ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise fault(f"its header cannot be read ({type(error).__name__}: {error})") from error
  found = []
  for name, dtype, shape, start, end in tensors:
    wanted = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize if dtype in DTYPES else end - start
    if not 0 <= start <= end <= length - 8 - size or min(shape, default=0) < 0 or end - start != wanted:
      raise fault(f"tensor {name} {shape} would lie at bytes {start} to {end} of {length - 8 - size}")
    found.append((name, dtype, shape, 8 + size + start))
  return found


def _union(spans) -> list[tuple[int, int]]:
  """The same rows as disjoint spans, ascending."""
  joined: list[tuple[int, int]] = []
  for start, stop in sorted(spans):
    if joined and start <= joined[-1][1]:
      joined[-1] = joined[-1][0], max(stop, joined[-1][1])
    elif start < stop:
      joined.append((start, stop))
  return joined
