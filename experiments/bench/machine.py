"""What a result file says about where it was made."""

import datetime
import os
import platform
from importlib import metadata
from typing import Any

import jax


def describe() -> dict[str, Any]:
    """Device, processor count, versions and date."""
    return {
        "device": jax.devices()[0].device_kind,
        "processors": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
