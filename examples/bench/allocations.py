"""The true memory of several threads and processes together: what torch's CPU allocator holds, at every moment.

A few lines of C are preloaded into each process and count every block that torch takes and gives back on one common
board, so peaks are those of the sum, to the byte (blocks below 512 bytes left out). They know nothing of the package.
Counting costs less than a percent, so runs can be timed under it.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SLOTS = 4096
BYTES = 16 + 16 * SLOTS


class Board:
    """A board to be counted on.

    Args:
        path: Its file; None for the one that this process is counted on.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._file = open(path or os.environ["ALLOCATIONS_FILE"], "r+b")  # noqa: SIM115
        self._board = mmap.mmap(self._file.fileno(), BYTES)

    @property
    def live_bytes(self) -> int:
        """What is held now."""
        return int(struct.unpack_from("q", self._board, 0)[0])

    @property
    def peak_bytes(self) -> int:
        """The most that was held at a moment since `reset`."""
        return int(struct.unpack_from("q", self._board, 8)[0])

    def reset(self) -> None:
        """Begin a new peak."""
        struct.pack_into("q", self._board, 8, self.live_bytes)

    def bury(self, pid: int) -> int:
        """Count what a process held that was killed as given back; returns it in bytes."""
        for i in range(SLOTS):
            found, live = struct.unpack_from("qq", self._board, 16 + 16 * i)
            if found == pid:
                struct.pack_into("q", self._board, 24 + 16 * i, 0)
                struct.pack_into("q", self._board, 0, self.live_bytes - live)
                return int(live)
        return 0


@contextmanager
def counted() -> Iterator[dict[str, str]]:
    """The environment in which processes are counted on one board.

    Raises:
        RuntimeError: There is no C compiler, or no LD_PRELOAD on this system.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not os.path.exists("/proc"):
        raise RuntimeError("The true memory of several processes is counted by a few lines of C, on Linux: no cc here.")
    with tempfile.TemporaryDirectory(prefix="allocations-") as folder:
        library, path = (Path(folder) / name for name in ("allocations.so", "board"))
        source = Path(__file__).with_suffix(".c")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
        path.write_bytes(bytes(BYTES))
        yield {"LD_PRELOAD": str(library), "ALLOCATIONS_FILE": str(path)}
