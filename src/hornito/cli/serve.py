"""`hornito serve MODEL`: one model for many clients, over OpenAI's HTTP interface."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hornito.cli.model import add_model, check_tensor_precision, load_model
from hornito.cli.options import (
    add_option,
    add_prefix,
    add_sampling,
    positive_int,
    sampling_keywords,
    whole,
)
from hornito.errors import UsageError
from hornito.progress import TerminalProgress

if TYPE_CHECKING:
    from hornito.serve.app import Service
    from hornito.serve.server import Address

MOST_SLOTS = 16
PROVE_SECONDS = 30.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the verb's command line."""
    add_model(parser)
    add_option(parser, "--host", default="127.0.0.1", help="address to listen on", metavar="HOST")
    add_option(parser, "--port", type=whole, default=8000, help="port to listen on", metavar="N")
    add_option(parser, "--name", help="name of the model for clients (default: the file's)")
    add_option(
        parser,
        "--slots",
        type=positive_int,
        default=4,
        help=f"answers made at the same time (default 4, up to {MOST_SLOTS})",
        metavar="N",
    )
    add_option(
        parser,
        "--queue",
        type=positive_int,
        default=64,
        help="answers that may wait; what comes then gets status 429 (default 64)",
        metavar="N",
    )
    add_option(
        parser,
        "--cache-bytes",
        type=whole,
        help="memory for prefixes of earlier requests; 0 keeps none (default: what the KV pools "
        "have left)",
        metavar="N",
    )
    add_option(parser, "--kv-bytes", type=positive_int, help="size of the KV pools", metavar="N")
    add_option(parser, "--api-key", help="what clients must send", metavar="KEY")
    add_option(
        parser,
        "--cors-origin",
        help="web origin that browsers may call from; may be repeated",
        metavar="URL",
        repeat=True,
    )
    add_option(
        parser,
        "--drain-seconds",
        type=whole,
        default=60,
        help="how long running answers may take after SIGTERM (default 60)",
        metavar="N",
    )
    add_sampling(parser)
    for action in parser._actions:
        if "--temp" in action.option_strings:
            action.help = "temperature of requests that give none (default 1) [HORNITO_TEMP]"
    add_prefix(parser)
    add_option(parser, "--tokenizer", help="tokenizer.json of an encoder", metavar="FILE")
    parser.add_argument("--log", action="store_true", help="print a line for each request")


def run(arguments: argparse.Namespace) -> int:
    """Loads the model and serves it until a signal."""
    try:
        from hornito.serve.server import Address, Server, bind
    except ImportError as error:
        raise UsageError(
            f"serving needs the serve extra ({error.name} is missing): pip install 'hornito[serve]'"
        ) from error
    address = Address(
        arguments.host,
        arguments.port,
        arguments.api_key,
        tuple(arguments.cors_origin or ()),
        arguments.drain_seconds,
        arguments.log,
    )
    if arguments.slots > MOST_SLOTS:
        raise UsageError(
            f"--slots {arguments.slots}: a submission has rows for up to {MOST_SLOTS} answers; "
            "more of them wait in the queue (--queue)"
        )
    bind(address.host, address.port).close()  # before the model is loaded
    server = Server(_service(arguments), address)
    # The thread that feeds the device must not wait 5 ms for the one that writes answers.
    sys.setswitchinterval(0.0005)
    _announce(server.url, str(server.service.card()["id"]), address)
    server.run()
    return 0


def _service(arguments: argparse.Namespace) -> Service:
    from hornito.cache import resolve_model
    from hornito.importers.onnx_generic.detect import generic_file
    from hornito.package import is_package, open_package
    from hornito.tensor.package import is_tensor_package

    path = resolve_model(arguments.model, arguments.weights)
    name = arguments.name or _name(arguments.model)
    if is_package(path):
        with open_package(path) as package:
            if is_tensor_package(package):
                return _encoder(arguments, path, name)
    elif generic_file(path) is not None:
        raise UsageError(
            f"{arguments.model} is a model of tensors. An encoder is served as a package of the "
            "lengths that its inputs may have (--bucket); the names of its dims are what `hornito "
            f"compile {arguments.model} --list-dims` prints"
        )
    if arguments.tokenizer is not None:
        raise UsageError("--tokenizer is for encoders; this model is none")
    return _text_model(arguments, name)


def _encoder(arguments: argparse.Namespace, path: Path, name: str) -> Service:
    from hornito.serve.embeddings import EmbeddingService
    from hornito.serve.encoder import Encoder
    from hornito.serve.metrics import Metrics
    from hornito.vk.device import open_device

    check_tensor_precision(arguments)
    tokenizer = None if arguments.tokenizer is None else Path(arguments.tokenizer)
    encoder = Encoder(path, tokenizer, lambda: open_device(arguments.device))
    lengths = ", ".join(str(bucket.shapes()["input_ids"]) for bucket in encoder.buckets)
    print(
        f"hornito: {encoder.device.info.name}\nencoder of {encoder.width} numbers, inputs of "
        f"{lengths} tokens" + ("" if encoder.tokenizer else "; no tokenizer: token ids only"),
        file=sys.stderr,
    )
    return EmbeddingService(encoder, Metrics(), name, arguments.queue)


def _text_model(arguments: argparse.Namespace, name: str) -> Service:
    from hornito.serve.metrics import Metrics
    from hornito.serve.requests import usual_temperature
    from hornito.serve.scheduler import Scheduler
    from hornito.serve.service import TextService

    sampling = sampling_keywords(arguments)
    with TerminalProgress() as progress:
        llm = load_model(arguments, progress, slots=arguments.slots, kv_bytes=arguments.kv_bytes)
        progress.finish()
        # A server lives long: it is worth a few seconds to have its best kernels proved.
        llm.prove(PROVE_SECONDS)
        prefixes = [] if arguments.prefix is None else [llm.load_prefix(arguments.prefix)]
    metrics = Metrics()
    scheduler = Scheduler(
        llm,
        queue_limit=arguments.queue,
        cache_bytes=arguments.cache_bytes,
        prefixes=prefixes,
        watch=metrics,
    )
    metrics.follow(scheduler)
    print(f"hornito: {llm.device_line}\n{llm.plan_summary()}", file=sys.stderr)
    service = TextService(scheduler, metrics, name, sampling)
    usual = usual_temperature(service.defaults)
    why = "" if usual == 0 or "temperature" in sampling else " (`hornito run` has 0: --temp 0)"
    print(f"requests without a temperature: {usual:g}{why}", file=sys.stderr)
    return service


def _name(model: str) -> str:
    """What clients call a model that came without a name: its file's, without the ending."""
    name = Path(model).name or model
    for ending in (".vxm", ".gguf", ".onnx"):
        name = name.removesuffix(ending)
    return name


def _announce(url: str, name: str, address: Address) -> None:
    print(
        f"hornito: listening on {url} (OpenAI's interface at {url}/v1, model {name!r})",
        file=sys.stderr,
    )
    if not address.loopback and address.api_key is None:
        print(
            "hornito: warning: everyone who reaches this address can use the model; --api-key KEY "
            "asks for a key",
            file=sys.stderr,
        )
    sys.stderr.flush()
