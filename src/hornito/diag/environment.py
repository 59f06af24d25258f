"""What surrounds Vulkan on a Linux machine: loader, driver manifests, device files, containers.

Every function takes the file tree's root and the environment variables, so that tests can build
machines that they do not have.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import hornito
from hornito.errors import HornitoError

_VENDORS = {0x1002: "AMD", 0x10DE: "NVIDIA", 0x8086: "Intel", 0x5143: "Qualcomm", 0x13B5: "Arm"}
_PACKAGES = (
    *("numpy", "safetensors", "tokenizers", "jinja2", "rich", "threadpoolctl"),
    # of the extras hub, onnx, plot, serve and structured:
    *("huggingface_hub", "onnx", "matplotlib", "starlette", "uvicorn", "prometheus_client"),
    "llguidance",
)

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Loader:
    """The Vulkan loader; `path` and `version` are empty when there is none, `problem` says why."""

    path: str
    version: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A driver's JSON file.

    Attributes:
        path: of the JSON file.
        library: what it names.
        problem: why the loader can't use it; '' when it can.
    """

    path: str
    library: str
    problem: str


@dataclass(frozen=True, slots=True)
class Node:
    """A device file of a GPU; `problem` says why it can't be opened, `fix` what to do."""

    path: str
    mode: str
    group: str
    problem: str
    fix: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What kind of machine this is.

    Attributes:
        container: 'docker', 'podman', 'kubernetes', 'lxc', ... or ''.
        wsl: whether it is the Windows Subsystem for Linux.
        gpus: names of GPUs on the PCI bus, drivers or not.
        nvidia_device: whether the NVIDIA kernel driver's files are there.
    """

    container: str
    wsl: bool
    gpus: tuple[str, ...]
    nvidia_device: bool


def versions() -> dict[str, str]:
    """Versions of Hornito, Python, the system and every library; 'not installed' where absent."""
    found = {
        "hornito": hornito.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def find_loader(maps: Path = Path("/proc/self/maps")) -> Loader:
    """The Vulkan loader of this process, opened when it was not yet."""
    from hornito.vk import api

    try:
        library = api.load_library()
        functions = api.GlobalFunctions(library)
    except HornitoError as error:
        return Loader("", "", str(error))
    version = ctypes.c_uint32(api.make_version(1, 0))
    if functions.vkEnumerateInstanceVersion is not None:
        functions.vkEnumerateInstanceVersion(ctypes.byref(version))
    text = maps.read_text() if maps.is_file() else ""
    paths = re.findall(r"(/\S*(?:libvulkan|libMoltenVK)\S*)", text)
    path = paths[0] if paths else str(library._name)
    return Loader(path, api.version_text(version.value))


# -- driver manifests -------------------------------------------------------------------------


def manifest_folders(root: Path, environ: Environ) -> list[Path]:
    """Where the loader looks for drivers, in its order."""
    home = environ.get("HOME", "/root")
    groups = [
        [environ.get("XDG_CONFIG_HOME") or f"{home}/.config"],
        (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":"),
        ["/etc"],
        [environ.get("XDG_DATA_HOME") or f"{home}/.local/share"],
        (environ.get("XDG_DATA_DIRS") or "/usr/local/share:/usr/share").split(":"),
    ]
    bases = dict.fromkeys(base for group in groups for base in group if base)
    return [root / base.lstrip("/") / "vulkan" / "icd.d" for base in bases]


def load_problem(library: str) -> str:
    """Why a driver's library can't be loaded into this process; '' when it can."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return ""


def driver_manifests(
    root: Path, environ: Environ, load: Callable[[str], str] = load_problem
) -> list[Manifest]:
    """Every driver manifest that the loader reads, and which of them fail."""
    chosen = environ.get("VK_DRIVER_FILES") or environ.get("VK_ICD_FILENAMES")
    files: list[Path] = []
    if chosen:
        files = [root / entry.lstrip("/") for entry in chosen.split(":") if entry]
    else:
        added = environ.get("VK_ADD_DRIVER_FILES", "").split(":")
        files = [root / entry.lstrip("/") for entry in added if entry]
        for folder in manifest_folders(root, environ):
            files += sorted(folder.glob("*.json")) if folder.is_dir() else []
    return [_manifest(file, root, load) for file in files]


