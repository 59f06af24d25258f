"""The Python interface: `load` a model, then `generate`, `stream` or `stream_chat`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

from hornito.answer import Answer, join
from hornito.arguments import token_ids
from hornito.batch import generate_batch, many
from hornito.errors import ContextOverflowError, UsageError
from hornito.ops.base import head_ids
from hornito.package import Manifest, Package
from hornito.package.model import model_graph
from hornito.plan.pins import pinned_nodes
from hornito.plan.plan import PlanOptions, chunk_sizes
from hornito.plan_summary import context_warning, plan_summary
from hornito.prefixes import prefix_of_chat, prefix_of_ids
from hornito.progress import NullProgress, Progress
from hornito.request import AnswerKeywords, Request
from hornito.runtime.engine import DEFAULT_POLICY, Engine
from hornito.runtime.memory import fit_context
from hornito.runtime.overflow import DEFAULT_MAX_TOKENS, REFUSE, Overflow, room_advice
from hornito.runtime.prefix import start_from_prefix
from hornito.runtime.proof import prove
from hornito.runtime.results import Chunk, Generation, Timings, TokenLogprob
from hornito.runtime.sampler import Sampler
from hornito.runtime.session import Session
from hornito.runtime.settle import KernelPolicy
from hornito.runtime.snapshot import EMBEDDED, Snapshot
from hornito.runtime.snapshot_file import load_snapshot
from hornito.scoring import Score, score
from hornito.streaming import stream_answer
from hornito.vk.device import Device

if TYPE_CHECKING:
    from hornito.structured.grammar import Grammars
    from hornito.text.template import ChatTemplate
    from hornito.text.tokenizer import Tokenizer
    from hornito.text.tool_calls import ToolCall
    from hornito.vk.timing import SubmissionTimer

__all__ = [
    "LLM",
    "Chunk",
    "Generation",
    "Overflow",
    "Score",
    "Session",
    "Snapshot",
    "Timings",
    "TokenLogprob",
]

logger = logging.getLogger("hornito")

_STEPS = {"software": 1, "integrated": 4}
_STEPS_DISCRETE = 16


class LLM:
    """A loaded model; made by `load`, ended by `close()` or `with`.

    Attributes:
        engine: plans, memory and slots.
        context: positions per session.
        steps_per_submission: decode steps that the device runs without the host.
        model_context: positions that the model was made for.
        fp32_nodes: nodes that `fp32_tensors` named.
        context_warning: says that the context is above the model's own; '' when it is not.
        prompt_progress: told about the tokens of prompts that are evaluated; None by default.
    """

    def __init__(
        self,
        package: Package,
        device: Device,
        *,
        context: int | None = None,
        precision: str = "normal",
        kv_half: bool = True,
        slots: int = 1,
        kv_bytes: int | None = None,
        rewind_budget: int = 64,
        progress: Progress | None = None,
        policy: KernelPolicy = DEFAULT_POLICY,
        submission_ms: float | None = None,
        recover: bool = False,
        fp32_tensors: Sequence[str] = (),
        eos_ids: Sequence[int] | None = None,
    ) -> None:
        self._package = package
        self.precision = precision
        self.prompt_progress: Progress | None = None
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._grammars: Grammars | None = None
        facts = package.manifest.facts
        try:
            graph = model_graph(package)
            ends = _ends(facts["eos_ids"] if eos_ids is None else eos_ids, head_ids(graph))
            self.fp32_nodes = tuple(pinned_nodes(graph, fp32_tensors, precision))
            half_operands = precision != "high"
            options = PlanOptions(
                context=context or facts["context_length"],
                kv_half=kv_half,
                slots=slots,
                kv_bytes=kv_bytes,
                rewind_budget=rewind_budget,
                half_operands=half_operands,
                half_values=precision == "low",
                chunk_rows=chunk_sizes(
                    device.caps,
                    context or facts["context_length"],
                    half_operands=half_operands,
                ),
                fp32_nodes=frozenset(self.fp32_nodes),
            )
            options = fit_context(graph, device, options, requested=context is not None)
            self.engine = Engine(
                device,
                package,
                graph,
                options,
                ends,
                progress or NullProgress(),
                precision=precision,
                policy=policy,
                submission_ms=submission_ms,
                recover=recover,
            )
        except BaseException:
            device.close()
            package.close()
            raise
        self.context = options.context
        self.model_context = self.engine.model_context
        self.context_warning = context_warning(options.context, facts)
        if self.context_warning:
            logger.warning("%s", self.context_warning)
        self.steps_per_submission = _STEPS.get(device.info.kind, _STEPS_DISCRETE)

    def __repr__(self) -> str:
        state = "closed" if self.engine.closed else self.engine.device.info.name
        return f"<LLM {self._package.path.name}, context {self.context}, {state}>"

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the device memory and the package; a second call does nothing."""
        if self.engine.closed:
            return
        self.engine.close()
        self.engine.device.close()
        self._package.close()

    # -- text -------------------------------------------------------------------------------

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return "tokenizer.json" in self._package.blobs

    @property
    def has_chat_template(self) -> bool:
        """Whether `stream_chat` works."""
        return self.has_tokenizer and "chat_template.jinja" in self._package.blobs

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UsageError: the package has none.
        """
        if self._tokenizer is None:
            from hornito.text.tokenizer import package_tokenizer

            self._tokenizer = package_tokenizer(self._package)
        return self._tokenizer

    @property
    def grammars(self) -> Grammars:
        """Forms of answers over the vocabulary; UsageError without llguidance or a tokenizer."""
        if self._grammars is None:
            from hornito.structured.grammar import Grammars

            ends = self.engine.eos_ids
            self._grammars = Grammars(self.tokenizer, self.engine.vocabulary, ends)
        return self._grammars

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, up to the start of the assistant's answer.

        Args:
            messages: `{"role": ..., "content": ...}` in order; calls of functions (`tool_calls`)
                and their results (role `tool`) as OpenAI's API has them.
            tools: functions that the model is told of, as OpenAI's API has them.

        Raises:
            UsageError: the package has no chat template, or the template refuses the messages.
        """
        from hornito.tool_use import ToolUse

        return ToolUse.of(tools).chat_ids(self.tokenizer, self.chat_template, messages)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that `chat_ids` encodes, with the template's own control tokens spelled out.

        Raises:
            UsageError: as for `chat_ids`.
        """
        return self.chat_template.render(messages)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template.

        Raises:
            UsageError: the package has none.
        """
        if not self.has_chat_template:
            raise UsageError("this package has no chat template; complete plain text instead")
        if self._template is None:
            from hornito.text.template import ChatTemplate

            strings = self._package.manifest.facts["token_strings"]
            source = self._package.blob("chat_template.jinja").decode()
            self._template = ChatTemplate(source, strings)
        return self._template

    # -- answers ----------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        prefix: Snapshot | None = ...,
        **keywords: Unpack[AnswerKeywords],
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        *,
        prefix: None = ...,
        **keywords: Unpack[AnswerKeywords],
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: str | Sequence[int] | list[str] | list[list[int]],
        *,
        prefix: Snapshot | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Generation | list[Generation]:
        """Complete a prompt, or each of a list of prompts; see `stream` for the arguments.

        A list is answered in its order. As many prompts run at once as there are free slots
        (`load(..., slots=8)`); the others wait for one.
        """
        prompts = many(prompt)
        if prompts is None:
            one = cast("str | Sequence[int]", prompt)
            return join(self.stream(one, prefix=prefix, **keywords))
        if prefix is not None:
            raise UsageError("a prefix goes with one prompt, not with a list")
        request = self._request(keywords)
        return generate_batch(
            self,
            [self._prompt_ids(one, request.overflow, request.max_tokens) for one in prompts],
            lambda sampler: self._new_answer(request, sampler),
            lambda tokens: self._sampler(request, tokens),
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            overflow=request.overflow,
        )

    def prefill(self, prompt: str | Sequence[int]) -> Snapshot:
        """Evaluate a prefix once, to start prompts from.

        `generate(text, prefix=...)` continues it; and while the snapshot lives, every prompt that
        begins with its tokens starts from it by itself. It holds KV blocks until `release()`.

        Raises:
            ContextOverflowError: it does not fit the context.
            SessionError: no slot is free.
        """
        return prefix_of_ids(self, self._prompt_ids(prompt))

    def prefill_chat(self, messages: Sequence[Mapping[str, Any]]) -> Snapshot:
        """Evaluate the beginning of every conversation that starts with these messages.

        That is what the template's renderings have in common whatever the next user message says.
        While the snapshot lives, such conversations start from it by themselves.

        Raises:
            ContextOverflowError, SessionError: as for `prefill`.
            UsageError: there is no template, it refuses the messages, or nothing is in common.
        """
        return prefix_of_chat(self, messages)

    def load_prefix(self, path: str | os.PathLike[str]) -> Snapshot:
        """A snapshot from a file of `Snapshot.save` or `hornito cache save`; see `prefill`.

        Raises:
            SessionError: it was made with another model or other settings; names which.
            FormatError: the file is damaged.
            DeviceMemoryError: it needs more KV blocks than are free.
        """
        return load_snapshot(self.engine, path)

    def score(self, prompt: str | Sequence[int], continuation: str | Sequence[int]) -> Score:
        """How likely the model finds `continuation` after `prompt`.

        Two texts are encoded as one; where a token reaches across the seam, it counts to the
        continuation. A chat template is not applied.

        Args:
            prompt, continuation: both text, or both token ids.

        Raises:
            ContextOverflowError: they do not fit the context.
            UsageError: one of them is empty, or they are of different kinds.
        """
        return score(self, prompt, continuation)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Generation:
        """Answer a conversation; see `stream_chat` for the arguments."""
        chunks = self.stream_chat(messages, tools=tools, tool_choice=tool_choice, **keywords)
        return join(chunks)

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Iterator[Chunk]:
        """Answer a conversation piece by piece.

        Args:
            messages: as for `chat_ids`.
            tools: functions that the model may call, as OpenAI's API has them; `tool_calls` finds
                the calls in its answer.
            tool_choice: `auto` (default), `none`, `required`, or OpenAI's object that names one.
            keywords: as for `stream`.
        """
        from hornito.tool_use import ToolUse

        use = ToolUse.of(tools, tool_choice)
        keywords.setdefault("continuation", False)
        if use.tools:
            answer = keywords.get("response_format")
            keywords["response_format"] = use.form(self.chat_template, answer)
        return self.stream(self.chat_ids(messages, tools=use.tools), **keywords)

    def tool_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> tuple[str, list[ToolCall]]:
        """What an answer says, and the calls of functions in it, in the model's own style."""
        from hornito.text.tool_calls import parse_tool_calls
        from hornito.text.tool_styles import check_tools, tool_style

        return parse_tool_calls(text, tool_style(self.chat_template.source), check_tools(tools))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        prefix: Snapshot | None = None,
        **keywords: Unpack[AnswerKeywords],
    ) -> Iterator[Chunk]:
        """Complete a prompt piece by piece.

        A prompt starts from the live snapshot that shares most of its tokens, if there is one;
        `Timings.reused_tokens` says how many were not evaluated again.

        Args:
            prompt: text (control tokens in it stay text), or token ids.
            prefix: what the prompt goes on from, a snapshot of `prefill` or of a session.
            keywords: length, end and choice of tokens; see `hornito.request.AnswerKeywords`. The
                default is greedy, whatever the model's generation_config says.

        Raises:
            ContextOverflowError: the prompt does not fit the context.
            UsageError: an argument is wrong.
        """
        request = self._request(keywords)
        if prefix is None:
            ids = self._prompt_ids(prompt, request.overflow, request.max_tokens)
            return self._stream(ids, request)
        prefix.check()
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt, add_bos=False)
        else:
            ids = token_ids("the prompt", prompt)
        self._check_length(prefix.position + len(ids), request.overflow, request.max_tokens)
        return self._stream_behind(prefix, ids, request)

    def _request(self, keywords: AnswerKeywords) -> Request:
        """The checked keywords."""
        request = Request.of(
            keywords,
            self._package.manifest.generation,
            vocabulary=self.engine.vocabulary,
            has_tokenizer=self.has_tokenizer,
        )
        request.overflow.check(self.context)
        if request.form is not None:
            self.grammars.start(request.form)  # what is wrong with it is said before anything runs
        return request

    def _sampler(self, request: Request, prompt_tokens: int) -> Sampler:
        constraint = None if request.form is None else self.grammars.start(request.form)
        return Sampler.start(request.params, prompt_tokens, constraint)

    def _prompt_ids(
        self,
        prompt: str | Sequence[int],
        overflow: Overflow = REFUSE,
        answer: int = DEFAULT_MAX_TOKENS,
    ) -> list[int]:
        """The ids of a prompt, which must fit unless the policy shortens it.

        Args:
            answer: tokens that shall follow; errors advise a context that has room for them.
        """
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        else:
            ids = token_ids("the prompt", prompt)
        if not ids:
            raise UsageError("the prompt is empty")
        self._check_length(len(ids), overflow, answer)
        return ids

    def _check_length(self, length: int, overflow: Overflow, answer: int) -> None:
        if length > self.context and not overflow.applies(length, self.context):
            raise ContextOverflowError(
                f"the prompt has {length} tokens; the context holds {self.context}. "
                f"{room_advice(self.engine, length, answer)}; or shorten the prompt, or have it "
                "shortened (--overflow truncate, or overflow=Overflow('truncate'))",
                tokens=length,
                context=self.context,
            )

    def _new_answer(self, request: Request, sampler: Sampler) -> Answer:
        return Answer(
            self.tokenizer if self.has_tokenizer else None,
            max_tokens=request.max_tokens,
            stop=request.stop,
            ends=() if request.ignore_eos else self.engine.eos_ids,
            continuation=request.continuation,
            sampler=sampler,
        )

    def _stream(self, ids: list[int], request: Request) -> Iterator[Chunk]:
        with Session(self.engine) as session:
            reused = start_from_prefix(session, ids)
            yield from self._continue(session, ids[reused:], request, reused)

    def _stream_behind(self, prefix: Snapshot, ids: list[int], request: Request) -> Iterator[Chunk]:
        with Session(self.engine) as session:
            session.restore(prefix)
            if not ids:
                # At least one token is evaluated: the prefix's last one.
                ids = session.ids[-1:]
                if not ids or ids[0] == EMBEDDED:
                    raise UsageError("the prompt is empty, and the prefix does not end in a token")
                session.rewind(session.position - 1)
            yield from self._continue(session, ids, request, session.position)

    @property
    def package_manifest(self) -> Manifest:
        """What the package says about itself."""
        return self._package.manifest

    def session(self) -> Session:
        """A session of your own, in a slot of this model; a context manager.

        Raises:
            SessionError: no slot is free.
        """
        return Session(self.engine)

    def stream_session(
        self, session: Session, ids: Sequence[int], **keywords: Unpack[AnswerKeywords]
    ) -> Iterator[Chunk]:
        """Evaluate `ids` behind what a session holds and stream what follows.

        The answer stays in the session; tokens past a stop string may be there too (rewind).

        Args:
            session: of this model's engine, from `session()`.
            ids: at least one token id.
            keywords: as for `stream`. Everything that the session holds counts as prompt.
        """
        return self._continue(session, ids, self._request(keywords))

    def _continue(
        self, session: Session, ids: Sequence[int], request: Request, reused: int = 0
    ) -> Iterator[Chunk]:
        sampler = self._sampler(request, session.position + len(ids))
        return stream_answer(
            session,
            ids,
            self._new_answer(request, sampler),
            sampler,
            max_tokens=request.max_tokens,
            ignore_eos=request.ignore_eos,
            steps=self.steps_per_submission,
            overflow=request.overflow,
            reused=reused,
            progress=self.prompt_progress,
        )

    def prove(self, seconds: float | None = None) -> str:
        """Test kernels that a load had no time for, now, for so many seconds at most.

        Returns what is known of the kernels, in one line.

        Raises:
            SessionError: a session or snapshot is open.
        """
        return prove(self.engine, seconds).line

    def release_prefill(self) -> int:
        """Free the memory of prompt evaluation once prefixes are in place; returns the bytes.

        Later prompts are evaluated one token at a time.
        """
        return self.engine.release_prefill()

    @property
    def package_path(self) -> Path:
        """The package's file."""
        return self._package.path

    @property
    def device_line(self) -> str:
        """The device in one line; a software device says so."""
        info = self.engine.device.info
        return f"{info.name} ({info.kind}), {info.driver_name} {info.driver_info}".strip()

    @property
    def device_kind(self) -> str:
        """`discrete`, `integrated`, `virtual`, `software` or `other`."""
        return self.engine.device.info.kind

    def time_gpu(self) -> SubmissionTimer | None:
        """Measure GPU time from now on (`.seconds()`); None where the device has no timestamps."""
        return self.engine.device.time_submissions()

    @property
    def feature_line(self) -> str:
        """The device's optional features that Hornito has switched on, after quirks."""
        caps = self.engine.device.caps
        names = ", ".join(caps.features()) or "none"
        quirks = f"; quirks: {', '.join(sorted(caps.quirks))}" if caps.quirks else ""
        return f"subgroups of {caps.subgroup_size}, {names}{quirks}"

    def plan_summary(self) -> str:
        """Where the work and the memory go, in a few lines."""
        return plan_summary(self)


def _ends(ids: Sequence[int], vocabulary: int) -> Sequence[int]:
    """The ids that end an answer; UsageError for one that the model lacks."""
    for token in ids:
        if not 0 <= token < vocabulary:
            raise UsageError(
                f"eos_ids names token {token}; the vocabulary has ids 0 to {vocabulary - 1}"
            )
    return ids
