#!/usr/bin/env python3
"""Compose the prompts that draft heads are trained and measured on.

Usage: prompts.py [--out FILE] [--seed N] [--check]

Combines the topics, templates and short texts in scripts/prompts/, all written for this
project, into models/prompts.jsonl: one {"id", "split", "topic", "task", "messages"} a line.
A topic is held out or trained on as a whole, by a hash of its name, so that a new topic never
moves an old one across. The order is shuffled: any prefix is a fair sample.
--check compares FILE with what the script makes, verifies it, and counts tasks per split.
"""
import argparse
import collections
import datetime
import hashlib
import json
import pathlib
import random
import sys

BANK = pathlib.Path(__file__).resolve().parent / "prompts"
OUT = pathlib.Path(__file__).resolve().parents[1] / "models" / "prompts.jsonl"
HELD_OUT_PERCENT = 8
SPLIT_SALT = "split464"  # leaves every task between 4 and 13 % of its prompts held out
MAX_BYTES = 3_000_000
LANGUAGES = ["French", "Spanish", "German", "Italian", "Portuguese"]
CODE_LANGUAGES = ["Python"] * 4 + ["JavaScript", "C", "Rust"] * 2 + ["Java", "Go", "TypeScript"]

# ---- reading the bank


def sections(name):
    """The `## title` sections of a bank file, each with its lines; `# ` starts a comment."""
    found = []
    for line in (BANK / name).read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif line and not line.startswith("# "):
            if not found:
                found.append(("", []))
            found[-1][1].append(line)
    return found


WORDS = dict(sections("words.txt"))
WISHES = {**dict(sections("wishes.txt")), "none": []}
SENTENCES = dict(sections("sentences.txt"))
CODE = dict(sections("code.txt"))
TEXTS = sections("texts.txt")
ORDERS = {head: [line.replace("\\n", "\n") for line in lines] for head, lines in sections("orders.txt")}
# `other` is what to compare the topic with, or whom to write to about it.
Topic = collections.namedtuple("Topic", "kind name other")
Template = collections.namedtuple("Template", "task style weight text")


def read_topics():
    rows = [line.split(" ", 1) for _, lines in sections("topics.txt") for line in lines]
    topics = [Topic(kind, *rest.split(" / ")) for kind, rest in rows]
    twice = {t.name for t in topics} & {t.other for t in topics}
    assert not twice, f"both a topic and a rival, which the split by topic forbids: {twice}"
    return topics


def read_templates():
    by_kind = collections.defaultdict(list)
    for head, lines in sections("templates.txt"):
        task, kinds, style, weight = head.split()
        for kind in kinds:
            by_kind[kind] += [Template(task, style, float(weight) / len(lines), line) for line in lines]
    return by_kind


def orders(prefix):
    """The sections `prefix/name` of orders.txt by name, one order per language where a line asks for one."""
    found = {}
    for head, lines in ORDERS.items():
        if head.startswith(f"{prefix}/"):
            found[head.split("/", 1)[1]] = [
                line.replace("{language}", language)
                for line in lines for language in (LANGUAGES if "{language}" in line else [""])]
    return found


# ---- small tools


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def some(rng, items, count):
    return rng.sample(items, min(count, len(items)))


def weighted(rng, items, count):
    """Draws without replacement, heavier items first on average."""
    return sorted(items, key=lambda i: rng.random() ** (1 / i.weight), reverse=True)[:count]


def fill(rng, template, topic):
    plural = topic.kind == "p"
    text = template.format(
        t=topic.name, T=topic.name[0].upper() + topic.name[1:], r=topic.other, to=topic.other,
        n=rng.choice(["three", "five", "five", "six", "seven", "eight", "ten", "3", "5", "10"]),
        it="them" if plural else "it", matter="matter" if plural else "matters",
        play="play" if plural else "plays", **{"is": "are" if plural else "is"},
        **{key: rng.choice(WORDS[key]) for key in ("persona", "hero", "thing")})
    return text[0].upper() + text[1:] if template[0] == "{" else text


def said(rng, text):
    """The same request as different people type it."""
    form = rng.choices(["{t}", "lower", "Hi! {t}", "{t} Thanks!", "Quick question. {t}"], [86, 6, 3, 3, 2])[0]
    return text.lower().rstrip(".?") if form == "lower" else form.replace("{t}", text)


def greeting(rng):
    return [user(rng.choice(WORDS["greet"])), assistant(rng.choice(WORDS["greeted"]))]


