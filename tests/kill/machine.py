"""The machine, for the head of a printed result."""

from __future__ import annotations

import platform
from pathlib import Path


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(models)} x {models[0] if models else platform.machine()}, Linux {platform.release()}"