def _manifest(file: Path, root: Path, load: Callable[[str], str]) -> Manifest:
    path = "/" + str(file.relative_to(root))
    try:
        library = json.loads(file.read_text(encoding="utf-8"))["ICD"]["library_path"]
    except OSError as error:
        return Manifest(path, "", f"can't be read: {error.strerror}")
    except (ValueError, KeyError, TypeError):
        return Manifest(path, "", "is no driver manifest (damaged JSON)")
    library = str(library)
    if library.startswith("/"):
        full = root / library.lstrip("/")
    elif "/" in library:
        full = file.parent / library
    else:
        return Manifest(path, library, load(library))
    if not full.exists():
        return Manifest(path, library, f"its library {library} does not exist")
    return Manifest(path, library, load(str(full)))


# -- device files -----------------------------------------------------------------------------


def render_nodes(
    root: Path,
    *,
    may_open: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK),
    group_of: Callable[[Path], str] | None = None,
) -> list[Node]:
    """The GPU's files in /dev/dri, and whether this user may open them."""
    nodes = []
    for path in sorted((root / "dev/dri").glob("renderD*")):
        group = (group_of or _group)(path)
        mode = f"{path.stat().st_mode & 0o777:o}"
        problem = fix = ""
        if not may_open(path):
            problem = f"permission denied (mode {mode}, group {group})"
            fix = f"sudo usermod -aG {group} $USER   # then log in again"
            if group.isdigit():  # a group of the host that the container does not know
                problem += "; the group has no name here, as in a container"
                fix = f"docker run --device /dev/dri --group-add {group} ..."
        nodes.append(Node("/" + str(path.relative_to(root)), mode, group, problem, fix))
    return nodes


def _group(path: Path) -> str:
    import grp  # not on every system

    number = path.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


# -- the machine ------------------------------------------------------------------------------


def surroundings(root: Path, environ: Environ) -> Surroundings:
    """Container, WSL, and the GPUs on the PCI bus."""
    kernel = _read(root / "proc/version").lower()
    return Surroundings(
        container=_container(root, environ),
        wsl="microsoft" in kernel,
        gpus=tuple(_pci_gpus(root)),
        nvidia_device=(root / "dev/nvidiactl").exists(),
    )


def _container(root: Path, environ: Environ) -> str:
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (root / "run/.containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    groups = _read(root / "proc/1/cgroup")
    for word, name in (("kubepods", "kubernetes"), ("docker", "docker"), ("lxc", "lxc")):
        if word in groups:
            return name
    return environ.get("container", "")


def _pci_gpus(root: Path) -> list[str]:
    """'NVIDIA 0000:01:00.0' for every display controller or 3D accelerator."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        if not _read(folder / "class").startswith("0x03"):
            continue
        vendor = _read(folder / "vendor").strip()
        number = int(vendor, 16) if re.fullmatch("0x[0-9a-f]+", vendor) else 0
        if number in _VENDORS:  # the emulated ones of virtual machines are no GPUs
            found.append(f"{_VENDORS[number]} {folder.name}")
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # absent, or not for us to read: says nothing about the machine
        return ""


# -- caches -----------------------------------------------------------------------------------


def cache_sizes(directory: Path) -> dict[str, int]:
    """Bytes in the cache by purpose: models, hub (downloads), pipelines."""
    sizes = {"models": 0, "hub": 0, "pipelines": 0}
    for folder in ("models", "hub"):
        files = (directory / folder).rglob("*")
        sizes[folder] = sum(file.stat().st_size for file in files if file.is_file())
    sizes["pipelines"] = sum(f.stat().st_size for f in directory.glob("pipelines-*.bin"))
    return sizes
