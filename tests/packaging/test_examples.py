"""The Python examples of the README and of each page run, in order, as a reader would type them.

A block whose first line is `# raises ErrorType: words` must raise that error, with these words in its message.
"""

import builtins
import importlib.util
import itertools
import re
from pathlib import Path

import pytest
from check_installs import python_blocks

ROOT = Path(__file__).parents[2]
PAGES = {
    page.relative_to(ROOT).as_posix(): blocks
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (blocks := python_blocks(page.read_text()))
}
PAGES.pop("docs/huggingface.md", None)  # needs a model and a dataset: tests/torch_bridge has its test


def is_missing(block):
    """Whether the block imports a package that this environment lacks; what follows on its page builds on it."""
    imported = re.findall(r"^(?:import|from) (torch|transformers)\b", block, re.MULTILINE)
    return any(importlib.util.find_spec(package) is None for package in imported)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page):
    blocks = list(itertools.takewhile(lambda block: not is_missing(block), PAGES[page]))
    if not blocks:
        pytest.skip("the first example needs a package that is not installed")
    namespace = {"__name__": "example"}
    for number, block in enumerate(blocks, 1):
        code = compile(block, f"{page}, block {number}", "exec")
        if expected := re.match(r"# raises (\w+): (.*)\n", block):
            with pytest.raises(getattr(builtins, expected[1]), match=re.escape(expected[2])):
                exec(code, namespace)
        else:
            exec(code, namespace)
