"""The paper's experiment: its command at small sizes on a CPU, and ratios beside the paper's."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import paper_table
from experiments.bench import paper, points, timing
from experiments.bench.command import Point, dry
from experiments.bench.programs import inputs

MACHINE = {"device": "NVIDIA H200", "jax": "0.11.2", "date": "2026-11-20"}
FIRST = "1024x32768"


def made_up(n: int, v: int, **forward: tuple[float, float]) -> dict[str, Any]:
    """A point with these milliseconds and temporary MiB of forwards."""
    results = {
        f"forward {name.replace('_', ' ')}": {"ms": ms, "temporary_mib": mib} for name, (ms, mib) in forward.items()
    }
    return {"n": n, "v": v, "h": 4096, "results": results, "left_out": {}, "proposed": "forward by mosaic_gpu"}


def document(found: dict[str, Any], **machine: Any) -> dict[str, Any]:
    return {"command": "python -m experiments.paper_table", "machine": MACHINE | machine, "points": found}


def cells(text: str, heading: str, first: str) -> list[str]:
    """The cells of the table under the heading, in the row that begins so."""
    under = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    (line,) = [line for line in under.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_papers_table_has_the_grid_and_the_geometric_means_that_are_claimed_of_it() -> None:
    assert [(n, v, paper.H) for n, v in paper.TABLE] == points.GRID
    assert [point.shape for point in paper_table.POINTS.values()] == points.GRID
    assert paper.mean(paper.published()) == pytest.approx((1.92, 10.0), rel=2e-3)


def test_the_papers_megabytes_are_mebibytes_that_count_the_operands() -> None:
    """What the report says of them: a mistyped figure would break it."""
    for (n, v), row in paper.TABLE.items():
        operands, logits = 2 * (n + v) * paper.H / 2**20, 4 * n * v / 2**20
        assert row.canonical.mib - 3 * operands - 2 * logits == 16
        assert 16 <= row.proposed.mib - operands <= 38


def test_the_canonical_programs_agree_and_store_logits_of_their_dtype() -> None:
    data = inputs(32, 256, 64)
    found = {name: program(*data) for name, program in paper_table.programs("xla", (32, 256, 64)).items()}
    exact = jnp.einsum("nh,vh->nv", *(x.astype(jnp.float32) for x in data[:2]), precision="highest")
    want = jnp.mean(jax.nn.logsumexp(exact, axis=1) - exact[jnp.arange(32), data[2]])
    # float32 logits are exact but for the sum's order; bfloat16's are off by half a unit of 8 bits, of either sign.
    largest = float(jnp.abs(exact).max())
    for name, bound in {
        paper.FLOAT32: 1e-5 * largest,
        paper.PROPOSED: 1e-5 * largest,
        paper.BFLOAT16: 2**-8 * largest,
    }.items():
        np.testing.assert_allclose(found[f"forward {name}"], want, rtol=0, atol=bound)
        np.testing.assert_allclose(found[name][0], want, rtol=0, atol=bound)
    assert {x.dtype for x in found[paper.FLOAT32][1]} == {jnp.dtype(jnp.bfloat16)}
    text = str(jax.make_jaxpr(paper_table.programs("xla", (32, 256, 64))["forward canonical float32"])(*data))
    assert "f32[32,256] = dot_general" in text


def test_a_dry_run_shrinks_the_sizes_says_so_and_is_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_MOST_LAUNCHES", 2)
    chosen = dict(list(paper_table.POINTS.items())[:2])
    monkeypatch.setattr(paper_table, "POINTS", chosen)
    words = ["--dry-run", "--rounds", "1", "--out", str(tmp_path)]
    assert paper_table.main(words) == 0
    out, err = capsys.readouterr()
    assert "DRY RUN: sizes are shrunk" in err
    assert f"paper_table {FIRST}: N 16 V 512" in out
    path = tmp_path / "paper_table.json"
    before = json.loads(path.read_text())
    assert before["command"] == "python -m experiments.paper_table"
    assert before["machine"]["dry_run"] is True
    assert {"device", "jax", "date"} <= set(before["machine"])
    assert list(before["points"]) == list(chosen)
    point = before["points"][FIRST]
    assert (point["n"], point["v"], point["h"]) == dry(chosen[FIRST].shape)
    assert set(paper_table.programs("xla", dry(chosen[FIRST].shape))) <= set(point["results"])
    assert point["proposed"] == "forward by xla, forward and backward by xla, in_forward"
    text = (tmp_path / "paper_table.md").read_text()
    assert "**DRY RUN" in text
    assert "Not measured: 1024x131072" in text
    assert (tmp_path / "paper_table.png").read_bytes().startswith(b"\x89PNG")

    third = made_up(16, 2048, proposed=(1.0, 0.0))
    more = Point((1024, 131072, 4096), paper_table.programs, lambda *_: third)
    monkeypatch.setattr(paper_table, "POINTS", chosen | {"1024x131072": more})
    assert paper_table.main(words) == 0
    after = json.loads(path.read_text())
    assert after["points"] == before["points"] | {"1024x131072": third}
    assert paper_table.main(["--rounds", "1", "--out", str(tmp_path)]) == 2
    assert "was measured with dry_run True and this is None" in capsys.readouterr().err


def test_the_report_has_our_ratios_beside_the_papers() -> None:
    operands = 2 * (1024 + 32768) * 4096 / 2**20
    found = {
        FIRST: made_up(
            1024, 32768, canonical_float32=(3.0, operands), canonical_bfloat16=(1.5, 0.0), proposed=(1.0, 0.0)
        ),
        "1024x65536": made_up(1024, 65536, canonical_float32=(12.0, 0.0), proposed=(1.0, 0.0)),
    }
    text = paper.markdown(document(found))
    row = cells(text, "Forward: ms", "1024 | 32768")
    assert row == ["1024", "32768", "0.73", "0.69", "1.06", "3.00", "1.50", "1.00", "3.00", "1.50"]
    row = cells(text, "Forward: MiB", "1024 | 32768")
    assert row == ["1024", "32768", "1064", "280", "3.80", "528", "264", "264", "2.00", "1.00"]
    heading = "Geometric means of canonical / proposed"
    assert cells(text, heading, "the paper, forward, float32 logits")[1:] == ["20", "1.92", "10.00", "–", "–"]
    # Beside ours stands the paper's mean of the same two points: sqrt(1.058 · 1.443), sqrt(3.8 · 3.896).
    assert cells(text, heading, "here, forward, float32 logits")[1:] == ["2", "6.00", "1.41", "1.24", "3.85"]
    assert cells(text, heading, "here, forward, bfloat16 logits")[1:] == ["1", "1.50", "1.00", "–", "–"]
    assert cells(text, heading, "here, forward and backward, float32 logits")[1:] == ["0", "–", "–", "–", "–"]
    assert "device NVIDIA H200" in text
    assert "Proposed: forward by mosaic_gpu." in text
    assert "DRY RUN" not in text


def test_memory_of_a_backward_counts_the_gradients() -> None:
    point = made_up(1024, 32768, proposed=(1.0, 10.0)) | {"results": {"proposed": {"ms": 1.0, "temporary_mib": 10.0}}}
    assert paper.cost(point, paper.BOTH, paper.PROPOSED) == (1.0, 2 * 264 + 10)
    assert paper.cost(point, paper.FORWARD, paper.PROPOSED) is None


def test_the_report_names_what_is_not_measured_and_what_was_left_out(tmp_path: Path) -> None:
    point = made_up(1024, 32768, proposed=(1.0, 0.0)) | {
        "left_out": {"canonical float32": "RESOURCE_EXHAUSTED: all of it"}
    }
    text = paper.markdown(document({FIRST: point}))
    assert f"Left out at {FIRST}: canonical float32, RESOURCE_EXHAUSTED: all of it." in text
    assert "Not measured: 1024x65536, 1024x131072" in text
    assert cells(text, "Forward: ms", "1024 | 32768")[5:] == ["–", "–", "1.00", "–", "–"]
    assert paper_table.main(["--report", "--out", str(tmp_path)]) == 0
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["paper_table.md", "paper_table.png"]
    text = (tmp_path / "paper_table.md").read_text()
    assert "Not measured: any of the 20 points." in text
    assert cells(text, "Forward: ms", "32768 | 262144")[2:] == ["96.52", "53.61", "1.80", "–", "–", "–", "–", "–"]


def test_a_program_that_memory_does_not_suffice_for_is_left_out_and_others_are_measured() -> None:
    programs = {
        "forward": lambda hidden, weight, labels: hidden @ weight.T,
        "vast": lambda hidden, weight, labels: jnp.zeros(2**50, jnp.int8) + labels[0].astype(jnp.int8),
    }
    record = timing.measure((16, 32, 16), programs, 1, lambda *_: 1.0)
    assert "RESOURCE_EXHAUSTED" in record["left_out"]["vast"]
    assert set(record["left_out"]) == {"vast"}
    assert set(record["results"]) == {"forward", *timing.THREE}
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        timing.compiled_in_turn(programs, dict.fromkeys(programs, inputs(16, 32, 16)), 1, lambda *_: 1.0)


def test_a_dry_run_needs_a_folder_and_a_file_that_is_no_result_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        paper_table.main(["--dry-run"])
    assert "--dry-run needs --out" in capsys.readouterr().err
    (tmp_path / "paper_table.json").write_text("[]")
    assert paper_table.main(["--report", "--out", str(tmp_path)]) == 2
    assert "paper_table.json is not a result file" in capsys.readouterr().err
    assert not (tmp_path / "paper_table.md").exists()


@pytest.mark.gpu
def test_every_program_is_timed_on_the_gpu() -> None:
    shape = (512, 4096, 256)
    programs = paper_table.programs("mosaic_gpu", shape)
    record = paper_table.measure(shape, programs, 1, timing.back_to_back)
    assert all(record["results"][name]["ratio"] > 0 for name in programs)
