"""Token ids in, token ids out: python examples/token_ids.py MODEL 1,2,3

No tokenizer is needed. The session shows what `generate` does inside.
"""

import sys

import hornito

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, text = sys.argv[1:]
try:
    ids = [int(word) for word in text.split(",")]
    with hornito.load(model) as llm:
        out = llm.generate(ids, max_tokens=8, ignore_eos=True)
        print(",".join(map(str, out.token_ids)))

        with llm.session() as session:
            session.prefill(ids)
            tokens = []
            while len(tokens) < 8:
                tokens.append(session.pending)  # the most likely next token
                session.step(session.pending)
        print("the same, step by step:", tokens == list(out.token_ids))
except (hornito.HornitoError, ValueError) as error:
    sys.exit(f"{sys.argv[0]}: {error}")
