"""Talk to `vkv serve` with the openai client, and see what was not computed again.

vkv serve --model MODEL --port 8080
python examples/openai_client.py http://localhost:8080/v1 MODEL
"""

import sys

from openai import OpenAI

url, model = sys.argv[1:]
client = OpenAI(base_url=url, api_key="none")
system = {"role": "system", "content": "You are the front desk of a small museum of ships. " * 4}

for question in ("When do you open?", "When do you close?"):
    answer = client.chat.completions.create(
        model=model,
        messages=[system, {"role": "user", "content": question}],
        max_tokens=16,
    )
    usage = answer.usage
    cached = usage.prompt_tokens_details.cached_tokens
    print(f"{question} {cached} of {usage.prompt_tokens} prompt tokens were cached")
client.close()
