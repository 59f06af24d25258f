"""JSON from a `hornito serve`: python examples/openai_json_schema.py URL "A cat is born" """

import json
import sys

if len(sys.argv) != 3:
    print("usage,", __doc__, file=sys.stderr)
    sys.exit(2)

from openai import OpenAI, OpenAIError

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "kind": {"enum": ["birth", "wedding", "other"]},
    },
    "required": ["title", "year", "kind"],
    "additionalProperties": False,
}

url, question = sys.argv[1:]  # http://127.0.0.1:8000/v1
try:
    client = OpenAI(base_url=url, api_key="none")
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": f"Describe the event as JSON: {question}"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "event", "schema": SCHEMA, "strict": True},
        },
        max_tokens=200,
    )
    event = json.loads(answer.choices[0].message.content)
    print(f"{event['title']!r}, a {event['kind']} of {event['year']}")
except OpenAIError as error:
    sys.exit(f"{sys.argv[0]}: {url}: {error}")
