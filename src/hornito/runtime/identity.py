"""What a KV cache depends on: two engines with one identity can exchange snapshots."""

from __future__ import annotations

from typing import Any

from hornito.graph.graph import Graph
from hornito.ops.rope import original_max
from hornito.package.reader import Package
from hornito.plan.plan import Plan, PlanOptions


def kv_identity(
    package: Package, graph: Graph, plan: Plan, options: PlanOptions, precision: str
) -> dict[str, Any]:
    """What a KV cache depends on, as plain JSON types; the first that differs is named."""
    manifest = package.manifest
    longest = original_max(graph)
    if options.fp32_nodes:
        precision += f", fp32 in {', '.join(sorted(options.fp32_nodes))}"
    return {
        "weights": manifest.quant.get("weights"),
        "precision": precision,
        "kv": "fp16" if options.kv_half else "fp32",
        "rope_theta": manifest.facts.get("rope_theta"),
        "rope_scaling": manifest.facts.get("rope_scaling"),
        "rope_factors": None
        if longest is None
        else "long"
        if options.context > longest
        else "short",
        "windows": [kind.window for kind in plan.kinds],
        "kinds": [[kind.kv_heads, kind.head_dim, list(kind.layers)] for kind in plan.kinds],
        "package": manifest.identity(),
    }
