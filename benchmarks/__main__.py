"""`python -m benchmarks`."""

import os
import sys

from benchmarks.command import main

if __name__ == "__main__":
  # Huge pages for us and, as the children inherit it, for every peer: what launch/common.sh asks for. The C library
  # reads it when a process begins, so this one begins again.
  if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])
  sys.exit(main(sys.argv[1:]))