def framed(rng, messages, system="system", share=0.12):
    """Some conversations begin with a system message."""
    if rng.random() < share:
        return [{"role": "system", "content": rng.choice(WORDS[system])}] + messages
    return messages


# ---- sections: each yields (topic, task, messages)


def about_topics(seed):
    templates = read_templates()
    for topic in read_topics():
        rng = random.Random(f"{seed}/topic/{topic.name}")
        for t in weighted(rng, templates[topic.kind], 11):
            text = fill(rng, t.text, topic)
            if WISHES[t.style] and rng.random() < 0.4:
                text = text if text[-1] in ".?!" else f"{text}."
                text += " " + rng.choice(WISHES[t.style])
            messages = [user(said(rng, text))]
            if rng.random() < 0.08:
                messages = greeting(rng) + messages
            yield topic.name, t.task, framed(rng, messages)
        if topic.kind != "s":
            ask = rng.choice(ORDERS["clarify_opening"]).format(t=topic.name)
            yield topic.name, "clarify", framed(rng, [
                user(ask), assistant(rng.choice(WORDS["clarify"])), user(rng.choice(WORDS["clarified"]))])




def about_texts(seed):
    for title, sentences in TEXTS:
        rng = random.Random(f"{seed}/text/{title}")
        for task, lines in orders("text").items():
            for order in some(rng, lines, 2):
                length = rng.randint(1, 2) if task == "translate" else rng.randint(3, len(sentences))
                start = rng.randint(0, len(sentences) - length)
                text = " ".join(sentences[start:start + length])
                layout = rng.choice(ORDERS["text_layout"])
                yield title, task, framed(rng, [user(layout.format(o=order, t=text))])
        partners = [lines for other, lines in TEXTS if other != title and split_of(other) == split_of(title)]
        for order in some(rng, ORDERS["two_texts"], 2):
            both = "\n\n".join(" ".join(text) for text in (sentences, rng.choice(partners)))
            yield title, "two_texts", framed(rng, [user(f"{order}\n\n{both}")])
        yield from talks_about(rng, title, sentences)


def talks_about(rng, title, sentences):
    """Conversations in which the assistant has already told some of a text."""
    for turn, follow in enumerate(some(rng, WORDS["followup"], 10)):
        opening = rng.choice(ORDERS["text_opening"]).format(t=title)
        told = rng.randint(2, 4)
        messages = [user(opening), assistant(" ".join(sentences[:told]))]
        if turn < 4:
            messages += [user(rng.choice(ORDERS["more"])), assistant(" ".join(sentences[told:]))]
        yield title, "follow_up", framed(rng, messages + [user(follow)])


def about_sentences(seed):
    counts = {"rewrite": 4, "translate": 4, "continue": 3, "puzzle": 3}
    for kind, lines in orders("sentence").items():
        task = "classify" if kind in ("review", "ticket", "message") else kind
        for sentence in SENTENCES[kind]:
            rng = random.Random(f"{seed}/{kind}/{sentence}")
            for order in some(rng, lines, counts.get(kind, 2)):
                yield sentence, task, framed(rng, [user(order.format(s=sentence))])


def about_records(seed):
    rng = random.Random(f"{seed}/records")
    records = [(fields, text) for fields, lines in orders("record").items() for text in lines]
    for i in range(130):
        fields, text = records[i % len(records)]
        a, b, c = rng.sample(WORDS["name"], 3)
        city, city2 = rng.sample(WORDS["city"], 2)
        date = datetime.date(2024, 1, 1) + datetime.timedelta(days=rng.randrange(700))
        text = text.format(a=a, b=b, c=c, city=city, city2=city2, item=rng.choice(WORDS["item"]), n=rng.randint(2, 40),
            price=rng.randint(40, 990), code=rng.randint(1000, 9999), hour=rng.randint(8, 19),
            date=f"{date.day} {date:%B %Y}")
        order = rng.choice(ORDERS["record_order"]).format(f=fields)
        yield text, "extract", framed(rng, [user(f"{order}\n\n{text}")])


def expression(rng):
    x, y, z = rng.randint(11, 99), rng.randint(3, 48), rng.randint(2, 12)
    return rng.choice(ORDERS["expression"]).format(
        x=x, y=y, z=z, y7=7 * y, x9=9 * x, xz=x * z, z5=5 * z, x10=10 * x, z1=z + 1, sum=y + z * y, s=rng.randint(2, 4))


