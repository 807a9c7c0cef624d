"""An object store behind `gs://` for tests: ranges are fetched and counted, an object appears when its writing ends, a
rename is a copy of an object, and nothing can be appended to.
"""

import os
import shutil

import fsspec
from etils.epath import backend, gpath


class Store(fsspec.AbstractFileSystem):
  """Objects of `gs://bucket/...` are files below `root`."""

  protocol = ("gcs", "gs")
  cachable = False
  root, fetched = None, 0

  def local(self, path):
    return os.path.join(self.root, self._strip_protocol(path))

  def info(self, path, **_):
    name = self._strip_protocol(path)
    place = self.local(path)
    if not os.path.exists(place):
      raise FileNotFoundError(path)
    folder = os.path.isdir(place)
    return {"name": name, "size": 0 if folder else os.path.getsize(place), "type": "directory" if folder else "file"}

  def ls(self, path, detail=True, **_):
    name = self._strip_protocol(path)
    entries = [self.info(f"{name}/{child}") for child in sorted(os.listdir(self.local(path)))]
    return entries if detail else [entry["name"] for entry in entries]

  def _open(self, path, mode="rb", **_):
    return Object(self, path, mode, block_size=1 << 12)  # reads ahead so far

  def makedirs(self, path, exist_ok=False):
    os.makedirs(self.local(path), exist_ok=exist_ok)

  def mkdir(self, path, create_parents=True, **_):
    os.makedirs(self.local(path), exist_ok=True)

  def cp_file(self, path1, path2, **_):
    shutil.copyfile(self.local(path1), self.local(path2))

  def rm(self, path, recursive=False, **_):
    shutil.rmtree(self.local(path)) if recursive and os.path.isdir(self.local(path)) else os.unlink(self.local(path))


class Object(fsspec.spec.AbstractBufferedFile):
  def _fetch_range(self, start, end):
    Store.fetched += end - start
    with open(self.fs.local(self.path), "rb") as file:
      file.seek(start)
      return file.read(end - start)

  def _initiate_upload(self):
    self.parts = []

  def _upload_chunk(self, final=False):
    self.parts.append(self.buffer.getvalue())
    if final:
      os.makedirs(os.path.dirname(self.fs.local(self.path)), exist_ok=True)
      with open(self.fs.local(self.path), "wb") as file:
        file.writelines(self.parts)
    return True


def install(tmp_path, monkeypatch):
  """From here to the end of the test: the folder in which the objects of gs://bucket lie."""
  monkeypatch.setattr(Store, "root", str(tmp_path / "objects"))
  monkeypatch.setattr(Store, "fetched", 0)
  file_system = lambda self, name: Store() if name == "gcs" else fsspec.filesystem(name)  # noqa: E731
  monkeypatch.setattr(backend._FileSystemSpecBackend, "_get_filesystem", file_system)
  monkeypatch.setattr(gpath, "_is_tf_installed", lambda: False)
  (tmp_path / "objects" / "bucket").mkdir(parents=True)
  return tmp_path / "objects" / "bucket"
