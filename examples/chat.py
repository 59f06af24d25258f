"""A conversation that stays in the KV cache: python examples/chat.py MODEL "Hi" "And you?" """

import sys

import hornito
from hornito.conversation import ChatSettings, Conversation

if len(sys.argv) < 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)
model, *questions = sys.argv[1:]
try:
    with (
        hornito.load(model) as llm,
        Conversation(llm, settings=ChatSettings(max_tokens=24)) as chat,
    ):
        for question in questions:
            print(">", question)
            for chunk in chat.say(question):
                print(chunk.text, end="", flush=True)
            print()
        stats = chat.stats
        print(f"({stats.reused_tokens} tokens reused, {stats.evaluated_tokens} evaluated)")
except hornito.HornitoError as error:
    sys.exit(f"{sys.argv[0]}: {error}")
