"""Records on disk: a TFDS dataset in ArrayRecord files, and a JSONL file that grows while a run goes on.

Neither needs TensorFlow, neither runs code when it is read, and a process killed at any point leaves what was there
before or what was to be written, never half of it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

Schema = Mapping[
  str, str
]  # field -> "text" | "texts" (a list) | "int" | "bool" | a numpy dtype, meaning a vector of any length


def write_dataset(directory: str | os.PathLike, schema: Schema, records: Iterable[Mapping[str, Any]]) -> None:
  """Writes records as the split `train` of a TFDS dataset, in the given order, in place of what was there.

  Vectors are kept exactly, for any of bool, int32, int64, float32 (TFDS would narrow a float64); texts may hold any
  code point. The set is written beside `directory` and moved when complete. In object storage (`gs://`) its description
  file comes last and stands for completeness.
  """
  directory = epath.Path(directory)
  if _remote(directory):
    with tempfile.TemporaryDirectory() as scratch:
      _write(epath.Path(scratch), schema, records)
      _remove(directory)
      directory.mkdir(parents=True)
      for file in sorted(epath.Path(scratch).iterdir(), key=lambda file: file.name == "dataset_info.json"):
        file.copy(directory / file.name)
    return
  partial, old = _beside(directory, "partial"), _beside(directory, "old")
  if not directory.exists() and old.exists():  # a former call was killed between the two moves below
    partial.rename(directory)
  _remove(partial)
  partial.mkdir(parents=True)
  _write(partial, schema, records)
  _remove(old)
  if directory.exists():
    directory.rename(old)
  partial.rename(directory)
  _remove(old)


def read_dataset(directory: str | os.PathLike, schema: Schema) -> list[dict[str, Any]]:
  """The records in the order they were written; one line of ValueError where there is no set, or a damaged one."""
  directory = place = epath.Path(directory)
  if not _remote(directory) and not directory.exists() and _beside(directory, "old").exists():
    place = _beside(directory, "partial")  # complete: the old set makes room only then
  if not (place / "dataset_info.json").exists():
    raise ValueError(f"{directory} holds no complete set of records; run the stage that writes it")
  with tempfile.TemporaryDirectory() as scratch:
    if _remote(place):  # the record reader knows files of this machine only
      for file in place.iterdir():
        file.copy(epath.Path(scratch) / file.name)
      place = epath.Path(scratch)
    try:
      return _read(place, schema)
    except Exception as error:  # the reader reports damage by many types
      raise ValueError(
        f"the records in {directory} are damaged ({one_line(error)}); delete them, write them again"
      ) from None


def append_lines(path: str | os.PathLike, lines: Iterable[str]) -> None:
  """Appends lines to a local file and syncs it; a last line that a killed run left unfinished is cut off first."""
  text = "".join(line + "\n" for line in lines).encode()
  with open(path, "ab+") as file:
    file.truncate(_complete_bytes(file))
    file.write(text)
    file.flush()
    os.fsync(file.fileno())


def read_lines(path: str | os.PathLike) -> list[bytes]:
  """The lines of a local file, without the last one if it is unfinished."""
  with open(path, "rb") as file:
    return file.read().split(b"\n")[:-1]


def one_line(error: BaseException, limit: int = 300) -> str:
  """An exception as one line of at most `limit` characters, without control characters."""
  text = " ".join(f"{type(error).__name__}: {error}".split())
  return "".join(c for c in text if c.isprintable())[:limit]


def _write(directory: epath.Path, schema: Schema, records: Iterable[Mapping[str, Any]]) -> None:
  import tensorflow_datasets as tfds  # half a second, and only for those who store

  identity = tfds.core.DatasetIdentity(
    name="records", version="1.0.0", data_dir=os.fspath(directory), module_name="seed_jax.records"
  )
  # Shuffling would order records by a hash of their key; here the order is part of the data.
  info = tfds.core.DatasetInfo(builder=identity, features=_features(schema), disable_shuffling=True)
  writer = tfds.core.SequentialWriter(info, max_examples_per_shard=4096, file_format="array_record")
  writer.initialize_splits(["train"])
  writer.add_examples({"train": (_encode(record, schema) for record in records)})
  writer.close_all()


def _read(directory: epath.Path, schema: Schema) -> list[dict[str, Any]]:
  import tensorflow_datasets as tfds

  # A features file names the classes that TFDS imports to read it, so only the file that we would write is opened.
  with tempfile.TemporaryDirectory() as scratch:
    _features(schema).save_config(scratch)
    expected = json.loads((epath.Path(scratch) / "features.json").read_text())
  if json.loads((directory / "features.json").read_text()) != expected:
    raise ValueError("the fields are not those of this version")
  builder = tfds.builder_from_directory(os.fspath(directory))
  count = builder.info.splits["train"].num_examples
  return [_decode(record, schema) for record in builder.as_data_source("train")] if count else []


def _features(schema: Schema):
  import tensorflow_datasets as tfds

  text = tfds.features.Text
  kinds = {
    "text": text,
    "texts": lambda: tfds.features.Sequence(text()),
    "int": lambda: np.int64,
    "bool": lambda: np.bool_,
  }
  vector = tfds.features.Tensor
  return tfds.features.FeaturesDict(
    {
      name: kinds[kind]() if kind in kinds else vector(shape=(None,), dtype=np.dtype(kind).type)
      for name, kind in schema.items()
    }
  )


def _encode(record: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
  out = {}
  for name, kind in schema.items():
    value = record[name]
    if kind == "text":
      value = _bytes(value, name)
    elif kind == "texts":
      value = [_bytes(text, name) for text in value]
    elif kind not in ("int", "bool"):
      value = np.asarray(value, kind)
    out[name] = value
  return out


def _decode(record: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
  out = {}
  for name, kind in schema.items():
    value = record[name]
    if kind == "text":
      value = value.decode("utf-8", "surrogatepass")
    elif kind == "texts":
      value = [text.decode("utf-8", "surrogatepass") for text in value]
    elif kind not in ("int", "bool"):
      value = np.asarray(value, kind)
    out[name] = value
  return out


def _bytes(text: Any, name: str) -> bytes:
  if not isinstance(text, str):
    raise ValueError(f"{name} holds a {type(text).__name__}, not a text")
  return text.encode("utf-8", "surrogatepass")  # half of a surrogate pair is a text too: JSON escapes can spell it


def _complete_bytes(file) -> int:
  """Length of an open binary file up to and with its last newline."""
  end = file.seek(0, os.SEEK_END)
  while end:
    start = max(end - 65_536, 0)
    file.seek(start)
    newline = file.read(end - start).rfind(b"\n")
    if newline >= 0:
      return start + newline + 1
    end = start
  return 0


def _remote(path: epath.Path) -> bool:
  return "://" in os.fspath(path)


def _beside(directory: epath.Path, suffix: str) -> epath.Path:
  return directory.parent / f".{directory.name}.{suffix}"


def _remove(directory: epath.Path) -> None:
  if directory.exists():
    directory.rmtree()
