"""Tasks with checkable answers that the tiny checkpoint is trained and evaluated on.

Six families have one right answer each (``FAMILIES``). So have three that are apart so that the
prompts of the six stay what they were (``LATER_FAMILIES``): ``weather``, questions about a city
beside a declared tool; ``json-asked``, records in other words than the family ``json`` has; and
``fill``, a word or number that is missing in a text that goes on after it. ``prose`` and ``chat``
have fixed texts and are trained on, but not scored. Everything is drawn from a ``random.Random``,
so a seed gives the same examples everywhere. A question (the text of the last user turn, without
filler around it) is held out by its hash: training never draws such a question, in any context;
evaluation draws nothing else. What a held-out question is made of (the pair 7 and 8, the word
"cat") does occur in training, inside other questions.

Several items are answered as ``item: answer`` pairs, which lets a model of two million parameters
find its place in the list from what it wrote last.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

Size = Literal["one", "few", "many"]
Context = Literal["plain", "filler", "turns"]

FAMILIES = ("sums", "reverse", "upper", "json", "count", "list")
TOOL_FAMILY = "weather"
JSON_FAMILY = "json-asked"
FILL_FAMILY = "fill"
LATER_FAMILIES = (TOOL_FAMILY, JSON_FAMILY, FILL_FAMILY)
UNCHECKED_FAMILIES = ("prose", "chat")

# One question in ten belongs to the evaluation split.
HELD_OUT_MODULUS = 10
LARGEST_ADDEND = 20
LARGEST_COUNT = 20
# Characters that, with the template's control tokens, make a context of over three windows of 24.
_MIN_CONTEXT_CHARS = 60

_CONSONANTS = "bcdfghjklmnprstvwz"
_VOWELS = "aeiou"
_WORD_TEXT = """
ant apple arm bag ball bat bean bear bed bee bell bird blue boat book box boy bread brick bus cake
cap car cat chair clock cloud coat cow cup day deer desk dog door drum duck ear egg farm fish five
flag food foot fork fox frog game gate girl glass goat gold grass green hand hat hello hen hill
home horse house ice ink iron jam jar jump key kite lake lamp leaf lemon lion map milk moon mouse
music nest night nose nut oak ocean owl paper park pear pen pig plane plum pond queen rain red
ring river road rock room rose sand sea seed sheep ship shoe sky snow song star stone sun table
tea three tiger time train tree truck two wall water wave west wind wolf wood word world yard year
zebra
"""
_WORDS = _WORD_TEXT.split()
_CITIES = ("rome", "paris", "oslo", "lima", "cairo", "delhi", "tokyo", "quito", "bern", "riga")

_SUBJECTS = (
    "the red fox",
    "a small cat",
    "the old king",
    "my friend",
    "the gray wolf",
    "a tall man",
)
_VERBS = ("sat by", "walked to", "looked at", "ran past", "slept near", "came from")
_PLACES = ("the river", "the green hill", "a quiet road", "the sea", "the old gate", "a dark wood")

# Written for this file.
_STORIES = {
    "fox": (
        "A fox saw grapes on a high wall. It jumped once, it jumped twice, and it could not reach "
        'them. "They are sour," said the fox, and it went home hungry.'
    ),
    "crow": (
        "A thirsty crow found a jar with little water in it. It dropped in one stone after another "
        "until the water rose, and then it drank."
    ),
    "hare": (
        "The hare laughed at the slow turtle and took a nap under a tree. The turtle walked on, "
        "step by step, and won the race."
    ),
    "moon": (
        "The moon has no light of its own. It shines because the sun shines on it, and it goes "
        "around the earth in about a month."
    ),
    "rain": (
        "The sun warms the sea and water rises as vapor. High up it cools into clouds, and when "
        "the drops grow heavy they fall as rain."
    ),
    "bee": (
        "A bee flies from flower to flower and drinks nectar. It carries dust from one bloom to "
        "the next, so that fruit can grow, and it brings honey home."
    ),
}
_GREETING = "Hello! Ask me to add numbers, reverse words or count."
_IDENTITY = "I am a tiny diffusion model with two million parameters."
_ABILITIES = "I can add, reverse, count, number lists and write JSON."
_WELCOME = "You are welcome."
# Without the end mark and in lower case: people type them with any, or none.
_CHATS = {
    "hello": _GREETING,
    "hello there": _GREETING,
    "hi": _GREETING,
    "hi there": _GREETING,
    "hey": _GREETING,
    "good morning": _GREETING,
    "who are you": _IDENTITY,
    "what are you": _IDENTITY,
    "what can you do": _ABILITIES,
    "help": _ABILITIES,
    "thank you": _WELCOME,
    "thank you very much": _WELCOME,
    "thanks": _WELCOME,
    "thanks a lot": _WELCOME,
}
_END_MARKS = ("", "!", ".", "?")

# Cities of weather questions: these, or any word with a capital letter.
_WEATHER_CITIES = (
    *("Amsterdam", "Athens", "Berlin", "Boston", "Cairo", "Chicago", "Delhi", "Dublin", "Lima"),
    *("Lisbon", "London", "Madrid", "Moscow", "Mumbai", "Munich", "Nairobi", "New York", "Oslo"),
    *("Paris", "Prague", "Rome", "San Francisco", "Seattle", "Seoul", "Shanghai", "Singapore"),
    *("Stockholm", "Sydney", "Tokyo", "Toronto", "Vienna", "Warsaw", "Zurich"),
)
_WEATHER_WORDINGS = (
    "What is the weather in {}?",
    "What's the weather in {}?",
    "What is the weather like in {}?",
    "What's the weather like in {} today?",
    "How is the weather in {}?",
    "How is the weather in {} today?",
    "How warm is it in {}?",
    "Weather in {}?",
    "Tell me the weather in {}.",
)
_UNITS = ("celsius", "fahrenheit")
_TOOL_NAMES = ("get_weather", "get_weather", "get_weather", "get_current_weather")
_TOOL_DESCRIPTIONS = (
    "Get the weather",
    "Get the weather of a city",
    "Get the current weather in a city.",
    "Get current weather for a location.",
    "Get the current weather in a given location",
    "The weather of a city",
)
_CITY_DESCRIPTIONS = (
    "The city",
    "City name",
    "The name of the city",
    "City and country",
    "The city, e.g. Paris",
    "The city and state, e.g. San Francisco, CA",
)
_OTHER_TOOLS = (("get_time", "Get the time", "zone"), ("search", "Search the web", "query"))
_SKIES = ("sunny", "rainy", "cloudy", "windy", "foggy", "clear", "snow")
_NO_TOOL = "I can ask for the weather where a get_weather tool is given."
_SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.", "Be exact.")


@dataclass(frozen=True)
class Example:
    """A conversation that ends in a question, and its one right answer."""

    family: str
    question: str
    answer: str
    # Text put before the question in the same turn.
    filler: str = ""
    # Earlier (question, answer) turns.
    turns: tuple[tuple[str, str], ...] = ()
    system: str = ""
    # Not empty: the template is rendered with thinking on and this thought precedes the answer.
    thought: str = ""
    # Declared in the system turn, as an OpenAI client sends them.
    tools: tuple[dict[str, Any], ...] = ()
    # Messages after the question: the call that the model made, and its result.
    after: tuple[dict[str, Any], ...] = ()
    # Not empty: no conversation, but a text whose middle, the answer, is missing between question
    # and suffix.
    suffix: str = ""

    @property
    def is_call(self) -> bool:
        """Whether the answer is a tool call, after which the result follows in the same turn."""
        return self.answer.startswith("<|tool_call>")

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Chat messages as an OpenAI client sends them, last the user's or a tool's result."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": self.system})
        for question, answer in self.turns:
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": self.filler + self.question})
        return messages + list(self.after)

    @property
    def is_held_out(self) -> bool:
        """Whether the question belongs to the evaluation split, whatever surrounds it."""
        digest = hashlib.sha256((self.question + self.suffix).encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_MODULUS == 0


def is_correct(example: Example, text: str) -> bool:
    """Exact match with the answer, apart from control tokens and white space around it."""
    return text.strip() == re.sub(r'<\|?[a-z_"]+\|?>', "", example.answer)


def answer_question(question: str) -> str:
    """Answer a question of a checked family from its text alone, with plain Python.

    An independent way to the answers that ``draw`` writes; it knows every wording in this file.

    Raises:
        ValueError: If the wording is not one of this file's.
    """
    for pattern, solve in _SOLVERS:
        if match := re.fullmatch(pattern, question):
            return solve(match.group(1))
    raise ValueError(f"no checked family asks {question!r}")


def _solve_sums(text: str) -> str:
    sums = [item.replace(" plus ", "+").replace(" and ", "+") for item in text.split(", ")]
    totals = [str(sum(int(number) for number in item.split("+"))) for item in sums]
    if len(sums) == 1:
        return totals[0]
    return ", ".join(f"{item}={total}" for item, total in zip(sums, totals, strict=True))


def _solve_words(text: str, change: Callable[[str], str]) -> str:
    words = text.split(", ")
    if len(words) == 1:
        return change(text)
    return ", ".join(f"{word}: {change(word)}" for word in words)


def _solve_count(text: str) -> str:
    first, last = (int(number) for number in text.split(" to "))
    return ", ".join(str(number) for number in range(first, last + 1))


def _solve_tally(text: str) -> str:
    return ", ".join(f"{word} {idx}" for idx, word in enumerate(text.split(", "), 1))


def _solve_record(text: str) -> str:
    pairs = (item.split(" ") for item in text.split(", "))
    return json.dumps({key: int(value) if value.isdigit() else value for key, value in pairs})


def _solve_records(text: str) -> str:
    people = (item.split(" ") for item in text.split(", "))
    return json.dumps([{"name": name, "age": int(age)} for name, age in people])


def _solve_numbered(text: str) -> str:
    return "\n".join(f"{idx}. {word}" for idx, word in enumerate(text.split(", "), 1))


def _solve_bullets(text: str) -> str:
    return "\n".join(f"- {word}" for word in text.split(", "))


# Wordings per family: (for one item, for several). ``{}`` is replaced by the items.
_SUM_WORDINGS = (
    ("What is {}?", "Work out {}.", "{}=?"),
    ("What are {}?", "Work out {}.", "Add up: {}."),
)
_REVERSE_WORDINGS = (
    ("Reverse the word {}.", "Spell {} backwards.", "Reverse {}."),
    ("Reverse these words: {}.", "Spell backwards: {}."),
)
_UPPER_WORDINGS = (
    ("Write {} in capitals.", "Shout {}.", "Upper-case {}."),
    ("Write in capitals: {}.", "Shout these words: {}."),
)
_COUNT_WORDINGS = (
    "Count from {}.",
    "Count up from {}.",
    "List the numbers from {}.",
    "Write the numbers from {}.",
    "Say the numbers from {}.",
    "Give me the numbers from {}.",
)
_TALLY_WORDINGS = ("Count the words: {}.", "Count off: {}.")
_RECORD_WORDINGS = ("Make a JSON record: {}.", "Write as JSON: {}.")
_ASKED_RECORD_WORDINGS = (
    "Return JSON: {}.",
    "Return a JSON object: {}.",
    "Give me JSON: {}.",
    "Output JSON: {}.",
    "Convert to JSON: {}.",
    "Format as JSON: {}.",
    "Turn into JSON: {}.",
    "Create a JSON object: {}.",
    "Respond in JSON: {}.",
    "As JSON: {}.",
    "{} as JSON.",
    "{} in JSON, please.",
)
_RECORDS_WORDINGS = ("Make a JSON list: {}.", "Write people as JSON: {}.")
_NUMBERED_WORDINGS = ("Number these words: {}.", "Make a numbered list: {}.")
_BULLET_WORDINGS = ("Make a bullet list: {}.",)

_WORD_ADDENDS = ("Add {}.", "How much is {}?")


def _patterns(wordings: tuple[str, ...], items: str, solve: Callable[[str], str]) -> list[Any]:
    return [(re.escape(w).replace(r"\{\}", f"({items})"), solve) for w in wordings]


_SOLVERS = (
    _patterns(_SUM_WORDINGS[0] + _SUM_WORDINGS[1], r"[\d+, ]+", _solve_sums)
    + _patterns(_WORD_ADDENDS, r"\d+ (?:and|plus) \d+", _solve_sums)
    + _patterns(
        _REVERSE_WORDINGS[0] + _REVERSE_WORDINGS[1],
        r"[a-z]+(?:, [a-z]+)*",
        lambda text: _solve_words(text, lambda word: word[::-1]),
    )
    + _patterns(
        _UPPER_WORDINGS[0] + _UPPER_WORDINGS[1],
        r"[a-z]+(?:, [a-z]+)*",
        lambda text: _solve_words(text, str.upper),
    )
    + _patterns(_COUNT_WORDINGS, r"\d+ to \d+", _solve_count)
    + _patterns(_TALLY_WORDINGS, r"[a-z, ]+", _solve_tally)
    + _patterns(
        _RECORD_WORDINGS + _ASKED_RECORD_WORDINGS, r"[a-z]+ \w+(?:, [a-z]+ \w+)*", _solve_record
    )
    + _patterns(_RECORDS_WORDINGS, r"[a-z]+ \d+(?:, [a-z]+ \d+)*", _solve_records)
    + _patterns(_NUMBERED_WORDINGS, r"[a-z, ]+", _solve_numbered)
    + _patterns(_BULLET_WORDINGS, r"[a-z, ]+", _solve_bullets)
)


def _word(rng: random.Random) -> str:
    """A common word, a pronounceable one or (rarely) any letters: 3 to 5 of them."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(_WORDS)
    length = rng.randint(3, 5)
    if kind < 0.85:
        start = rng.randint(0, 1)
        return "".join(rng.choice((_CONSONANTS, _VOWELS)[(start + i) % 2]) for i in range(length))
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(length))


