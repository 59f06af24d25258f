"""Whole packages in every storage type: a tiny llama from a GGUF file with quantised tensors, kept,
against the same numbers in fp32; rounding; and packages that are stored anew.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hornito
from gguf_samples import HF, write_checkpoint
from hornito.errors import UsageError
from hornito.graph.graph import Graph
from hornito.package import open_package
from hornito.plan.plan import weight_sizes
from hornito.runtime.session import Session
from tiny import CONTEXT, Floats

gpu = pytest.mark.gpu

NAME = "llama3-tiny"
PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16")


def kinds(*of_parts: str) -> dict[str, str]:
    """Type of each matrix of both layers, by part."""
    chosen = dict(zip(PARTS, of_parts, strict=True))
    return {f"blk.{i}.{part}.weight": kind for i in range(2) for part, kind in chosen.items()}


MIXES = {
    **{
        kind: {**kinds(*[kind] * 7), "token_embd.weight": kind, "output.weight": kind}
        for kind in KINDS
    },
    # As in "Q4_K_M" files: the value projections and some others have more bits.
    "mixed": {
        **kinds("Q4_0", "Q4_0", "Q8_0", "Q5_0", "Q4_1", "Q4_1", "Q5_1"),
        "token_embd.weight": "Q8_0",
        "output.weight": "Q8_0",
    },
}


def logits_of(package: Path) -> Floats:
    ids = [1, 5, 77, 130, 9, 301, 444, 2, 8, 500, 31]
    with (
        hornito.load(package, precision="high", context=CONTEXT) as llm,
        Session(llm.engine) as session,
    ):
        logits = session.prefill_logits(ids[:-1])
        session.step(ids[-1])
        return np.concatenate([logits, session.logits()[None]])


@gpu
@pytest.mark.parametrize("mix", MIXES)
def test_kept_blocks_give_the_logits_of_their_numbers(tmp_path: Path, mix: str) -> None:
    """Within 1e-3 relative of the same file dequantised to fp32, for the whole of a prompt and for
    a decoded step."""
    pytest.importorskip("gguf")
    source = write_checkpoint(tmp_path / "m.gguf", NAME, quantise=MIXES[mix])
    kept, plain = tmp_path / "kept.vxm", tmp_path / "plain.vxm"
    hornito.compile_source(source, kept, weights="keep")
    hornito.compile_source(source, plain, weights="fp32")
    want, got = logits_of(plain), logits_of(kept)
    assert np.abs(got - want).max() <= 1e-3 * np.abs(want).max()
    with open_package(kept) as package:
        found = {w["dtype"] for w in package.manifest.graph["weights"].values() if w["matrix"]}
        merged = sum(
            node["op"] in ("rope_append", "qkv_append") for node in package.manifest.graph["nodes"]
        )
        sizes = weight_sizes(Graph.from_json(package.manifest.graph))
        assert sizes == {name: info.nbytes for name, info in package.tensors.items()}
    expected = {
        "Q8_0": {"int8"},
        "Q4_0": {"int4"},
        "Q4_1": {"int4m"},
        "Q5_0": {"q5"},
        "Q5_1": {"q5m"},
        "F16": {"fp16"},
        "BF16": {"bf16"},
        "mixed": {"int8", "int4", "int4m", "q5", "q5m"},
    }
    assert found == expected[mix]
    assert merged == (0 if mix == "mixed" else 2), "q, k and v are merged where their types agree"


def test_what_is_kept_by_default(tmp_path: Path) -> None:
    """`keep` for a source with quantised tensors, fp16 for others."""
    pytest.importorskip("gguf")
    for kind, expected in (("Q5_0", "keep"), ("F16", "fp16")):
        source = write_checkpoint(tmp_path / f"{kind}.gguf", NAME, quantise=MIXES[kind])
        hornito.compile_source(source, tmp_path / "m.vxm")
        with open_package(tmp_path / "m.vxm") as package:
            assert package.manifest.quant["weights"] == expected


def test_tables_have_eight_bits_beside_four(tmp_path: Path) -> None:
    """In groups of 64 where rows are a multiple of that, else of 32."""
    pytest.importorskip("gguf")
    source = write_checkpoint(tmp_path / "m.gguf", NAME)
    report = hornito.compile_source(source, tmp_path / "m.vxm", weights="int4")
    with open_package(tmp_path / "m.vxm") as package:
        formats = package.manifest.quant["formats"]
    # Outliers are 16 bits each of 8 columns of 64 or 96, and their numbers.
    assert set(formats) == {"int4g64o8", "int4o8", "int8g64"}
    assert formats["int8g64"]["bits"] == 8.25
    assert 6.25 <= formats["int4g64o8"]["bits"] < 6.3
    assert 5.83 <= formats["int4o8"]["bits"] < 5.9
    assert formats["int8g64"]["matrices"] == 2
    assert not any("instead of" in line for line in report.warnings)


def test_rows_that_no_block_divides_are_fp16_and_said_so(tmp_path: Path) -> None:
    """llama-tiny is 72 wide: only the matrices behind its 128 wide middle can have blocks."""
    report = hornito.compile_source(HF / "llama-tiny", tmp_path / "m.vxm", weights="int8")
    with open_package(tmp_path / "m.vxm") as package:
        weights = package.manifest.graph["weights"]
    assert {w["dtype"] for n, w in weights.items() if n.endswith("down_proj.weight")} == {"int8"}
    assert all(
        w["shape"][1] == 128 or w["dtype"] != "int8" for w in weights.values() if w["matrix"]
    )
    (line,) = [line for line in report.warnings if "instead of" in line]
    assert line.startswith("stored as fp16 instead of int8, 19 in all: model.embed_tokens.weight, ")


@gpu
@pytest.mark.parametrize(("weights", "worst"), [("int8", 0.03), ("int4", 0.4), ("bf16", 0.03)])
def test_rounded_weights_stay_close(tmp_path: Path, weights: str, worst: float) -> None:
    """Root-mean-square difference of the logits, relative to their spread."""
    path = tmp_path / "m.vxm"
    pytest.importorskip("gguf")
    source = write_checkpoint(tmp_path / "m.gguf", NAME)
    hornito.compile_source(source, tmp_path / "plain.vxm", weights="fp32")
    hornito.compile_source(source, path, weights=weights)
    again = tmp_path / "again.vxm"
    hornito.compile_source(source, again, weights=weights)
    assert path.read_bytes() == again.read_bytes(), "the same input gives the same bytes"
    want, got = logits_of(tmp_path / "plain.vxm"), logits_of(path)
    assert np.sqrt(np.square(got - want).mean()) <= worst * want.std()


@gpu
def test_a_package_is_stored_anew(tmp_path: Path) -> None:
    """From fp32, a package gives what its source gives, byte for byte, calibration included."""
    pytest.importorskip("gguf")
    source = write_checkpoint(tmp_path / "m.gguf", NAME, quantise=MIXES["Q5_1"])
    plain = tmp_path / "plain.vxm"
    hornito.compile_source(source, plain, weights="fp32")
    for weights in ("int8", "fp16"):
        direct, anew = (tmp_path / f"{name}-{weights}.vxm" for name in ("direct", "anew"))
        hornito.compile_source(source, direct, weights=weights)
        report = hornito.compile_source(plain, anew, weights=weights)
        assert report.warnings == []
        with open_package(direct) as a, open_package(anew) as b:
            assert a.manifest.graph == b.manifest.graph and a.manifest.facts == b.manifest.facts
            assert all(bytes(a.tensor(name)) == bytes(b.tensor(name)) for name in a.tensors)
            assert b.manifest.quant["from"] == "fp32"


def test_a_package_is_not_said_to_be_more_precise_than_it_is(tmp_path: Path) -> None:
    """Matrices that would not shrink stay as they are; when none would, it is refused."""
    pytest.importorskip("gguf")
    source = write_checkpoint(tmp_path / "m.gguf", NAME, quantise=MIXES["mixed"])
    kept, anew = tmp_path / "kept.vxm", tmp_path / "anew.vxm"
    hornito.compile_source(source, kept)
    for weights in ("fp32", "fp16", "int8"):
        with pytest.raises(UsageError, match=f"holds keep.*{weights} would claim precision"):
            hornito.compile_source(kept, anew, weights=weights)
    assert not anew.exists()
    part = {**kinds(*["F16"] * 6, "Q4_0"), "token_embd.weight": "Q5_0", "output.weight": "F16"}
    source = write_checkpoint(tmp_path / "part.gguf", NAME, quantise=part)
    hornito.compile_source(source, kept)
    report = hornito.compile_source(kept, anew, weights="int8")
    with open_package(kept) as a, open_package(anew) as b:
        before, after = (p.manifest.graph["weights"] for p in (a, b))
        for name, weight in after.items():
            was = before[name]["dtype"]
            assert weight["dtype"] == {"fp16": "int8"}.get(was, was)
            if weight["dtype"] == was:
                assert bytes(a.tensor(name)) == bytes(b.tensor(name))
    assert [line for line in report.warnings if "3 matrices stay as the package has them" in line]
    with pytest.raises(UsageError, match="keep"):
        hornito.compile_source(kept, anew, weights="keep")
    plain, brain = tmp_path / "plain.vxm", tmp_path / "brain.vxm"
    hornito.compile_source(HF / NAME, plain, weights="fp16")
    hornito.compile_source(plain, brain, weights="bf16")
    with pytest.raises(UsageError, match=r"holds bf16 .*fp32 would claim precision"):
        hornito.compile_source(brain, anew, weights="fp32")


def test_unknown_weights(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"one of fp32, fp16, .*, int4m, keep, not 'int3'"):
        hornito.compile_source("tests/data/hf/llama3-tiny", tmp_path / "m.vxm", weights="int3")
