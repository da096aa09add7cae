"""What pages name is there, and examples run: Python blocks, in order, as a reader would type them, and scripts.

A block whose first line is `# raises ErrorType: words` must raise that error, with these words in its message.
"""

import builtins
import contextlib
import importlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from check_installs import PAGES as QUICK_STARTS
from check_installs import PLANS, installs, program, python_blocks

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
# Other tests run their blocks: the first needs a model and a dataset.
OTHERS = {"docs/huggingface.md", "docs/coming_from.md"}
PAGES = {
    name: blocks
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if (name := page.relative_to(ROOT).as_posix()) not in OTHERS and (blocks := python_blocks(page.read_text()))
}
_, *PARTS = (ROOT / "docs" / "coming_from.md").read_text().split("\n## ")
SECTIONS = [(part.split("\n### ")[0], section) for part in PARTS for section in part.split("\n### ")[1:]]
FRAMEWORKS = {"torch", "torch_bridge", "optax", "flax", "jax.numpy"}


def missing(text, packages=r"\w+"):
    """Packages that the text imports and this environment lacks."""
    imported = set(re.findall(rf"^(?:import|from(?= [\w.]+ import)) ({packages})\b", text, re.MULTILINE))
    return sorted(name for name in imported if importlib.util.find_spec(name) is None)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(page):
    """Up to the first of a package that is not there: what follows builds on it."""
    blocks = list(itertools.takewhile(lambda block: not missing(block, "torch|transformers"), PAGES[page]))
    if not blocks:
        pytest.skip("the first example needs a package that is not installed")
    namespace = {"__name__": "example"}
    for number, block in enumerate(blocks, 1):
        raised = contextlib.nullcontext()
        if expected := re.match(r"# raises (\w+): (.*)\n", block):
            raised = pytest.raises(getattr(builtins, expected[1]), match=re.escape(expected[2]))
        with raised:
            exec(compile(block, f"{page}, block {number}", "exec"), namespace)


@pytest.mark.parametrize(("start", "section"), [pytest.param(*x, id=x[1].split("\n")[0]) for x in SECTIONS])
def test_a_section_of_coming_from_runs_with_its_own_framework_alone(start, section):
    """With its part's first block, in whatever order tests run: only what the blocks themselves import is looked at."""
    if lacking := missing(start + section):
        pytest.skip(f"needs {', '.join(lacking)}")
    own = {"torch", "torch_bridge"} if start.startswith("In PyTorch") else {"jax.numpy"}
    others = tuple(f"{name}." for name in FRAMEWORKS - own - set(section.split()[:1]))

    def import_own(name, *args):
        assert not f"{name}.".startswith(others), f"a block imports {name}"
        return __import__(name, *args)

    namespace = {"__builtins__": vars(builtins) | {"__import__": import_own}}
    for block in python_blocks(start + section):
        exec(block, namespace)


def test_the_page_of_the_scripts_names_each():
    page = (ROOT / "examples" / "README.md").read_text()
    assert re.findall(r"^\| \[(\w+\.py)\]\(\1\) \|", page, re.MULTILINE) == [path.name for path in SCRIPTS]


@pytest.mark.nightly
@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_a_script_runs_and_what_it_asserts_holds(path):
    """In a process of its own, as its users start it."""
    text = path.read_text()
    if lacking := missing(text):
        pytest.skip(f"needs {', '.join(lacking)}")
    assert re.search(r"^ +(np\.testing\.assert_|torch\.testing\.assert_|assert )", text, re.MULTILINE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    environment.pop("XLA_FLAGS", None)  # the tests' flags are for small programs that run once
    ended = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


DOCUMENTED = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page.read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("module", ["pallas_ce", "flax_modules.nnx", "flax_modules.linen", "torch_bridge"])
def test_the_reference_has_every_public_name_once(module):
    public = importlib.import_module(module).__all__
    assert sorted(n for n in DOCUMENTED if n.rpartition(".")[0] == module) == sorted(f"{module}.{n}" for n in public)


def test_the_reference_has_the_names_that_other_projects_import():
    source = (ROOT / "torch_bridge" / "selective.py").read_text()
    names = re.findall(r"^def ([a-z]\w+)", source, re.MULTILINE)
    assert sorted(n for n in DOCUMENTED if ".selective." in n) == sorted(f"torch_bridge.selective.{n}" for n in names)


def test_the_page_of_faults_names_tests_that_exist_and_every_test_of_a_fault():
    named = set(re.findall(r"`(tests/\S+\.py)::(\w+)`", (ROOT / "docs" / "robustness.md").read_text()))
    files = {file for file, _ in named} | {str(x.relative_to(ROOT)) for x in ROOT.glob("tests/*/test_faults.py")}
    tests = {(file, name) for file in files for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)}
    assert named - tests == set()
    assert {(file, name) for file, name in tests if file.endswith("/test_faults.py")} - named == set()


@pytest.mark.parametrize("page", QUICK_STARTS)
def test_each_block_and_each_install_line_of_a_quick_start_is_followed(page):
    text, plans = (ROOT / page).read_text(), [extras for _, _, extras in PLANS]
    assert all(any(block in program(text, extras) for extras in plans) for block in python_blocks(text))
    assert installs(text) == {extra for extras in plans for extra in extras}


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))])
def test_every_extra_that_a_page_installs_exists(page):
    installs((ROOT / page).read_text())