def distinct_words(rng: random.Random, num_words: int) -> list[str]:
    """Words for a question, each once."""
    words: dict[str, None] = {}
    while len(words) < num_words:
        words[_word(rng)] = None
    return list(words)


def _num_items(rng: random.Random, size: Size, few: tuple[int, int], many: tuple[int, int]) -> int:
    return 1 if size == "one" else rng.randint(*(few if size == "few" else many))


def _sum_question(rng: random.Random, size: Size) -> str:
    n = _num_items(rng, size, (2, 6), (9, 12))
    pairs = [(rng.randint(0, LARGEST_ADDEND), rng.randint(0, LARGEST_ADDEND)) for _ in range(n)]
    if n == 1 and rng.random() < 0.3:
        wording = rng.choice(_WORD_ADDENDS)
        joint = " and " if wording.startswith("Add") else " plus "
        return wording.format(joint.join(str(number) for number in pairs[0]))
    return rng.choice(_SUM_WORDINGS[n > 1]).format(", ".join(f"{a}+{b}" for a, b in pairs))


def _words_question(
    rng: random.Random, size: Size, wordings: tuple[tuple[str, ...], tuple[str, ...]]
) -> str:
    n = _num_items(rng, size, (2, 4), (7, 9))
    return rng.choice(wordings[n > 1]).format(", ".join(distinct_words(rng, n)))


