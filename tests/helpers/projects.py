"""A project of a user's: a module in the working directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


def write_project(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module into a folder, work there, and return its name; it is not on the path, nor is the empty one."""
    name = f"project_{folder.name.replace('-', '_')}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name
