"""A plugin of pytest for `make fuzz`: drawn tests run again and again, with new examples each time, for some minutes.

    python -m pytest -p tests.fuzzing --hypothesis-profile=fuzz -m "drawn and not gpu" --minutes=5

Each test has an equal share of the time. A failure is shrunk, is kept in `.hypothesis` and tried first the next time,
and comes with the command that runs it alone. The process has several CPU devices and Triton's interpreter.
"""

import functools
import os
import re
import time
from typing import Any

import hypothesis
import jax
import pytest

_PROPERTY = "drawn cases"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of `make fuzz`."""
    parser.addoption("--minutes", type=float, default=5.0, help="how long all tests take together")
    parser.addoption("--reproduce", metavar="VERSION:CASE", help="run one failure again, as the message about it says")


def pytest_configure(config: pytest.Config) -> None:
    """Makes this a process for what other tests run in one of its own, before JAX starts and Triton is imported."""
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
    if reproduced := pyfuncitem.config.getoption("--reproduce"):
        version, _, case = reproduced.partition(":")
        hypothesis.reproduce_failure(version, case.encode())(test)(**given)
        return True
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    share = 60 * pyfuncitem.config.getoption("--minutes") * workers / len(pyfuncitem.session.items)
    end, count, inner = time.monotonic() + share, 0, test.hypothesis.inner_test

    @functools.wraps(inner)
    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return inner(*args, **kwargs)

    test.hypothesis.inner_test = counted
    try:
        while time.monotonic() < end:
            test(**given)
    except Exception as error:
        error.add_note(_command(pyfuncitem.nodeid, error))
        raise
    finally:
        test.hypothesis.inner_test = inner
        pyfuncitem.user_properties.append((_PROPERTY, count))
    return True


def _command(test: str, error: Exception) -> str:
    said = "\n".join(getattr(error, "__notes__", ()))
    found = re.search(r"@reproduce_failure\('(\S+)', b'(\S+)'\)", said)
    if found is None:
        return f"no single case of {test} fails by itself"
    words = f"-p tests.fuzzing --hypothesis-profile=fuzz -m '' '{test}' --reproduce={found[1]}:{found[2]}"
    return f"To run this case alone:\n    JAX_PLATFORMS=cpu python -m pytest {words}"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Says how many examples were tried."""
    reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "when")]
    counts = [value for x in reports if x.when == "call" for name, value in x.user_properties if name == _PROPERTY]
    terminalreporter.write_line(f"{sum(counts):,} cases of {len(counts)} drawn tests")
