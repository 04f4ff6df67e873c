"""Hosts: attach rlskip to third-party trainers.

The names load on first use, so that verl's plug-in can report an error that occurs meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlskip._lazy import load_on_use

if TYPE_CHECKING:
    from rlskip._wrap import Seam, Seams, when_imported, wrap

__all__ = ["Seam", "Seams", "when_imported", "wrap"]

__getattr__ = load_on_use(__name__, {"rlskip._wrap": __all__})
