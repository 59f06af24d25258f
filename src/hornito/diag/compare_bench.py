"""A model and its reference, opened for comparison, and trials of the model with parts left out."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.cache import resolve_model
from hornito.compiler import compile_source
from hornito.diag.bench import prompt_ids
from hornito.diag.compare_decoder import DeviceSide, Run, Side
from hornito.diag.compare_numpy import NumpySide, StoredWeights
from hornito.diag.compare_values import (
    PRECISION_TOLERANCE,
    Tolerance,
    storage_tolerance,
)
from hornito.errors import ContextOverflowError, UsageError
from hornito.graph.graph import Graph
from hornito.graph.passes import ORDER
from hornito.loading import open_model
from hornito.ops.base import head_ids
from hornito.ops.variants import Choices
from hornito.package import Package, is_package, open_package
from hornito.package.model import model_graph
from hornito.plan.pins import pinned_nodes
from hornito.plan.plan import PlanOptions
from hornito.progress import NullProgress, Progress
from hornito.runtime.engine import Engine
from hornito.runtime.memory import fit_context
from hornito.runtime.settle import KernelPolicy
from hornito.text.tokenizer import package_tokenizer
from hornito.vk.device import open_device

if TYPE_CHECKING:
    from hornito.vk.device import Device

CPU = "cpu"
VULKAN = "vulkan"
KV = "keys and values in fp16"
PRODUCTS = "products of fp16 operands"
VALUES = "values stored as fp16"


@dataclass(frozen=True, slots=True)
class Settings:
    """How to compare.

    Attributes:
        device, context, precision, kv_half, weights, slots, verify, tune, submission_ms,
            disable_features: of the model, as `hornito.load` takes them. More slots than one bring
            the batch buckets.
        backend, ref_backend: what runs either side, `vulkan` or `cpu` (the numpy evaluator).
        ref_weights: storage type of a reference that is compiled.
        disabled_passes: graph passes to leave out of the model.
        fp32_tensors: patterns of nodes, values or weights whose products keep fp32 operands.
        steps: tokens to decode behind the prompt, the reference's greedy ones.
        relative, cosine: tolerances; None for those of the precision and the weights.
        dumps: (pattern, folder) of values to write.
    """

    device: str | None = None
    context: int | None = None
    precision: str = "normal"
    kv_half: bool = True
    weights: str | None = None
    slots: int = 1
    verify: bool = False
    tune: str | None = None
    submission_ms: float | None = None
    disable_features: tuple[str, ...] = ()
    backend: str = VULKAN
    ref_backend: str = CPU
    ref_weights: str | None = None
    disabled_passes: tuple[str, ...] = ()
    fp32_tensors: tuple[str, ...] = ()
    steps: int = 4
    relative: float | None = None
    cosine: float | None = None
    dumps: tuple[tuple[str, str], ...] = ()


class Workbench:
    """One model and its reference, opened; trials of the model are made on it.

    Args:
        model, reference: files, directories or names; the reference may be `cpu`.
        prompt: text or token ids; None for ids that mean nothing.

    Raises:
        UsageError: an argument is wrong, or contradicts another.
    """

    def __init__(
        self,
        stack: ExitStack,
        model: str,
        reference: str,
        prompt: str | Sequence[int] | None,
        settings: Settings,
        progress: Progress | None = None,
    ) -> None:
        self.settings = settings
        self.progress = progress or NullProgress()
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hornito-")))
        self._compiles = 0
        self.notes: list[str] = []
        self.model = resolve_model(model, settings.weights)
        self.has_source = not is_package(self.model)
        self.package = stack.enter_context(self._opened(settings.disabled_passes))
        if settings.verify:
            self.package.check(progress)
        self.graph = model_graph(self.package)
        self.reference_name = reference
        self.device: Device | None = None
        if VULKAN in (settings.backend, settings.ref_backend):
            self.device = stack.enter_context(
                open_device(settings.device, disable_features=settings.disable_features)
            )
        self.context = self._context()
        ref_package = self._reference_package(stack, reference)
        ref_graph = model_graph(ref_package)
        self.weights = str(self.package.manifest.quant.get("weights"))
        self.stored = self._stored(stack, reference, ref_package)
        self.reference_weights = str(ref_package.manifest.quant.get("weights"))
        self.tolerance = self._tolerance(ref_graph)
        vocabulary = min(head_ids(self.graph), head_ids(ref_graph))
        self.prompt = self._prompt_ids(prompt, vocabulary)
        self.reference: Side
        if settings.ref_backend == VULKAN:
            options = replace(self._options(ref_graph, Choices()), fp32_nodes=frozenset())
            self.reference = stack.enter_context(self._engine(ref_package, ref_graph, options))
        else:
            weights = StoredWeights(ref_graph, ref_package)
            self.reference = NumpySide(ref_graph, weights, self.context)
        self.progress.start("evaluating the reference", 1)
        tokens = self.reference.greedy(self.prompt, settings.steps)
        self.progress.finish()
        if max(tokens, default=0) >= vocabulary:
            raise UsageError(
                f"the reference answers with token {max(tokens)}; the model has {vocabulary}: they "
                "are not the same model"
            )
        self.ids = (*self.prompt, *tokens)

    # -- files ------------------------------------------------------------------------------

    def _opened(self, disabled: Collection[str]) -> Package:
        """The model's package; a source is compiled anew, so that no cached package is stale."""
        if self.has_source:
            return self._compiled(self.model, self.settings.weights, disabled)
        if disabled:
            raise UsageError(
                f"{self.model} is a package: its passes ran when it was compiled. Give its source "
                "to switch one off (--disable-pass)"
            )
        return open_model(self.model, self.settings.weights, self.progress)

    def _compiled(self, source: Path, weights: str | None, disabled: Collection[str]) -> Package:
        self._compiles += 1
        path = self._folder / f"{self._compiles}.vxm"
        compile_source(source, path, weights=weights, disabled_passes=disabled)
        package = open_package(path)
        # What is open stays readable. Windows keeps it until the folder goes.
        with suppress(PermissionError):
            path.unlink()
        return package

    def _reference_package(self, stack: ExitStack, reference: str) -> Package:
        """What the reference runs; without passes where it is compiled for the evaluator."""
        settings = self.settings
        if reference == CPU:
            if settings.ref_weights is not None:
                raise UsageError("--ref cpu has the model's own weights; --ref FILE takes others")
            if settings.ref_backend != CPU:
                raise UsageError("--ref cpu runs on the numpy evaluator; --ref FILE may do without")
            source, weights = self.model, settings.weights
        else:
            source, weights = resolve_model(reference, settings.ref_weights), settings.ref_weights
        if not is_package(source):
            disabled = ORDER if settings.ref_backend == CPU else ()
            return stack.enter_context(self._compiled(source, weights, disabled))
        if reference == CPU:
            self.notes.append(
                "the reference evaluates the package's own graph, after passes: give the source "
                "instead of the package to see a wrong pass, too"
            )
            return self.package
        return stack.enter_context(open_model(source, weights, self.progress))

    def _stored(
        self, stack: ExitStack, reference: str, ref_package: Package
    ) -> tuple[StoredWeights, StoredWeights] | None:
        """The weights of both sides as they are stored, after the same passes, so that matrices
        that passes join are one on both; None where they are the same ones."""
        if reference == CPU:
            return None
        source = resolve_model(reference, self.settings.ref_weights)
        if not is_package(source) and self.settings.ref_backend == CPU:
            disabled = self.settings.disabled_passes
            compiled = self._compiled(source, self.settings.ref_weights, disabled)
            ref_package = stack.enter_context(compiled)
        both = (self.graph, self.package), (model_graph(ref_package), ref_package)
        mine, other = (StoredWeights(graph, package) for graph, package in both)
        return mine, other

    def _context(self) -> int:
        """Positions of the plan: those asked for, or the model's own as far as they fit."""
        facts = self.package.manifest.facts
        if self.settings.backend == CPU or self.device is None:
            return self.settings.context or int(facts["context_length"])
        options = PlanOptions(
            context=self.settings.context or facts["context_length"],
            kv_half=self.settings.kv_half,
            slots=self.settings.slots,
            keep_values=True,
        )
        requested = self.settings.context is not None
        return fit_context(self.graph, self.device, options, requested=requested).context

    def _prompt_ids(self, prompt: str | Sequence[int] | None, vocabulary: int) -> list[int]:
        """The prompt as ids below `vocabulary`, with room for the steps behind it."""
        if prompt is None:
            ids = prompt_ids(24, vocabulary)
        elif isinstance(prompt, str):
            ids = package_tokenizer(self.package).encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise UsageError("the prompt is empty")
        if max(ids) >= vocabulary:
            raise UsageError(f"token id {max(ids)} is outside the vocabulary of {vocabulary}")
        total = len(ids) + self.settings.steps
        if total > self.context:
            raise ContextOverflowError(
                f"{len(ids)} tokens and {self.settings.steps} steps exceed the context of "
                f"{self.context}; give a shorter prompt, or --context {total}",
                tokens=total,
                context=self.context,
            )
        return ids

    def _tolerance(self, reference: Graph) -> Tolerance:
        """The one asked for, or by precision, and by storage types where those differ."""
        settings = self.settings
        usual = PRECISION_TOLERANCE[settings.precision if settings.backend == VULKAN else "high"]
        sides = [{w.dtype for w in graph.weights.values()} for graph in (self.graph, reference)]
        if sides[0] != sides[1]:
            stored = storage_tolerance(sides[0] | sides[1])
            usual = Tolerance(
                max(usual.relative, stored.relative), min(usual.cosine, stored.cosine)
            )
        return usual.with_choice(settings.relative, settings.cosine)

    # -- trials -----------------------------------------------------------------------------

    @property
    def pinned(self) -> list[str]:
        """The nodes that `fp32_tensors` names, by their own name, a result's or a weight's."""
        return pinned_nodes(self.graph, self.settings.fp32_tensors, self.settings.precision)

    @property
    def roundings(self) -> tuple[str, ...]:
        """Where the model rounds to fp16: `KV`, `PRODUCTS` and `VALUES`."""
        kv = (KV,) if self.settings.kv_half else ()
        own = {"high": (), "normal": (PRODUCTS,), "low": (PRODUCTS, VALUES)}
        return (*kv, *own[self.settings.precision])

    def _options(self, graph: Graph, choices: Choices, exact: Collection[str] = ()) -> PlanOptions:
        return PlanOptions(
            context=self.context,
            kv_half=KV in self.roundings and KV not in exact,
            slots=self.settings.slots,
            half_operands=PRODUCTS in self.roundings and PRODUCTS not in exact,
            half_values=VALUES in self.roundings and VALUES not in exact,
            fp32_nodes=frozenset(self.pinned),
            keep_values=True,
            choices=choices,
        )

    @contextmanager
    def _engine(self, package: Package, graph: Graph, options: PlanOptions) -> Iterator[DeviceSide]:
        assert self.device is not None
        engine = Engine(
            self.device,
            package,
            graph,
            options,
            (),
            self.progress,
            precision=self.settings.precision,
            policy=KernelPolicy(tune=self.settings.tune),
            submission_ms=self.settings.submission_ms,
        )
        try:
            yield DeviceSide(engine)
        finally:
            engine.close()

    @contextmanager
    def side(
        self,
        disabled: Collection[str] | None = None,
        dropped: Mapping[str, str] | None = None,
        exact: Collection[str] = (),
    ) -> Iterator[Side]:
        """The model as it is, or with some things switched off.

        Args:
            disabled: passes to leave out, in place of those of the settings.
            dropped: kernels that are not used, and why.
            exact: what of `roundings` is fp32 instead.
        """
        with ExitStack() as stack:
            package, graph = self.package, self.graph
            if disabled is not None and set(disabled) != set(self.settings.disabled_passes):
                package = stack.enter_context(self._opened(disabled))
                graph = model_graph(package)
            if self.settings.backend == CPU:
                yield NumpySide(graph, StoredWeights(graph, package), self.context)
                return
            options = self._options(graph, Choices(dropped=dropped or {}), exact)
            yield stack.enter_context(self._engine(package, graph, options))

    def runs(self, side: Side) -> list[Run]:
        """The schedules of a side; single steps come first, others are held to them."""
        return side.runs() if isinstance(side, DeviceSide) else [Run(CPU, 0, 0)]
