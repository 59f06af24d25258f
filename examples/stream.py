"""Print an answer while it is made: python examples/stream.py MODEL "The sea" """

import sys

import hornito

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, prompt = sys.argv[1:]
try:
    with hornito.load(model) as llm:
        for chunk in llm.stream(prompt, max_tokens=32, stop=["\n\n"]):
            print(chunk.text, end="", flush=True)
        print()
except hornito.HornitoError as error:
    sys.exit(f"{sys.argv[0]}: {error}")
