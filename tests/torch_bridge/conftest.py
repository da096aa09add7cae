import pytest

from tests.torch_bridge import problems


@pytest.fixture
def head():
    """Hidden states `[20, 8]`, a weight `[50, 8]` and labels."""
    return problems.head()
