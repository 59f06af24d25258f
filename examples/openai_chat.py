"""Chat with a `hornito serve`: python examples/openai_chat.py URL "Who are you?" """

import sys

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)

from openai import OpenAI, OpenAIError

url, question = sys.argv[1:]  # http://127.0.0.1:8000/v1
try:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    for _ in range(2):
        answer = client.chat.completions.create(
            model=model, messages=messages, max_tokens=32, temperature=0
        )
        text = answer.choices[0].message.content
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"{text}\n({answer.usage.prompt_tokens} prompt tokens, {cached} of them cached)")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
except OpenAIError as error:
    sys.exit(f"{sys.argv[0]}: {url}: {error}")
