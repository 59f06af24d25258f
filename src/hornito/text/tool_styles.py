"""How a model is told of functions, and in which style it calls them.

A template that knows `tools` renders them itself. For one that does not, the functions go into the
conversation as text, in the words that models of its family were trained on or are described with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hornito.errors import UsageError
from hornito.text.tool_calls import ARGS, CALLS, CLOSE, FENCE, FENCE_END, MISTRAL, OPEN

Message = Mapping[str, Any]
Tool = Mapping[str, Any]

STYLES = ("hermes", "llama", "gemma", *MISTRAL)
CHOICES = ("auto", "none", "required")

_TOOLS_VARIABLE = re.compile(r"\{[%{][^}]*\btools\b")
_FUNCTION = {"name", "description", "parameters", "strict"}
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_HERMES = """\
You may call functions to help with what is asked. These are the functions, as JSON schemas:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and arguments within tags, one for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""

_GEMMA = """\
You may call functions. At each turn, if you decide to call any of them, it should be wrapped with \
```tool_code```. The python functions described below are imported and available; call them with \
keyword arguments only, and write nothing else in the block. The answer of a function comes \
wrapped in ```tool_output```; use it to answer the user.

```python
{tools}
```"""

_PYTHON_TYPES = {
    "string": "str",
    "integer": "int",
    "number": "float",
    "boolean": "bool",
    "array": "list",
    "object": "dict",
    "null": "None",
}


def tool_style(template: str) -> str:
    """The style in which a model calls functions, by its chat template."""
    if OPEN in template:
        return "hermes"
    if CALLS in template and knows_tools(template):
        return "mistral-args" if ARGS in template else "mistral"
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and "tools" in template):
        return "llama"
    return "gemma" if "<start_of_turn>" in template else "hermes"


def knows_tools(template: str) -> bool:
    """Whether a template renders functions by itself."""
    return _TOOLS_VARIABLE.search(template) is not None


def check_tools(tools: object) -> list[dict[str, Any]]:
    """The functions of a `tools` argument, as OpenAI's API has them.

    Raises:
        UsageError: it is no list of functions, or a name is wrong or there twice.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not tools:
        raise UsageError("tools must be a list of {'type': 'function', 'function': {...}}")
    found: list[dict[str, Any]] = []
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function":
            raise UsageError(
                f"tools[{place}] must be {{'type': 'function', 'function': {{...}}}}, not "
                f"{tool!r:.80}"
            )
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"tools[{place}].function.name must be up to 64 letters, digits, _ and -, not "
                f"{name!r:.80}"
            )
        _check_parameters(f"tools[{place}].function.parameters", function.get("parameters"))
        if function.get("strict") not in (None, True, False):
            raise UsageError(f"tools[{place}].function.strict must be true or false")
        unknown = sorted({*tool} - {"type", "function"}) + sorted({*function} - _FUNCTION)
        if unknown:
            raise UsageError(
                f"tools[{place}] has a field '{unknown[0]}'; known are those of a function: "
                f"{', '.join(sorted(_FUNCTION))}"
            )
        try:
            json.dumps(dict(function))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"tools[{place}].function is no JSON: {error}") from error
        found.append({**tool, "function": dict(function)})
    names = [tool["function"]["name"] for tool in found]
    if len(set(names)) < len(names):
        raise UsageError(f"tools name '{next(n for n in names if names.count(n) > 1)}' twice")
    return found


def _check_parameters(where: str, schema: object) -> None:
    """What a function takes is a JSON schema; these of its fields are read by all styles."""
    if not isinstance(schema, Mapping | None):
        raise UsageError(f"{where} must be a JSON schema")
    if not isinstance((schema or {}).get("properties", {}), Mapping):
        raise UsageError(f"{where}.properties must be an object of JSON schemas")
    required = (schema or {}).get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(r, str) for r in required):
        raise UsageError(f"{where}.required must be a list of names")


def check_choice(choice: object, tools: Sequence[Tool]) -> str:
    """What a `tool_choice` means: `auto`, `none`, `required`, or `function NAME`.

    Raises:
        UsageError: it is none of these, or there is no such function.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice is None:
        return "auto" if names else "none"
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in names:
            raise UsageError(f"tool_choice names {name!r:.80}, which is none of the tools")
        return f"function {name}"
    if choice not in CHOICES:
        raise UsageError(
            f"tool_choice must be {', '.join(CHOICES)} or {{'type': 'function', 'function': "
            f"{{'name': ...}}}}, not {choice!r:.80}"
        )
    if choice == "required" and not names:
        raise UsageError("tool_choice required needs tools")
    return str(choice)


