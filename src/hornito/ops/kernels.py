"""Access to the compiled kernels that ship inside the package."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from hornito.errors import HornitoError


@cache
def load_spirv(name: str) -> bytes:
    """Returns the SPIR-V of a kernel.

    Args:
        name: 'op/stem.variant', as in src/hornito/_spirv; a kernel without variants has 'default'.

    Raises:
        HornitoError: there is no such file, since the kernels were not built or the name is wrong.
    """
    resource = files("hornito").joinpath("_spirv", f"{name}.spv")
    try:
        return resource.read_bytes()
    except OSError as error:
        raise HornitoError(
            f"kernel '{name}' has no SPIR-V in {resource}:"
            " kernels are not built: run python tools/build_kernels.py"
        ) from error


def kernel_names() -> tuple[str, ...]:
    """Names of all compiled kernels, sorted; empty when they were not built."""
    root = files("hornito").joinpath("_spirv")
    if not root.is_dir():
        return ()
    return tuple(
        sorted(
            f"{folder.name}/{item.name.removesuffix('.spv')}"
            for folder in root.iterdir()
            if folder.is_dir()
            for item in folder.iterdir()
            if item.name.endswith(".spv")
        )
    )
