"""Ops of the Liger benchmark that run Liger's own kernels, through their stand-ins."""

from __future__ import annotations

KERNELS = {}