def _count_question(rng: random.Random, size: Size) -> str:
    """Numbers up to 20 in a row, or words counted off; always words where there are many."""
    if size == "many" or rng.random() < 0.4:
        n = {"one": rng.randint(1, 2), "few": rng.randint(3, 6), "many": rng.randint(10, 12)}[size]
        return rng.choice(_TALLY_WORDINGS).format(", ".join(distinct_words(rng, n)))
    n = rng.randint(2, 5) if size == "one" else rng.randint(6, 16)
    first = rng.randint(1, LARGEST_COUNT - n + 1)
    return rng.choice(_COUNT_WORDINGS).format(f"{first} to {first + n - 1}")


def _json_question(rng: random.Random, size: Size) -> str:
    if size == "many" or (size == "few" and rng.random() < 0.5):
        people = distinct_words(rng, 2 if size == "few" else rng.randint(3, 4))
        items = ", ".join(f"{name} {rng.randint(1, 99)}" for name in people)
        return rng.choice(_RECORDS_WORDINGS).format(items)
    return _record_question(rng, size, _RECORD_WORDINGS)


def _record_question(rng: random.Random, size: Size, wordings: tuple[str, ...]) -> str:
    fields = [f"name {_word(rng)}", f"age {rng.randint(1, 99)}", f"city {rng.choice(_CITIES)}"]
    chosen = rng.sample(fields, 1 if size == "one" else rng.randint(2, 3))
    return rng.choice(wordings).format(", ".join(chosen))


