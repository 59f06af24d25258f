"""What a text model answers: OpenAI's chat and completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from hornito.errors import UsageError
from hornito.serve.calls import Spoken
from hornito.serve.errors import ApiError, context_error
from hornito.serve.http import read_body
from hornito.serve.metrics import Metrics
from hornito.serve.replies import ChatReply, CompletionReply, Model, works
from hornito.serve.requests import Defaults, chat_request, completion_request
from hornito.serve.scheduler import Scheduler
from hornito.serve.streams import Answers, EventStream
from hornito.serve.utilities import token_routes
from hornito.serve.work import Event, Work
from hornito.structured.formats import ResponseFormat
from hornito.text.template import ChatTemplate, encode_chat
from hornito.text.tokenizer import Tokenizer
from hornito.tool_use import ToolUse


class TextService:
    """What the routes of a text model share.

    Args:
        name: the model's, as requests give it.
        sampling: parameters of requests that leave them out.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: Metrics,
        name: str,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.metrics = metrics
        llm = scheduler.llm
        self.created = int(time.time())
        self.template = llm.chat_template if llm.has_chat_template else None
        self.token_strings: dict[str, str] = llm.package_manifest.facts.get("token_strings", {})
        self.model = Model(
            name,
            f"fp_{llm.engine.identity['package'][:12]}",
            llm.tokenizer if llm.has_tokenizer else None,
            frozenset(llm.engine.eos_ids),
            llm.context,
        )
        self.defaults = Defaults(
            name, llm.engine.vocabulary, llm.package_manifest.generation, sampling or {}
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; ApiError when it has none."""
        if self.model.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: prompts must be token ids")
        return self.model.tokenizer

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool = True,
        tools: ToolUse | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a conversation; ApiError when the template refuses it, or there is none."""
        template = self.chat_template
        given, shown = (tools or ToolUse()).conversation(template, messages)
        return encode_chat(
            self.tokenizer,
            template,
            given,
            add_generation_prompt=prompt,
            tools=shown,
            variables=variables,
        )

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; ApiError when it has none."""
        if self.template is None:
            raise ApiError(400, "this model has no chat template; use /v1/completions")
        return self.template

    def check_form(self, form: ResponseFormat | None) -> None:
        """Refuse a form that is wrong, or that can't be had."""
        if form is None:
            return
        try:
            self.scheduler.llm.grammars.start(form)
        except UsageError as error:
            raise ApiError(400, str(error), param="response_format") from error

    def check_length(self, ids: Sequence[int], param: str) -> None:
        """Refuse a prompt that does not fit."""
        if not ids:
            raise ApiError(400, f"{param} is empty", param=param)
        if len(ids) > self.model.context:
            raise context_error(len(ids), self.model.context, param)

    # -- answers ------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Any:
        """POST /v1/chat/completions"""
        parsed = chat_request(await read_body(request), self.defaults)

        def prepare() -> tuple[list[int], ResponseFormat | None]:
            ids = self.chat_ids(parsed.messages, tools=parsed.tools, variables=parsed.variables)
            self.check_length(ids, "messages")
            form = parsed.tools.form(self.chat_template, parsed.common.form)
            self.check_form(form)
            return ids, form

        ids, form = await run_in_threadpool(prepare)
        made = works(parsed.common, [ids], self.model, scores=None, chat=True, form=form)
        spoken = [
            Spoken(parsed.tools.parser(self.chat_template), parallel=parsed.tools.parallel)
            for _ in made
        ]
        return await self._answer(request, made, ChatReply(self.model, parsed, made, spoken))

    async def complete(self, request: Request) -> Any:
        """POST /v1/completions"""
        parsed = completion_request(await read_body(request), self.defaults)

        def prepare() -> list[list[int]]:
            prompts = []
            for prompt in parsed.prompts:
                ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
                self.check_length(ids, "prompt")
                prompts.append(ids)
            self.check_form(parsed.common.form)
            return prompts

        prompts = await run_in_threadpool(prepare)
        common, form = parsed.common, parsed.common.form
        scores = common.params.logprobs if parsed.echo else None
        made = works(common, prompts, self.model, scores=scores, chat=False, form=form)
        return await self._answer(request, made, CompletionReply(self.model, parsed, made))

    async def embed(self, request: Request) -> Any:
        """POST /v1/embeddings"""
        raise ApiError(
            400,
            f"`{self.model.name}` writes text; for embeddings, serve an encoder",
            param="model",
        )

    async def _answer(
        self, request: Request, made: Sequence[Work], reply: ChatReply | CompletionReply
    ) -> Any:
        """The response; errors before the first token have a status of their own."""
        answers = Answers(self.scheduler, made, request, reply.common.user)
        try:
            if reply.common.stream:
                first = await answers.next()
                return EventStream(_payloads(answers, reply, first), answers)
            while (found := await answers.next()) is not None:
                reply.take(*found)
            answers.close()
            return JSONResponse(reply.whole())
        except BaseException:
            answers.close()
            raise

    # -- facts --------------------------------------------------------------------------------

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.model.name,
            "object": "model",
            "created": self.created,
            "owned_by": "hornito",
            "max_model_len": self.model.context,
        }

    def health(self) -> dict[str, Any]:
        """What the server does; DeviceLostError when the device is gone."""
        self.scheduler.check_device()
        trust = self.scheduler.llm.engine.trust
        return {
            "status": self.scheduler.state,
            "model": self.model.name,
            "device": self.scheduler.llm.device_line,
            "running": self.scheduler.running,
            "waiting": len(self.scheduler.queue),
            "unproven_kernels": len(trust.waiting),
            "unproven_shapes": len(trust.unproven),
        }

    def routes(self) -> list[Route]:
        """What only a text model has."""
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/embeddings", self.embed, methods=["POST"]),
            *token_routes(self),
        ]

    def close(self) -> None:
        """End the scheduler."""
        self.scheduler.close()


async def _payloads(
    answers: Answers, reply: ChatReply | CompletionReply, first: tuple[int, Event] | None
) -> AsyncIterator[Iterable[Any]]:
    found = first
    while found is not None:
        yield reply.take(*found)
        found = await answers.next()
    yield reply.last_chunks()
