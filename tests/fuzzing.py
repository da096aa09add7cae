"""A plugin of pytest for `make fuzz`: drawn tests run again and again, with new examples each time, for some minutes.

Each test has an equal share of the time. Hypothesis shrinks a failure and keeps it in `.hypothesis`, so that the same
test, run alone with this plugin and profile, tries it first. The process has several CPU devices and Triton's
interpreter, for what other tests run in processes of their own.
"""

import os
import time
from typing import Any

import jax
import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make fuzz`."""
    parser.addoption("--minutes", type=float, default=5.0, help="how long all tests take together")


def pytest_configure(config: pytest.Config) -> None:
    """Before JAX starts and Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    jax.config.update("jax_num_cpu_devices", 8)
    for file in ("in_interpreter.py", "on_a_mesh.py"):
        config.addinivalue_line("python_files", file)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Repeats a drawn test until its share of the time is over, or one failure of it."""
    test: Any = pyfuncitem.obj
    if not hasattr(test, "hypothesis"):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    end = time.monotonic() + 60 * pyfuncitem.config.getoption("--minutes") * workers / len(pyfuncitem.session.items)
    while time.monotonic() < end:
        test(**given)
    return True
