"""/tokenize, /detokenize and /tokenizer_info: the model's vocabulary over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hornito.serve.fields import MISSING, Fields
from hornito.serve.http import read_body
from hornito.serve.requests import check_model, ids_field, messages_field, variables_field
from hornito.serve.tokens import token_text

if TYPE_CHECKING:
    from hornito.serve.service import TextService


def token_routes(service: TextService) -> list[Route]:
    """The three routes."""

    async def tokenize(request: Request) -> Response:
        body = await read_body(request)
        return JSONResponse(await run_in_threadpool(_tokenize, service, body))

    async def detokenize(request: Request) -> Response:
        fields = Fields(await read_body(request))
        check_model(fields, service.defaults, required=False)
        ids = ids_field(fields, "tokens", service.defaults.vocabulary)
        fields.finish()
        return JSONResponse({"prompt": service.tokenizer.decode(ids)})

    async def info(request: Request) -> Response:
        return JSONResponse(_info(service))

    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/tokenizer_info", info),
    ]


def _tokenize(service: TextService, body: dict[str, Any]) -> dict[str, Any]:
    """Ids of a text, or of a conversation.

    Unlike in prompts, control tokens that a text spells are recognised unless `parse_special` is
    false; `add_special_tokens` is whether BOS comes first, where the model wants one.
    """
    fields = Fields(body)
    check_model(fields, service.defaults, required=False)
    tokenizer = service.tokenizer
    if "messages" in fields:
        messages = messages_field(fields)
        prompt = fields.take("add_generation_prompt", bool, True)
        variables = variables_field(fields)
        ids = service.chat_ids(messages, prompt=prompt, variables=variables)
    else:
        text = fields.take("prompt", str, MISSING)
        special = fields.take("parse_special", bool, True)
        add = fields.take("add_special_tokens", bool, True)
        ids = tokenizer.encode(text, parse_special=special, add_bos=None if add else False)
    strings = fields.take("return_token_strs", bool, False)
    fields.finish()
    return {
        "count": len(ids),
        "max_model_len": service.model.context,
        "tokens": ids,
        "token_strs": [token_text(tokenizer, token) for token in ids] if strings else None,
    }


def _info(service: TextService) -> dict[str, Any]:
    """What clients want to know of a tokenizer."""
    tokenizer = service.tokenizer
    names = {token: text for text, token in tokenizer.special_tokens.items()}
    strings = service.token_strings

    def named(kind: str, ids: tuple[int | None, ...]) -> str | None:
        found = strings.get(f"{kind}_token")
        return found or next((names[i] for i in ids if i in names), None)

    return {
        "tokenizer_class": "hornito",
        "vocab_size": service.defaults.vocabulary,
        "model_max_length": service.model.context,
        "bos_token": named("bos", (tokenizer.bos_id,)),
        "eos_token": named("eos", tokenizer.eos_ids),
        "pad_token": strings.get("pad_token"),
        "unk_token": strings.get("unk_token"),
        "bos_token_id": tokenizer.bos_id,
        "eos_token_ids": list(tokenizer.eos_ids),
        "add_bos_token": tokenizer.add_bos,
        "special_tokens": dict(tokenizer.special_tokens),
        "chat_template": None if service.template is None else service.template.source,
    }
