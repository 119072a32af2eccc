"""The waits of this process that `pw.progress()` shows."""

from __future__ import annotations

from typing import Any

waits: Any = None
"""The `progress.Waits` while they are shown, or None."""