def _list_question(rng: random.Random, size: Size) -> str:
    n = {"one": rng.randint(2, 3), "few": rng.randint(3, 6), "many": rng.randint(10, 12)}[size]
    wordings = _NUMBERED_WORDINGS if rng.random() < 0.7 else _BULLET_WORDINGS
    return rng.choice(wordings).format(", ".join(distinct_words(rng, n)))


_QUESTIONS: dict[str, Callable[[random.Random, Size], str]] = {
    "sums": _sum_question,
    "reverse": lambda rng, size: _words_question(rng, size, _REVERSE_WORDINGS),
    "upper": lambda rng, size: _words_question(rng, size, _UPPER_WORDINGS),
    "json": _json_question,
    "count": _count_question,
    "list": _list_question,
    JSON_FAMILY: lambda rng, size: _record_question(rng, size, _ASKED_RECORD_WORDINGS),
}

# What of an answer's text follows from the rest of it.
_FILLABLE = {
    "sums": r"(?<=\d=)\d+",
    # The pair before it tells what is done to a word.
    "reverse": r"(?<=, )[a-z]+: (?P<missing>[a-z]+)",
    "upper": r"(?<=, )[a-z]+: (?P<missing>[A-Z]+)",
    "count": r"(?<=, )\d+(?=, )|(?<= )\d+(?=, [a-z])",
    "list": r"(?<=\n)\d+(?=\. )",
}
# Of the text after what is missing; it fits one canvas together with any answer.
_MOST_SUFFIX_CHARS = 20


