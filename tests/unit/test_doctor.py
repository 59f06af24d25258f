"""The doctor on machines that the test builds: file trees, environments, devices."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hornito.cli.main import main
from hornito.diag import doctor
from hornito.diag.dispatch import DispatchCheck
from hornito.diag.doctor import DeviceReport, Facts, describe_caps, judge, to_dict, to_text
from hornito.diag.environment import (
    Loader,
    Manifest,
    Node,
    Surroundings,
    cache_sizes,
    driver_manifests,
    find_loader,
    manifest_folders,
    render_nodes,
    surroundings,
    versions,
)
from hornito.vk import api
from hornito.vk.caps import Caps
from hornito.vk.loader import VariableAtFault, explain, variable_at_fault
from tree import ROOT

DEV = ("dev", "oracle")
"""Extras that are for work on Hornito."""


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def manifest(root: Path, place: str, library: str) -> None:
    write(root / place, json.dumps({"ICD": {"library_path": library, "api_version": "1.3"}}))


def loads(library: str) -> str:
    return "wrong ELF class: ELFCLASS32" if "broken" in library else ""


# -- driver manifests -----------------------------------------------------------------------------


def test_manifests_and_why_they_fail(tmp_path: Path) -> None:
    share = "usr/share/vulkan/icd.d"
    manifest(tmp_path, f"{share}/a.json", "libvulkan_good.so")
    manifest(tmp_path, f"{share}/b.json", "libvulkan_broken.so")
    manifest(tmp_path, f"{share}/c.json", "/opt/gone.so")
    write(tmp_path / "opt/there.so")
    manifest(tmp_path, "etc/vulkan/icd.d/d.json", "/opt/there.so")
    write(tmp_path / "usr/local/share/lib.so")
    manifest(tmp_path, "usr/local/share/vulkan/icd.d/e.json", "../../lib.so")
    write(tmp_path / share / "f.json", "{")
    write(tmp_path / share / "g.json", '{"ICD": 3}')
    found = {m.path.rsplit("/", 1)[1]: m for m in driver_manifests(tmp_path, {}, loads)}
    assert {name: m.problem for name, m in found.items()} == {
        "a.json": "",
        "b.json": "wrong ELF class: ELFCLASS32",
        "c.json": "its library /opt/gone.so does not exist",
        "d.json": "",
        "e.json": "",
        "f.json": "is no driver manifest (damaged JSON)",
        "g.json": "is no driver manifest (damaged JSON)",
    }
    assert found["d.json"].path == "/etc/vulkan/icd.d/d.json"


def test_the_loaders_variables(tmp_path: Path) -> None:
    manifest(tmp_path, "usr/share/vulkan/icd.d/a.json", "a.so")
    manifest(tmp_path, "x/b.json", "b.so")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        found = driver_manifests(tmp_path, {name: "/x/b.json:/x/none.json"}, loads)
        assert [m.path for m in found] == ["/x/b.json", "/x/none.json"]
        assert found[1].problem == "can't be read: No such file or directory"
    added = driver_manifests(tmp_path, {"VK_ADD_DRIVER_FILES": "/x/b.json"}, loads)
    assert [m.path for m in added] == ["/x/b.json", "/usr/share/vulkan/icd.d/a.json"]
    folders = manifest_folders(tmp_path, {"XDG_DATA_DIRS": "/nix/share", "HOME": "/home/u"})
    assert tmp_path / "nix/share/vulkan/icd.d" in folders
    assert tmp_path / "home/u/.local/share/vulkan/icd.d" in folders
    assert tmp_path / "usr/share/vulkan/icd.d" not in folders


def test_a_library_that_is_not_one(tmp_path: Path) -> None:
    library = write(tmp_path / "lib/x.so", "text")
    manifest(tmp_path, "etc/vulkan/icd.d/x.json", "/lib/x.so")
    (found,) = driver_manifests(tmp_path, {})
    assert str(library) in found.problem


# -- device files and machines --------------------------------------------------------------------


def test_render_nodes(tmp_path: Path) -> None:
    for name in ("renderD128", "renderD129", "card0"):
        write(tmp_path / "dev/dri" / name).chmod(0o660)
    groups = {"renderD128": "render", "renderD129": "992"}
    nodes = render_nodes(
        tmp_path, may_open=lambda path: False, group_of=lambda path: groups[path.name]
    )
    assert [node.path for node in nodes] == ["/dev/dri/renderD128", "/dev/dri/renderD129"]
    assert nodes[0].problem == "permission denied (mode 660, group render)"
    assert nodes[0].fix.startswith("sudo usermod -aG render $USER")
    assert nodes[1].fix == "docker run --device /dev/dri --group-add 992 ..."
    (first, _) = render_nodes(tmp_path, may_open=lambda path: True)
    assert first.problem == first.fix == "" and first.group
    assert render_nodes(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("file", "text", "environ", "want"),
    [
        (".dockerenv", "", {}, "docker"),
        ("run/.containerenv", "", {}, "podman"),
        ("proc/1/cgroup", "0::/kubepods/x", {}, "kubernetes"),
        ("proc/1/cgroup", "0::/lxc/x", {}, "lxc"),
        ("proc/1/cgroup", "0::/", {}, ""),
        ("x", "", {"KUBERNETES_SERVICE_HOST": "1"}, "kubernetes"),
        ("x", "", {"container": "systemd-nspawn"}, "systemd-nspawn"),
        ("x", "", {}, ""),
    ],
)
def test_containers(
    tmp_path: Path, file: str, text: str, environ: dict[str, str], want: str
) -> None:
    write(tmp_path / file, text)
    assert surroundings(tmp_path, environ).container == want


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    for name, kind, vendor in (
        ("0000:00:02.0", "0x030000", "0x8086"),
        ("0000:01:00.0", "0x030200", "0x10de"),
        ("0000:02:00.0", "0x030000", "0x1af4"),  # of a virtual machine
        ("0000:03:00.0", "0x020000", "0x8086"),  # a network card
    ):
        write(tmp_path / "sys/bus/pci/devices" / name / "class", kind + "\n")
        write(tmp_path / "sys/bus/pci/devices" / name / "vendor", vendor + "\n")
    write(tmp_path / "proc/version", "Linux version 5.15 microsoft-standard-WSL2")
    write(tmp_path / "dev/nvidiactl")
    machine = surroundings(tmp_path, {})
    assert machine.gpus == ("Intel 0000:00:02.0", "NVIDIA 0000:01:00.0")
    assert machine.wsl and machine.nvidia_device


def test_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(api._LIBRARIES, sys.platform, ("libvulkan-none.so.1",))
    loader = find_loader()
    assert loader.path == "" and "no Vulkan loader found" in loader.problem


def test_versions_and_caches(tmp_path: Path) -> None:
    found = versions()
    assert {"hornito", "python", "numpy", "tokenizers", "huggingface_hub"} <= found.keys()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(n for e, ns in extras.items() if e not in DEV for n in ns),
    ]
    assert {re.split("[^A-Za-z0-9_-]", name)[0] for name in wanted} <= found.keys()
    write(tmp_path / "models/a.vxm", "12345")
    write(tmp_path / "hub/o/r/x", "12")
    write(tmp_path / "pipelines-00.bin", "1")
    assert cache_sizes(tmp_path) == {"models": 5, "hub": 2, "pipelines": 1}
    assert cache_sizes(tmp_path / "none") == {"models": 0, "hub": 0, "pipelines": 0}


# -- the verdict ----------------------------------------------------------------------------------

GPU = DeviceReport(
    0, "Big GPU", "discrete", True, "", "drv 1.2", "1.3.0", "00", None, dispatch="ok"
)
SOFT = dataclasses.replace(GPU, index=1, name="llvmpipe", kind="software")
OLD = dataclasses.replace(GPU, name="Old", usable=False, reason="Vulkan 1.1, Hornito needs 1.2")
WRONG = dataclasses.replace(GPU, problem="wrong results: linear/gemm, 3 of 100 with other bits")
UNBUILT = dataclasses.replace(GPU, problem="not built: run python tools/build_kernels.py")
NODE = Node("/dev/dri/renderD128", "660", "render", "", "")
CLOSED = Node("/dev/dri/renderD128", "660", "render", "denied", "sudo usermod -aG render $USER")
BARE = Surroundings("", False, (), False)


def facts(
    *devices: DeviceReport,
    machine: Surroundings = BARE,
    nodes: tuple[Node, ...] = (),
    manifests: tuple[Manifest, ...] = (),
    loader: Loader = Loader("/lib/libvulkan.so.1", "1.3.0"),  # noqa: B008 (frozen)
    **more: Any,
) -> Facts:
    error = "" if devices else "no Vulkan driver found a device"
    return Facts(
        versions={"hornito": "1"},
        loader=loader,
        manifests=manifests,
        nodes=nodes,
        machine=machine,
        devices=devices,
        device_error=error,
        cache="/cache",
        cache_bytes={"models": 1},
        **more,
    )


LXC_NVIDIA = Surroundings("docker", False, ("NVIDIA 01",), True)
VERDICTS = [
    (facts(GPU, SOFT), 0, "works on Big GPU (discrete)", "hornito run MODEL"),
    (facts(SOFT), 0, "only on the software device llvmpipe", "hornito run MODEL"),
    (
        facts(SOFT, machine=Surroundings("", False, ("AMD 01",), False), nodes=(NODE,)),
        0,
        "which is slow",
        "sudo apt-get install mesa-vulkan-drivers",
    ),
    (facts(SOFT, nodes=(CLOSED,)), 0, "which is slow", "sudo usermod -aG render $USER"),
    (
        facts(loader=Loader("", "", "no loader")),
        4,
        "No Vulkan loader",
        "apt-get install libvulkan1",
    ),
    (facts(OLD), 4, "Old: Vulkan 1.1, Hornito needs 1.2", "apt-get install mesa-vulkan-drivers"),
    (facts(), 4, "No Vulkan driver offers a device", "apt-get install mesa-vulkan-drivers"),
    (
        facts(machine=Surroundings("docker", False, (), False)),
        4,
        "No Vulkan driver offers a device",
        "docker run --device /dev/dri ...",
    ),
    (facts(machine=LXC_NVIDIA), 4, "No Vulkan", "NVIDIA_DRIVER_CAPABILITIES=all"),
    (facts(SOFT, machine=LXC_NVIDIA), 0, "which is slow", "NVIDIA_DRIVER_CAPABILITIES=all"),
    (
        facts(machine=Surroundings("", False, ("NVIDIA 01",), False)),
        4,
        "No Vulkan",
        "sudo ubuntu-drivers install",
    ),
    (facts(WRONG), 1, "Big GPU can't be trusted: wrong results", "--only-upgrade"),
    (facts(WRONG, SOFT), 1, "can't be trusted", "export HORNITO_DEVICE=1"),
    (facts(UNBUILT), 1, "Hornito is not complete", "python tools/build_kernels.py"),
    (
        facts(fault=VariableAtFault("VK_DRIVER_FILES", "VK_DRIVER_FILES names /x, ...")),
        4,
        "No Vulkan driver was loaded: VK_DRIVER_FILES names /x",
        "unset VK_DRIVER_FILES",
    ),
    (facts(platform="darwin"), 4, "No Vulkan driver", "install the Vulkan driver of your GPU"),
]


@pytest.mark.parametrize(("found", "code", "text", "command"), VERDICTS)
def test_verdicts(found: Facts, code: int, text: str, command: str) -> None:
    verdict = judge(found)
    assert verdict.exit_code == code
    assert text in verdict.text and command in verdict.next
    report = to_text(found, verdict)
    assert report.endswith(f"verdict: {verdict.text}\nnext: {verdict.next}")
    assert json.loads(json.dumps(to_dict(found, verdict)))["verdict"]["exit_code"] == code


def test_warnings() -> None:
    found = facts(
        SOFT,
        machine=Surroundings("docker", False, ("AMD 01",), False),
        manifests=(Manifest("/a.json", "a.so", "does not exist"), Manifest("/b.json", "b.so", "")),
        selected="software",
    )
    warnings = judge(found).warnings
    assert warnings == [
        "driver manifest /a.json: does not exist",
        "this is a container (docker) without /dev/dri: it sees no GPU",
        "GPU without a Vulkan driver: AMD 01",
        "only a software device: fine for trying things out, tens of times slower",
        "HORNITO_DEVICE=software chooses the device",
    ]
    assert judge(facts(GPU, SOFT)).warnings == []


def test_dispatch_verdicts() -> None:
    good = DispatchCheck("linear/x", 1, 100, 1e-7, 0)
    assert good.passed
    assert not dataclasses.replace(good, error=1e-3).passed
    assert not dataclasses.replace(good, error=float("inf")).passed
    assert not dataclasses.replace(good, different=1).passed


def test_caps_of_the_smallest_device() -> None:
    limits, features, missing = describe_caps(Caps.parse({}))
    assert limits["shared_memory_bytes"] == 16384 and features == []
    assert {"float16", "cooperative_matrix", "timestamps"} <= set(missing)


def test_the_verb_exits_with_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: facts(WRONG))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "dispatch: wrong results: linear/gemm" in out and "next: sudo apt-get" in out
    monkeypatch.setattr(doctor, "examine", lambda: facts())
    assert main(["doctor", "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["verdict"]["exit_code"] == 4


@pytest.mark.gpu
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    """Real dispatches on every device here."""
    code = main(["doctor", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert code == data["verdict"]["exit_code"] == 0, data["verdict"]
    assert data["loader"]["path"] and data["loader"]["version"].startswith("1.")
    for device in data["devices"]:
        if device["usable"]:
            assert device["problem"] == "" and device["limits"]["memory_bytes"] > 0
            assert device["dispatch"].count("100 runs, 0 with other bits") == 2
    assert main(["doctor"]) == 0
    assert "verdict: Hornito works" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_device_that_computes_wrong_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What arrives differs in one bit of one run."""
    from hornito.vk.device import Device

    real = Device.download
    calls = []

    def download(self: Device, buffer: object, offset: int, size: int) -> bytes:
        data = bytearray(real(self, buffer, offset, size))  # type: ignore[arg-type]
        calls.append(1)
        if len(calls) == 57:
            data[0] ^= 1
        return bytes(data)

    monkeypatch.setattr(Device, "download", download)
    assert main(["doctor"]) == 1
    assert "1 with other bits" in capsys.readouterr().out


