"""Rank continuations: python examples/score.py MODEL "Paris is in" " France" " Spain" """

import sys

import hornito

if len(sys.argv) < 4:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, prompt, *continuations = sys.argv[1:]
try:
    with hornito.load(model) as llm:
        scores = {text: llm.score(prompt, text) for text in continuations}
    for text, score in sorted(scores.items(), key=lambda item: -item[1].logprob):
        print(f"{score.logprob:9.3f}  perplexity {score.perplexity:9.2f}  {prompt}{text}")
except hornito.HornitoError as error:
    sys.exit(f"{sys.argv[0]}: {error}")
