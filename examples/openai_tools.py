"""Functions with a `hornito serve`: python examples/openai_tools.py URL "Weather in Oslo?" """

import json
import sys

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)

from openai import OpenAI, OpenAIError

CITY = {"type": "string", "maxLength": 20}
PARAMETERS = {"type": "object", "properties": {"city": CITY}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": PARAMETERS}

url, question = sys.argv[1:]  # http://127.0.0.1:8000/v1
try:
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": question}]
    asked = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[{"type": "function", "function": FUNCTION}],
        tool_choice="required",  # "auto" leaves it to the model
        parallel_tool_calls=False,
        max_tokens=100,
    )
    (call,) = asked.choices[0].message.tool_calls
    city = json.loads(call.function.arguments)["city"]
    print(f"{call.function.name} of {city!r}")
    messages += [
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": f"rain in {city}, 12 degrees"},
    ]
    answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60)
    print(answer.choices[0].message.content)
except OpenAIError as error:
    sys.exit(f"{sys.argv[0]}: {url}: {error}")
