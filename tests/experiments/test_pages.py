"""Tables, charts and targets: figures in the documentation match the result files."""

import warnings

import pytest
from kernels_digest import outdated

from experiments.bench import paper_table, report, targets, training_evidence
from experiments.bench.results import FOLDER, load

DOCUMENTS = load(FOLDER)
# Until they are measured.
LACKING = [
    "PyTorch, memory by the driver's count / JAX's, worst",
    "4 GPUs, rows and the weight's width split, N each: efficiency, worst mode",
]


def test_the_pages_are_made_from_the_result_files() -> None:
    for name, page in report.SITE.items():
        assert (report.DOCS / "generated" / f"{name}.md").read_text() == page(DOCUMENTS) + "\n"
    assert (FOLDER / "gpu_report.md").read_text() == report.markdown(DOCUMENTS) + "\n"
    for module in (paper_table, training_evidence):
        assert (FOLDER / f"{module.NAME}.md").read_text() == module.markdown(DOCUMENTS[module.NAME]) + "\n"
        assert f"{{include}} ../experiments/results/{module.NAME}.md" in (report.DOCS / "evidence.md").read_text()


def test_every_target_is_of_numbers_that_are_there_and_a_missed_one_has_a_reason() -> None:
    documents = {**DOCUMENTS, "fastest": targets.fastest(DOCUMENTS)}
    assert [row["what"] for t in targets.TARGETS if "value" not in (row := targets.judged(t, documents))] == LACKING
    assert "\n| – |" not in targets.missed_table(DOCUMENTS)


@pytest.mark.filterwarnings("default")
def test_files_of_other_kernels_are_named_and_fail_only_a_release() -> None:
    pytest.importorskip("triton")
    if named := list(outdated(DOCUMENTS)):
        warnings.warn("\n".join(named), stacklevel=1)