def _filler(rng: random.Random) -> str:
    """Two to four short sentences that have nothing to do with the question."""
    parts = (_SUBJECTS, _VERBS, _PLACES)
    sentences = (" ".join(rng.choice(part) for part in parts) for _ in range(rng.randint(2, 4)))
    return "".join(f"{s[0].upper()}{s[1:]}. " for s in sentences)


def draw_question(rng: random.Random, family: str, size: Size, *, held_out: bool) -> Example:
    """A question of a checked family, from one side of the split, without context."""
    while True:
        question = _QUESTIONS[family](rng, size)
        example = Example(family, question, answer_question(question))
        if example.is_held_out == held_out:
            return example


def draw_fill(rng: random.Random, *, held_out: bool) -> Example:
    """A text from which a word or a number is missing, from one side of the split.

    The text is the answer to several items of a family whose items tell each other what they are.
    """
    while True:
        family = rng.choice(list(_FILLABLE))
        text = answer_question(_QUESTIONS[family](rng, "few"))
        holes = list(re.finditer(_FILLABLE[family], text))
        if not holes:
            continue
        hole = rng.choice(holes)
        # Of a pattern without a group of its own all of it.
        start, end = hole.span(hole.lastindex or 0)
        rest = text[end:][: rng.randint(4, _MOST_SUFFIX_CHARS)] or "\n"
        example = Example(FILL_FAMILY, text[:start], text[start:end], suffix=rest)
        if example.is_held_out == held_out:
            return example


