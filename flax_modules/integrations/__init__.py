"""The losses of trainers written in JAX, without their stored logits: one module a package, which a call imports.

A call warns where the package's version is not the one that the tests have run.
"""

import importlib.metadata
import warnings


def check_version(distribution: str, tested: str) -> None:
    """Warns where `distribution` has another version than the one `tested`.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModuleNotFoundError(f"{distribution} is not installed: pip install {distribution}=={tested}") from error
    if version != tested:
        warnings.warn(f"{distribution} {version} was not tested with flax_modules; tested: {tested}", stacklevel=3)
