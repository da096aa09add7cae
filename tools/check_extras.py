"""Shows that every extra of the wheel resolves: alone, and in the combinations that the Makefile makes environments of.

usage: python tools/check_extras.py DIRECTORY       (which holds the wheel)

Nothing is installed: pip resolves each request from the registry's metadata and reports what it would install.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints-jax-0.11.2.txt"
COMBINATIONS = ("cuda12,dev,docs,experiments,qlora", "cuda13,triton,dev,docs,experiments,qlora")
SHOWN = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "jax-triton", "triton", "torch")


def resolve(wheel: Path, extras: str) -> dict[str, str]:
    """Returns the version of every distribution that installing `wheel[extras]` in an empty environment brings.

    Single extras resolve freely, as for a user; combinations under the constraints of the default environment.

    Raises:
        RuntimeError: pip finds no set of distributions that satisfies the request; the message holds pip's own.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        options = ["--dry-run", "--ignore-installed", "--report", report.name]
        constraints = ["--constraint", str(CONSTRAINTS)] if extras in COMBINATIONS else []
        request = [*options, *constraints, f"{wheel}[{extras}]"]
        result = subprocess.run([*pip, *request], capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"pallas-ce[{extras}] does not resolve:\n{result.stderr}")
        installs = json.loads(Path(report.name).read_text())["install"]
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in installs}


def main() -> None:
    """Resolves each extra and combination, and prints the versions that matter for their compatibility."""
    (wheel,) = Path(sys.argv[1]).resolve().glob("pallas_ce-*.whl")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requests = [*declared, *COMBINATIONS]
    with ThreadPoolExecutor(max_workers=4) as pool:
        for extras, versions in zip(requests, pool.map(lambda extras: resolve(wheel, extras), requests), strict=True):
            for name, version in versions.items():
                if name.startswith(("jaxlib", "jax-cuda")) and version != versions["jax"]:
                    raise RuntimeError(f"pallas-ce[{extras}]: {name} {version} does not match jax {versions['jax']}")
            shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
            print(f"pallas-ce[{extras}]: {len(versions)} distributions, {shown}", flush=True)


if __name__ == "__main__":
    main()