def _weather_parameter(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The parameter that takes the city, and a tool's schema around it."""
    name = rng.choice(("city", "location"))
    city = {"type": "string"}
    if rng.random() < 0.5:
        city["description"] = rng.choice(_CITY_DESCRIPTIONS)
    schema: dict[str, Any] = {"type": "object", "properties": {name: city}}
    if rng.random() < 0.2:
        schema["properties"]["unit"] = {"type": "string", "enum": list(_UNITS)}
    if rng.random() < 0.8:
        schema["required"] = [name]
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    return name, schema


def _tool(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def _weather_tools(rng: random.Random, name: str, schema: dict[str, Any]) -> list[dict[str, Any]]:
    """The tool for the weather, sometimes beside another one."""
    # Of a description that was never seen, nothing depends either.
    description = rng.choice(_TOOL_DESCRIPTIONS) if rng.random() < 0.9 else _filler(rng)[:40]
    tools = [_tool(name, description, schema)]
    if rng.random() < 0.15:
        other, about, parameter = rng.choice(_OTHER_TOOLS)
        properties = {parameter: {"type": "string"}}
        tools.append(_tool(other, about, {"type": "object", "properties": properties}))
        rng.shuffle(tools)
    return tools


def _weather_report(rng: random.Random) -> tuple[str, str]:
    """What a tool may answer, as text or JSON, and the same in the words of the answer."""
    degrees, sky = rng.randint(-9, 39), rng.choice(_SKIES)
    kind = rng.random()
    if kind < 0.4:
        return (report := f"{degrees} degrees, {sky}"), report
    if kind < 0.6:
        return (report := f"{sky}, {degrees} C"), report
    keys = rng.choice((("temperature", "condition"), ("temp", "sky")))
    values = dict(zip(keys, (degrees, sky), strict=True))
    return json.dumps(values), ", ".join(f"{key} {value}" for key, value in values.items())


def draw_weather(rng: random.Random, *, held_out: bool, with_result: bool = False) -> Example:
    """A question about a city's weather beside a declared tool, from one side of the split.

    Args:
        rng: The stream's generator.
        held_out: The side of the split.
        with_result: The call has been made and answered; what is left is to say the result.
    """
    while True:
        known = rng.random() < 0.5
        city = rng.choice(_WEATHER_CITIES) if known else _word(rng).capitalize()
        question = rng.choice(_WEATHER_WORDINGS).format(city)
        name = rng.choice(_TOOL_NAMES)
        parameter, schema = _weather_parameter(rng)
        arguments = {parameter: city}
        if "unit" in schema["properties"] and rng.random() < 0.5:
            arguments["unit"] = rng.choice(_UNITS)
            question = f"{question[:-1]} in {arguments['unit'].capitalize()}{question[-1]}"
        values = ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in arguments.items())
        call = f"<|tool_call>call:{name}{{{values}}}<tool_call|>"
        tools = tuple(_weather_tools(rng, name, schema))
        example = Example(TOOL_FAMILY, question, call, tools=tools)
        if example.is_held_out == held_out:
            break
    if not with_result:
        return example
    content, said = _weather_report(rng)
    function = {"name": name, "arguments": arguments}
    result = {"role": "tool", "content": content}
    if rng.random() < 0.5:
        result["name"] = name
    after = ({"role": "assistant", "content": None, "tool_calls": [{"function": function}]}, result)
    return replace(example, answer=f"Weather in {city}: {said}.", after=after)


def _draw_chat(rng: random.Random) -> Example:
    """A greeting, thanks or a question about the model, in the casings and end marks people
    type.
    """
    text = rng.choice(list(_CHATS))
    casing = rng.choices((str.capitalize, str.lower, str.title, str.upper), (45, 40, 8, 7))[0]
    is_asked = text.startswith(("who", "what"))
    mark = rng.choices(_END_MARKS, (30, 2, 2, 66) if is_asked else (50, 30, 15, 5))[0]
    return Example("chat", casing(text) + mark, _CHATS[text])


def _draw_tool_example(rng: random.Random) -> Example:
    """Mostly a call; also what follows it, and the two cases in which there is nothing to call."""
    kind = rng.random()
    if kind < 0.7:
        return draw_weather(rng, held_out=False)
    if kind < 0.8:
        return draw_weather(rng, held_out=False, with_result=True)
    example = draw_weather(rng, held_out=False)
    if kind < 0.84:
        return replace(example, tools=(), answer=_NO_TOOL)
    other = draw_question(rng, rng.choice(FAMILIES), "one", held_out=False)
    if rng.random() < 0.4:
        other = _draw_chat(rng)
    return replace(other, tools=example.tools)


def add_context(rng: random.Random, example: Example, context: Context) -> Example:
    """Put filler sentences or earlier turns (never held-out ones) before the question."""
    if context == "plain":
        return example
    while True:
        if context == "filler":
            longer = replace(example, filler=_filler(rng))
        else:
            earlier = [
                draw_question(rng, rng.choice(FAMILIES), rng.choice(("one", "few")), held_out=False)
                for _ in range(rng.randint(1, 2))
            ]
            turns = tuple((turn.question, turn.answer) for turn in earlier)
            longer = replace(example, turns=turns)
        if sum(len(message["content"] or "") for message in longer.messages) >= _MIN_CONTEXT_CHARS:
            return longer


def draw_training_example(
    rng: random.Random, weights: dict[str, float], *, short: bool = False
) -> Example:
    """An example of the training stream; never a held-out question.

    Args:
        rng: The stream's generator.
        weights: Family to relative frequency; may name the unchecked families.
        short: Draw few long answers and little context, for the first part of a curriculum.
    """
    family = rng.choices(list(weights), list(weights.values()))[0]
    if family == "prose":
        topic = rng.choice(list(_STORIES))
        wording = rng.choice(("Tell me about the {}.", "Tell a story: {}."))
        example = Example(family, wording.format(topic), _STORIES[topic])
    elif family == "chat":
        example = _draw_chat(rng)
    elif family == TOOL_FAMILY:
        example = _draw_tool_example(rng)
    elif family == FILL_FAMILY:
        return draw_fill(rng, held_out=False)
    else:
        size_weights = (50, 45, 5) if short else (25, 50, 25)
        size: Size = rng.choices(("one", "few", "many"), size_weights)[0]
        example = draw_question(rng, family, size, held_out=False)
    context_weights = (96, 2, 2) if short else (84, 8, 8)
    context: Context = rng.choices(("plain", "filler", "turns"), context_weights)[0]
    example = add_context(rng, example, context)
    if rng.random() < 0.06:
        example = replace(example, system=rng.choice(_SYSTEM_PROMPTS))
    # After a tool's result the template goes on in the turn, past the place of a thought.
    if rng.random() < 0.04 and not example.after:
        example = replace(example, thought=f"Task: {family}.")
    return example


def evaluation_set(
    family: str, num_prompts: int = 500, seed: int = 0, size: Size | None = None
) -> list[Example]:
    """Held-out prompts of a checked family, all different.

    Every fourth has an answer of ``many`` items (over three canvases or more), every fifth has
    filler or earlier turns before it (a context of more than three windows).

    Args:
        family: One of ``FAMILIES`` or ``LATER_FAMILIES``; of ``weather`` calls alone.
        num_prompts: How many; a smaller set is a prefix of a larger one.
        seed: Another seed gives another set from the same split.
        size: Questions of this size alone, and nothing before them.
    """
    rng = random.Random(f"{family}-{seed}")
    examples: list[Example] = []
    seen: set[tuple[Any, ...]] = set()
    while len(examples) < num_prompts:
        idx = len(examples)
        drawn: Size = size or ("many" if idx % 4 == 0 else rng.choice(("one", "few")))
        if family == TOOL_FAMILY:
            example = draw_weather(rng, held_out=True)
        elif family == FILL_FAMILY:
            example = draw_fill(rng, held_out=True)
        else:
            example = draw_question(rng, family, drawn, held_out=True)
        if size is None and idx % 5 == 0 and not example.suffix:
            example = add_context(rng, example, rng.choice(("filler", "turns")))
        key = (example.question, example.filler, example.turns, example.suffix)
        if key not in seen:
            seen.add(key)
            examples.append(example)
    return examples