def conversation_for(
    template: str, messages: Sequence[Message], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The messages as a template takes them, with the functions in them where it takes none.

    Arguments of earlier calls, which OpenAI's API has as JSON text, become objects; results of
    functions get the name of their function; ids of calls become nine letters and digits where
    Mistral's templates insist on that. Messages without any of that stay as they are.

    Raises:
        UsageError: the calls or results of earlier turns are damaged.
    """
    found = _with_names([_with_objects(i, message) for i, message in enumerate(messages)])
    used = any(message.get("tool_calls") or message["role"] == "tool" for message in found)
    style = tool_style(template)
    if style in MISTRAL:
        return [_with_short_ids(message) for message in found]
    if knows_tools(template) or not (tools or used):
        return found
    found = [_as_text(message, style) for message in found]
    if not tools:
        return found
    text = describe_tools(style, tools)
    # Gemma's functions go where its system message goes, into the first turn of the user.
    role = "system" if style != "gemma" or found[0]["role"] == "system" else "user"
    if found[0]["role"] == role:
        found[0] = {**found[0], "content": _joined(text, found[0].get("content"))}
        return found
    return [{"role": "system", "content": text}, *found]


def describe_tools(style: str, tools: Sequence[Tool]) -> str:
    """Functions in the words of a style."""
    if style == "gemma":
        return _GEMMA.format(tools="\n\n".join(_python_signature(t["function"]) for t in tools))
    return _HERMES.format(tools="\n".join(json.dumps(t, ensure_ascii=False) for t in tools))


def write_call(style: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model of the style writes it."""
    if style == "gemma":
        words = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        return f"{FENCE}\n{name}({words})\n{FENCE_END}"
    if style == "mistral-args":
        return f"{CALLS}{name}{ARGS}{json.dumps(arguments, ensure_ascii=False)}"
    key = "parameters" if style == "llama" else "arguments"
    text = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
    if style == "mistral":
        return f"{CALLS} [{text}]"
    return text if style == "llama" else f"{OPEN}\n{text}\n{CLOSE}"


def _joined(first: str, second: object) -> object:
    """Text before the content of a message, which is text or a list of parts."""
    if isinstance(second, list):
        return [{"type": "text", "text": f"{first}\n\n"}, *second]
    return f"{first}\n\n{second}" if second else first


def _with_objects(place: int, message: Message) -> dict[str, Any]:
    """The message with the arguments of its calls as objects."""
    out = dict(message)
    if not isinstance(out.get("tool_call_id"), str | None):
        raise UsageError(f"messages[{place}].tool_call_id must be text")
    calls = out.get("tool_calls")
    if not calls:
        out.pop("tool_calls", None)
        return out
    where = f"messages[{place}].tool_calls"
    if not isinstance(calls, Sequence) or out.get("role") != "assistant":
        raise UsageError(f"{where} must be a list of calls, in a message of the assistant")
    changed = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(f"{where}: {call!r:.80} has no function with a name")
        if not isinstance(call.get("id"), str | None):
            raise UsageError(f"{where}: the id of {call!r:.80} must be text")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{where}: arguments are no JSON: {error}") from error
            arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise UsageError(f"{where}: arguments must be an object, not {arguments!r:.80}")
        changed.append({**call, "function": {**function, "arguments": arguments}})
    out["tool_calls"] = changed
    if out.get("content") is None:
        out["content"] = ""
    return out


def _with_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of functions with the name of their function, by the id of the call."""
    names: dict[object, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call.get("id")] = call["function"]["name"]
        if message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id"))
            if name is not None:
                message["name"] = name
    return messages


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The message with ids of calls as Mistral's templates take them."""
    out = dict(message)
    if "tool_calls" in out:
        out["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in out["tool_calls"]]
    if "tool_call_id" in out:
        out["tool_call_id"] = _short(out["tool_call_id"])
    return out


def _short(call_id: object) -> str:
    """Nine letters and digits, the same for the same id."""
    text = str(call_id)
    return text if _SHORT_ID.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _as_text(message: dict[str, Any], style: str) -> dict[str, Any]:
    """A message with calls, or with a function's result, for a template that knows neither."""
    if message["role"] == "tool":
        mark = (
            "```tool_output\n{}\n```"
            if style == "gemma"
            else "<tool_response>\n{}\n</tool_response>"
        )
        return {"role": "user", "content": mark.format(message.get("content"))}
    if "tool_calls" not in message:
        return message
    calls = [
        write_call(style, call["function"]["name"], call["function"]["arguments"])
        for call in message["tool_calls"]
    ]
    content = message.get("content")
    text = "\n".join([*([content] if isinstance(content, str) and content else []), *calls])
    return {"role": "assistant", "content": text}


def _python_signature(function: Mapping[str, Any]) -> str:
    """`def name(a: str, b: int = None): ...` with the descriptions below it."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = parameters.get("required") or []
    words, notes = [], []
    for name, schema in sorted(properties.items(), key=lambda item: item[0] not in required):
        schema = schema if isinstance(schema, Mapping) else {}
        kind = _PYTHON_TYPES.get(str(schema.get("type")), "object")
        words.append(f"{name}: {kind}" + ("" if name in required else " = None"))
        about = [str(schema["description"])] if schema.get("description") else []
        if isinstance(schema.get("enum"), list | tuple):
            about.append(f"one of {', '.join(map(repr, schema['enum']))}")
        if about:
            notes.append(f"      {name}: {'; '.join(about)}")
    lines = [f"def {function['name']}({', '.join(words)}):"]
    lines.append(f'    """{function.get("description") or function["name"]}')
    if notes:
        lines += ["", "    Args:", *notes]
    return "\n".join([*lines, '    """'])
