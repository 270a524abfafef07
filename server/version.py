"""The version of the installed distribution.

A checkout that is not installed has none, and says so.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def ropeway_version() -> str:
    try:
        return version("ropeway")
    except PackageNotFoundError:
        return "0 (not installed)"
