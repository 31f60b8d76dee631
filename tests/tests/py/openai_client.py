"""Drives a server with OpenAI's own client. Usage: openai_client.py http://host:port"""
import sys

from openai import BadRequestError, NotFoundError, OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def check(name, holds, shown=""):
    if not holds:
        sys.exit(f"FAILED {name}: {shown}")
    print(f"ok {name}")


models = client.models.list()
model = models.data[0].id
check("models", len(models.data) == 1 and client.models.retrieve(model).id == model, models)

reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24)
choice = reply.choices[0]
check("chat", choice.message.content == ANSWER and choice.finish_reason == "stop", reply)
check("usage", reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens, reply.usage)

chunks = list(client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=24,
                                             stream=True, stream_options={"include_usage": True}))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
check("chat stream", text == ANSWER and finishes == ["stop"], chunks)
check("chat stream usage", chunks[-1].usage.completion_tokens == reply.usage.completion_tokens, chunks[-1])

reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=4,
                                       logprobs=True, top_logprobs=2)
content = reply.choices[0].logprobs.content
check("chat logprobs", len(content) == 4 and all(len(t.top_logprobs) == 2 for t in content), reply)
check("chat logprobs text", "".join(t.token for t in content) == reply.choices[0].message.content, content)

reply = client.chat.completions.create(model=model, messages=QUESTION, temperature=0.8, max_tokens=8, n=2, seed=3)
again = client.chat.completions.create(model=model, messages=QUESTION, temperature=0.8, max_tokens=8, n=2, seed=3)
check("n and seed", [c.message.content for c in reply.choices] == [c.message.content for c in again.choices], reply)

prompt = "One, two, three, four,"
reply = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=8)
check("completion", reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 8, reply)
chunks = list(client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=8, stream=True))
check("completion stream", "".join(c.choices[0].text for c in chunks) == reply.choices[0].text, chunks)

logged = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=3, logprobs=2)
logprobs = logged.choices[0].logprobs
check("completion logprobs", len(logprobs.token_logprobs) == 3 and max(logprobs.token_logprobs) <= 0, logprobs)

stopped = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=32, stop=[" seven"])
check("stop", " seven" not in stopped.choices[0].text, stopped)

try:
    client.completions.create(model=model, prompt="", max_tokens=1)
    sys.exit("FAILED an empty prompt was accepted")
except BadRequestError as error:
    check("bad request", error.status_code == 400, error)
try:
    client.models.retrieve("nobody")
    sys.exit("FAILED an unknown model was found")
except NotFoundError as error:
    check("unknown model", error.status_code == 404, error)

print("all checks passed")
