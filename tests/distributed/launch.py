"""Starts the ranks of a script, each in a process of its own and with a launcher's variables, as torchrun would.

The script's process imports everything once and forks: most of the time of a small launch is imports.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LAUNCHER = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


def environment() -> dict[str, str]:
    """The environment of a script that finds the package and the tests, and no launcher's variables."""
    own = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    return own | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}


def launch(script: str, ranks: int, directory: Path, what: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Runs `tests/distributed/<script>` on some ranks; what each found, and what each said."""
    command = [sys.executable, str(Path(__file__).parent / script), str(ranks), str(directory), what]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250)
    texts = [(directory / f"{rank}.txt").read_text() for rank in range(ranks)]
    assert done.returncode == 0, "\n".join([done.stderr, *texts])
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)], texts


def be_ranks(main: Callable[[int, int, Path, str], dict[str, Any]]) -> None:
    """The other end, in the script: forks, calls `main(rank, ranks, directory, what)`, and writes what it returns."""
    ranks, directory, what = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            _be_rank(main, rank, ranks, directory, what)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(any(codes))


def _be_rank(
    main: Callable[[int, int, Path, str], dict[str, Any]], rank: int, ranks: int, directory: Path, what: str
) -> None:
    code = 1
    try:
        os.environ["LOCAL_RANK"] = str(rank)
        with (directory / f"{rank}.txt").open("w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        found = main(rank, ranks, directory, what)
        (directory / f"{rank}.json").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
