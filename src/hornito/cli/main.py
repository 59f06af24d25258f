"""Entry point of the `hornito` command.

Only the module of the verb that was asked for is imported, so that help and errors are instant.
Exit codes: 0 ok, 1 failed, 2 usage or unsupported, 4 no device, 5 out of device memory, 130 when
interrupted. Results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Sequence

import hornito
from hornito.cli.options import Parser, spell_options
from hornito.errors import FormatError, HornitoError, UsageError

VERBS = {
    "compile": "turn a model (GGUF file, Hugging Face directory, ONNX) into one .vxm file",
    "run": "answer one prompt; without a prompt, chat",
    "chat": "talk to a model, keeping the conversation in its KV cache",
    "serve": "let many clients use a model, over OpenAI's HTTP interface",
    "runner": "token ids in, token ids out, for driving this device from another machine",
    "cache": "evaluate a prefix once and keep it in a file; show or delete such files",
    "eval": "measure a model: what its storage type costs, or how it calls tools",
    "pull": "fetch a model from the Hugging Face hub into the cache",
    "list": "show the models in the cache",
    "rm": "delete models from the cache",
    "inspect": "show what a package holds",
    "check": "say whether every node of a model runs on the GPU, and name those that don't",
    "verify": "check every byte of a package",
    "bench": "measure prompt and generation speed",
    "tune": "find out which kernels, or which precision, are best for a model on this device",
    "profile": "show where the GPU's time goes, by kernel",
    "compare": "compare a model on the GPU with a reference, value by value",
    "devices": "list the Vulkan devices of this machine",
    "doctor": "check Vulkan, drivers and devices, and say what to do next",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line (default: the process's own) and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that can't show a character gets a '?', not a traceback.
        sys.stdout.reconfigure(errors="replace")
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except UsageError as error:
        return _fail(spell_options(str(error)), error.exit_code)
    except FormatError as error:
        text = str(error)
        if "truncated" in text and "again" not in text:
            text += ". The file is not complete: copy, download or compile it again"
        return _fail(text, error.exit_code)
    except HornitoError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # The reader of our output went away; keep the interpreter from writing to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        print("\nhornito: interrupted", file=sys.stderr)
        return 130


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in ("-h", "--help", "help"):
        print(_help())
        return 0
    if first in ("-V", "--version"):
        print(f"hornito {hornito.__version__}")
        return 0
    if first not in VERBS:
        if not first:
            print(_help(), file=sys.stderr)
            return 2
        # A verb that deletes is no guess.
        close = difflib.get_close_matches(first, [verb for verb in VERBS if verb != "rm"], 1)
        hint = f"did you mean '{close[0]}'?" if close else f"verbs are {', '.join(VERBS)}"
        raise UsageError(f"unknown verb '{first}': {hint}")
    module = importlib.import_module(f"hornito.cli.{first}")
    parser = Parser(prog=f"hornito {first}", description=f"{_sentence(VERBS[first])}")
    module.add_arguments(parser)
    try:
        # Options may stand between MODEL and PROMPT.
        parsed = parser.parse_intermixed_args(arguments[1:])
    except SystemExit as finished:  # only --help ends here, errors are UsageError
        return int(finished.code or 0)
    from hornito.plan.attempts import notes_end_with_signals  # --help goes without it

    with notes_end_with_signals():
        code: int = module.run(parsed)
    return code


def _sentence(text: str) -> str:
    """The text with a capital first letter and a full stop; names keep their case."""
    return f"{text[0].upper()}{text[1:]}."


def _help() -> str:
    lines = ["usage: hornito VERB ...", "", "Run LLMs on any Vulkan GPU.", "", "verbs:"]
    width = max(map(len, VERBS))
    lines += [f"  {verb:<{width}}  {text}" for verb, text in VERBS.items()]
    lines += ["", "`hornito VERB --help` shows a verb's options; `hornito --version` the version."]
    return "\n".join(lines)


def _fail(message: str, code: int) -> int:
    print(f"hornito: error: {message}", file=sys.stderr)
    return code
