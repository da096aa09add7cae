"""What `make test-installs` follows: every block and every install line of the quick starts."""

from pathlib import Path

import pytest
from check_installs import PAGES, PLANS, installs, program, python_blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_and_each_install_line_of_a_quick_start_is_followed(page):
    text, plans = (ROOT / page).read_text(), [extras for _, _, extras in PLANS]
    assert all(any(block in program(text, extras) for extras in plans) for block in python_blocks(text))
    assert installs(text) == {extra for extras in plans for extra in extras}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))])
def test_every_extra_that_a_page_installs_exists(page):
    installs((ROOT / page).read_text())