# -- the loader's variables -----------------------------------------------------------------------


def test_variables_that_hide_every_driver(tmp_path: Path) -> None:
    write(tmp_path / "there.json")
    there, gone = str(tmp_path / "there.json"), str(tmp_path / "gone.json")
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        assert variable_at_fault({name: there}) is None
        fault = variable_at_fault({name: f"{there}:{gone}"})
        assert fault is not None and fault.fix == f"unset {name}"
        assert fault.text == f"{name} names {gone}, which does not exist"
    both = {"VK_DRIVER_FILES": there, "VK_ICD_FILENAMES": gone}
    assert variable_at_fault(both) is None  # the loader does not read the second
    fault = variable_at_fault({"VK_LOADER_DRIVERS_DISABLE": "*"})
    assert fault is not None and fault.fix == "unset VK_LOADER_DRIVERS_DISABLE"
    assert variable_at_fault({"VK_DRIVER_FILES": "/there.json"}, tmp_path) is None
    assert variable_at_fault({}) is None


def test_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VK_DRIVER_FILES", "VK_ICD_FILENAMES"):
        monkeypatch.delenv(name, raising=False)
    assert explain("no driver") == "no driver"
    monkeypatch.setenv("VK_ICD_FILENAMES", "/gone/a.json:/gone/b.json")
    assert explain("no driver") == (
        "no Vulkan driver was loaded: VK_ICD_FILENAMES names /gone/a.json, /gone/b.json, which do "
        "not exist. Run: unset VK_ICD_FILENAMES"
    )


def test_a_manifest_without_a_library_has_no_empty_brackets() -> None:
    found = facts(manifests=(Manifest("/a.json", "", "can't be read: No such file"),))
    report = to_text(found, judge(found))
    assert "  /a.json: can't be read: No such file\n" in report and "()" not in report