def word_problem(rng):
    a, b, c = rng.sample(WORDS["name"], 3)
    x, y, s, t = rng.randint(12, 95), rng.randint(4, 40), rng.randint(2, 8), rng.randint(3, 12)
    return rng.choice(ORDERS["word_problem"]).format(
        a=a, b=b, c=c, x=x, y=y, s=s, t=t, item=rng.choice(WORDS["item"]), big=100, sum=2 * y + s,
        pct=5 * rng.randint(1, 10), pages=t * rng.randint(8, 40), twice=2 * s, triple=3 * x, hour=rng.randint(7, 14))


def unit_question(rng):
    source, target = rng.choice(ORDERS["unit"]).split(" / ")
    ask = rng.choice(["Convert {n} {a} to {b}.", "How many {b} are {n} {a}?", "{n} {a} in {b}?"])
    return ask.format(n=rng.randint(2, 180), a=source, b=target)


def date_question(rng):
    def show(day):
        return f"{day:%B} {day.day}, {day.year}"

    first = datetime.date(2023, 1, 1) + datetime.timedelta(days=rng.randrange(1500))
    later, soon = (first + datetime.timedelta(days=rng.randint(*span)) for span in ((3, 200), (4, 20)))
    return rng.choice(ORDERS["date"]).format(
        first=show(first), later=show(later), soon=show(soon), iso=f"{first:%Y-%m-%d}", dmy=f"{first:%d/%m/%Y}",
        weekday=f"{first:%A}", year=first.year + rng.randint(1, 120), days=rng.randint(5, 90),
        born=f"{first.day} {first:%B} {first.year - 40}")


def ordering(rng):
    names = rng.sample(WORDS["name"], rng.choice([3, 4]))
    more, least = rng.choice(ORDERS["ordering"]).split(" / ")
    clues = [f"{x} is {more} than {y}." for x, y in zip(names, names[1:])]
    rng.shuffle(clues)
    return " ".join(clues) + f" Who is {least}?"


def about_numbers(seed):
    makers = {"arithmetic": (expression, 190), "word_problem": (word_problem, 210), "units": (unit_question, 100),
              "dates": (date_question, 90), "puzzle": (ordering, 60)}
    hints = ["", "", "", " Show your work.", " Answer with the result only.", " Explain step by step."]
    for task, (make, count) in makers.items():
        rng = random.Random(f"{seed}/{task}")
        for problem in sorted({make(rng) for _ in range(count)}):
            text = problem
            if task == "arithmetic":
                text = rng.choice(ORDERS["equation_order" if "x" in problem else "expression_order"]).format(v=problem)
            yield problem, task, framed(rng, [user(text + rng.choice(hints))])
    rng = random.Random(f"{seed}/chained")
    for _ in range(70):
        x, y, z = rng.randint(3, 40), rng.randint(3, 30), rng.randint(2, 50)
        follow = rng.choice(ORDERS["number_follow"]).format(z=z)
        told = [user(f"What is {x} times {y}?"), assistant(f"{x} times {y} is {x * y}.")]
        yield f"{x} * {y}", "arithmetic", told + [user(follow)]


def about_code(seed):
    for kind, lines in orders("code").items():
        for problem in CODE[kind]:
            rng = random.Random(f"{seed}/code/{problem}")
            for order in some(rng, lines, 3):
                task = "code" if kind == "function" else kind.lower()
                task = "code_tests" if "unit tests" in order else task
                text = order.format(l=rng.choice(CODE_LANGUAGES), p=problem)
                yield problem, task, framed(rng, [user(text)], "codesystem", 0.2)
    for head, lines in sections("snippets.txt"):
        yield from about_snippet(seed, *head.split(" ", 2), "\n".join(lines))


def about_snippet(seed, language, state, problem, code):
    rng = random.Random(f"{seed}/snippet/{problem}")
    block = f"```{language.lower()}\n{code}\n```"
    others = [other for other in CODE_LANGUAGES if other != language]
    lines = orders("snippet")
    for task in ["code_fix", "code_explain"] if state == "bug" else ["code_explain", "code_tests", "code_rewrite"]:
        for order in some(rng, lines[task], 4 if task == "code_fix" else 2):
            order = order.format(l=language, p=problem, other=rng.choice(others))
            yield problem, task, framed(rng, [user(f"{order}\n\n{block}")], "codesystem", 0.2)
    if state == "ok":
        told = [user(f"Show me {language} code that {problem}."), assistant(f"Here it is:\n\n{block}")]
        follows = [f for f in WORDS["codefollowup"] if f"{language}." not in f]
        for follow in some(rng, follows, 7):
            yield problem, "code_follow_up", framed(rng, told + [user(follow)], "codesystem")


