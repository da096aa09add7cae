"""What `make test-installs` follows: every block and every install line of the quick starts."""

from pathlib import Path

import pytest
from check_installs import PAGES, PLANS, examples, installs, program, python_blocks

ROOT = Path(__file__).parents[2]
PAGE = """
    pip install "pallas-ce[cuda13]"
    pip install "pallas-ce[cuda13,flax]"

## JAX
```python
a
```
## Flax NNX
```python
b
```
"""


@pytest.mark.parametrize("page", PAGES)
def test_each_block_and_each_install_line_of_a_quick_start_is_followed(page):
    text, plans = (ROOT / page).read_text(), [extras for _, _, extras in PLANS]
    assert all(any(block in program(text, extras) for extras in plans) for block in python_blocks(text))
    assert installs(text) == {extra for extras in plans for extra in extras}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))])
def test_every_extra_that_a_page_installs_exists(page):
    installs((ROOT / page).read_text())


def test_blocks_come_in_order_as_far_as_their_packages_are_installed():
    assert examples(PAGE) == [("", "a\n"), ("flax", "b\n")]
    assert program(PAGE, [""]) == "a\n"
    assert program(PAGE, ["", "flax"]) == "a\n\nb\n"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cuda13,flax", "cuda13,flux", "no extra .'flux'"),
        ('"pallas-ce[cuda13]"', "quack", "quack. is none of this project"),
        ("## JAX", "## Rust", "below 'Rust' is of no framework"),
        ("cuda13,flax", "cuda13,torch", "its blocks need .'', 'flax'"),
    ],
)
def test_what_cannot_be_followed_is_named(old, new, words):
    with pytest.raises(ValueError, match=words):
        examples(PAGE.replace(old, new))
