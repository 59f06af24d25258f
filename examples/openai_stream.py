"""Stream from a `hornito serve`: python examples/openai_stream.py URL "Tell me a story" """

import sys

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)

from openai import OpenAI, OpenAIError

url, question = sys.argv[1:]  # http://127.0.0.1:8000/v1
try:
    client = OpenAI(base_url=url, api_key="none")
    chunks = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0.7,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in chunks:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
            if choice.finish_reason is not None:
                print(f"\n(finish: {choice.finish_reason})")
        if chunk.usage is not None:
            print(f"({chunk.usage.completion_tokens} tokens)")
except OpenAIError as error:
    sys.exit(f"{sys.argv[0]}: {url}: {error}")
