"""The command line, one verb a file; `tepo.cli.app` assembles them."""

from __future__ import annotations

from tepo.cli.app import main

__all__ = ["main"]
