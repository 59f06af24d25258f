"""Complete a text: python examples/generate.py MODEL "Once upon a time" """

import sys

import hornito

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, prompt = sys.argv[1:]
try:
    with hornito.load(model) as llm:
        out = llm.generate(prompt, max_tokens=32)
        print(prompt + out.text)
        speed = out.timings.decode_tokens / max(out.timings.decode_seconds, 1e-9)
        print(f"({out.finish_reason}, {speed:.1f} tok/s on {llm.device_line})", file=sys.stderr)
except hornito.HornitoError as error:
    sys.exit(f"{sys.argv[0]}: {error}")