def in_other_languages(seed):
    """The topics of world.txt, in English and five other languages; one row is one topic."""
    rows = [row.split(" | ") for row in sections("world.txt")[0][1]]
    templates = dict(sections("languages.txt"))
    english = [t for t in read_templates()["c"] if "{r}" not in t.text]
    for name, *names in rows:
        rng = random.Random(f"{seed}/world/{name}")
        for t in weighted(rng, english, 4):
            yield name, t.task, framed(rng, [user(said(rng, fill(rng, t.text, Topic("c", name, ""))))])
        for language, local in zip(LANGUAGES, names):
            for text in some(rng, [t for t in templates[language] if t[0] != "="], 3):
                yield name, f"in_{language.lower()}", framed(rng, [user(text.format(t=local))], share=0.04)
    for language, lines in templates.items():
        for line in lines:
            if line[0] == "=":
                yield line[2:], f"in_{language.lower()}", [user(line[2:])]


def small_talk(seed):
    for line in sections("chat.txt")[0][1]:
        rng = random.Random(f"{seed}/chat/{line}")
        yield line, "chat", [user(line)]
        if rng.random() < 0.6:
            yield line, "chat", framed(rng, [user(line)], share=1.0)
        if rng.random() < 0.5:
            yield line, "chat", greeting(rng) + [user(line)]


# ---- the file


def split_of(topic):
    digest = hashlib.sha256(f"{SPLIT_SALT}/{topic.lower()}".encode()).digest()
    return "heldout" if int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT else "train"


def compose(seed):
    unique = {}
    for make in [about_topics, about_texts, about_sentences, about_records, about_numbers, about_code,
                 in_other_languages, small_talk]:
        for topic, task, messages in make(seed):
            unique.setdefault(json.dumps(messages).lower(), (topic, task, messages))
    prompts = list(unique.values())
    random.Random(f"{seed}/order").shuffle(prompts)
    return [{"id": f"p{i:05}", "split": split_of(topic), "topic": topic, "task": task, "messages": messages}
            for i, (topic, task, messages) in enumerate(prompts, 1)]


def to_text(prompts):
    return "".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts)


def faults(text, seed):
    """What is wrong with a prompt file, one sentence each."""
    prompts = [json.loads(line) for line in text.splitlines()]
    topics, tasks = ({split: {p[field] for p in prompts if p["split"] == split} for split in ("train", "heldout")}
                     for field in ("topic", "task"))
    if len({p["id"] for p in prompts}) != len(prompts):
        yield "ids are not unique"
    if len({json.dumps(p["messages"]) for p in prompts}) != len(prompts):
        yield "some messages are there twice"
    if shared := topics["train"] & topics["heldout"]:
        yield f"topics in both splits: {sorted(shared)}"
    if missing := tasks["train"] ^ tasks["heldout"]:
        yield f"tasks in one split only: {sorted(missing)}"
    if any(p["messages"][-1]["role"] != "user" for p in prompts):
        yield "a conversation does not end with the user"
    if len(text.encode()) > MAX_BYTES:
        yield f"the file is larger than {MAX_BYTES} bytes"
    if text != to_text(compose(seed)):
        yield "the file is not what this script makes; run it again without --check"


def report(prompts):
    counts = collections.Counter((task, p["split"]) for p in prompts for task in (p["task"], "~ all"))
    print(f"{'task':16} {'train':>6} {'heldout':>8}")
    for task in sorted({task for task, _ in counts}):
        print(f"{task:16} {counts[task, 'train']:6} {counts[task, 'heldout']:8}")
    roles = [{m["role"] for m in p["messages"]} for p in prompts]
    print(f"{sum('assistant' in r for r in roles)} have several turns, {sum('system' in r for r in roles)} a "
          f"system message, {sum(p['task'].startswith('in_') for p in prompts)} are in other languages")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=OUT)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    if not args.check:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(to_text(compose(args.seed)), encoding="utf-8")
    text = args.out.read_text(encoding="utf-8")
    report([json.loads(line) for line in text.splitlines()])
    found = list(faults(text, args.seed))
    for fault in found:
        print(f"prompts: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
