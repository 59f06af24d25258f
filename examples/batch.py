"""Many prompts at once: python examples/batch.py MODEL "One" "Two" "Three" """

import sys

import hornito

if len(sys.argv) < 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, *prompts = sys.argv[1:]
try:
    with hornito.load(model, slots=4, context=512) as llm:
        for prompt, out in zip(prompts, llm.generate(prompts, max_tokens=16), strict=True):
            print(f"{prompt!r} -> {out.text!r} ({out.finish_reason})")
except hornito.HornitoError as error:
    sys.exit(f"{sys.argv[0]}: {error}")
