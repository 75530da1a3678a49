"""Dialogues with tools for `quire-demo-tools`: questions, calls, results of tools, answers and refusals.

This is the first stage of training that model. A dialogue has its own choice of tools under its own names, so that the
model has to read them. A random number generator goes in, and dialogues come out: nothing depends on tokens or models.
"""

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_TOOL = "I have no tool for that."
GREETING = "Hello! Ask me for something that my tools can do."
WELCOME = "You are welcome."
FAILED = "The tool failed: {0}."

CITIES = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Vienna", "Prague", "Warsaw", "Athens", "Dublin", "Lisbon"),
    *("Oslo", "Stockholm", "Helsinki", "Copenhagen", "Brussels", "Amsterdam", "Zurich", "Geneva", "Munich"),
    *("Hamburg", "Cologne", "Lyon", "Nice", "Porto", "Seville", "Naples", "Turin", "Krakow", "Budapest"),
    *("Bucharest", "Sofia", "Belgrade", "Zagreb", "Riga", "Vilnius", "Tallinn", "Kyiv", "Istanbul", "Ankara"),
    *("Cairo", "Tunis", "Lagos", "Nairobi", "Accra", "Dakar", "Kigali", "Tokyo", "Osaka", "Kyoto", "Seoul"),
    *("Beijing", "Shanghai", "Taipei", "Hanoi", "Bangkok", "Manila", "Jakarta", "Delhi", "Mumbai", "Chennai"),
    *("Karachi", "Dhaka", "Tehran", "Baghdad", "Dubai", "Doha", "Muscat", "Sydney", "Perth", "Brisbane"),
    *("Auckland", "Toronto", "Montreal", "Vancouver", "Chicago", "Boston", "Dallas", "Denver", "Seattle"),
    *("Houston", "Phoenix", "Miami", "Atlanta", "Lima", "Quito", "Caracas", "Santiago", "Montevideo", "Brasilia"),
    *("Recife", "Havana", "Dresden", "New York", "Los Angeles", "San Francisco", "Mexico City", "Cape Town"),
    *("Hong Kong", "Buenos Aires", "Tel Aviv"),
)
HELD_OUT_CITIES = (
    *("Bergen", "Leipzig", "Valencia", "Marseille", "Palermo", "Gdansk", "Ljubljana", "Malmo", "Basel", "Ghent"),
    *("Kampala", "Lusaka", "Nagoya", "Busan", "Colombo", "Hobart", "Ottawa", "Calgary", "Detroit", "Bogota"),
    *("San Diego", "Las Vegas", "Addis Ababa", "Kuala Lumpur", "Sapporo", "Utrecht", "Odessa", "Tampere", "Graz"),
)
_OPERATORS = {"plus": "+", "minus": "-", "times": "*", "divided by": "/", "+": "+", "-": "-", "*": "*", "/": "/"}
_SKIES = ("sunny", "cloudy", "rain", "snow", "fog", "windy", "clear", "light rain", "thunderstorm", "drizzle")
_ERRORS = ("city not found", "no connection", "timeout", "not available", "invalid input", "limit reached")
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Use the tools that you have.",
    "Answer in one sentence.",
    "You are an agent. Call tools where they are needed.",
)
_GREETINGS = ("Hello!", "Hi", "Hello", "Hi there!", "Good morning", "Hey", "Good evening!")
_THANKS = ("Thanks!", "Thank you.", "Thank you very much!", "Great, thanks.", "Thanks a lot")
_OTHER = (
    *("Write a poem about {0}.", "Book a flight to {1}.", "Tell me a joke.", "Who are you?", "Order a pizza."),
    *("Play some music.", "Send a message to {1}.", "Turn on the lights.", "Write code for {0}.", "Open the door."),
    *("Explain {0} to me.", "What do you think about {0}?", "Buy a ticket to {1}.", "Paint a picture of {0}."),
    *("Summarize this text: {0}", "Delete all files.", "Reserve a table in {1}.", "How do I get to {1}?"),
    *("Rent a car in {1}.", "Write a letter about {0}.", "Close the window."),
)
_FAILING = 0.06
"""Share of the calls that fail."""
_HELD_OUT = 2
"""Number of wordings, from the end of each list of questions, that training never shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The cities and words that questions are about."""

    words: Sequence[str]
    cities: Sequence[str] = CITIES
    invented: float = 0.0
    """Share of the cities whose name is put together from two, so that the model copies instead of recalling."""

    def phrase(self, rng: random.Random) -> str:
        """Return one to three words."""
        return " ".join(rng.choice(self.words) for _ in range(rng.randint(1, 3)))

    def city(self, rng: random.Random) -> str:
        """Return the name of a city."""
        name = rng.choice(self.cities)
        if rng.random() >= self.invented:
            return name
        other = rng.choice(self.cities)
        return name[: rng.randint(2, max(2, len(name) - 2))] + other[rng.randint(1, len(other) - 2) :].lower()


def is_held_out(subject: str, value: str) -> bool:
    """Return whether this value never occurs in training for this kind of tool. A tenth of them do not."""
    return zlib.crc32(f"{subject}/{value}".encode()) % 10 == 0


def _number(rng: random.Random) -> int:
    """Return a number of at most three digits, of each length equally often."""
    return rng.randrange(10 ** rng.randint(1, 3))


def _sum(rng: random.Random) -> tuple[str, str]:
    asked = expression = str(_number(rng))
    for _ in range(rng.choice((1, 1, 1, 2))):
        spelled, number = rng.choice(tuple(_OPERATORS)), _number(rng)
        asked, expression = f"{asked} {spelled} {number}", f"{expression} {_OPERATORS[spelled]} {number}"
    return asked, expression


def _sky(rng: random.Random) -> str:
    sky, degrees = rng.choice(_SKIES), rng.randint(-15, 40)
    return rng.choice((f"{sky}, {degrees} °C", f"{degrees} degrees and {sky}", sky))


def _amount(rng: random.Random) -> str:
    whole = str(rng.randint(0, 10 ** rng.randint(1, 5)))
    return rng.choice((whole, whole, f"{whole}.{rng.randint(0, 99)}", f"-{whole}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of tool with one string as its argument."""

    noun: str
    names: tuple[str, ...]
    parameters: tuple[str, ...]
    questions: tuple[str, ...]
    """Wordings with the place {0}; the last ones are kept for the evaluation."""
    value: Callable[[random.Random, Values], tuple[str, str]]
    """Returns the words of a question, and the argument of its call."""
    result: Callable[[random.Random, Values], str]
    answer: str
    """The final answer with the places of the argument and of the result."""
    joinable: bool = False
    """True where one question may be about two values."""


def _city(rng: random.Random, values: Values) -> tuple[str, str]:
    city = values.city(rng)
    return city, city


def _phrase(rng: random.Random, values: Values) -> tuple[str, str]:
    phrase = values.phrase(rng)
    return phrase, phrase


KINDS = (
    Kind(
        noun="weather",
        names=("get_weather", "weather", "current_weather", "get_current_weather", "weather_forecast"),
        parameters=("city", "location", "place"),
        questions=(
            *("How is the weather in {0}?", "What is the weather in {0}?", "What's the weather like in {0}?"),
            *("Weather in {0}?", "Tell me the weather in {0}.", "Is it raining in {0}?", "Will it rain in {0} today?"),
            *("How warm is it in {0}?", "What is the temperature in {0}?", "Do I need an umbrella in {0}?"),
            *("I travel to {0} today. How is the weather there?", "Please check the weather for {0}."),
            *("weather {0}", "Is it cold in {0} now?", "Can you tell me the weather for {0}?"),
            "What does the weather look like in {0} right now?",
        ),
        value=_city,
        result=lambda rng, _: _sky(rng),
        answer="The weather in {0}: {1}.",
        joinable=True,
    ),
    Kind(
        noun="time",
        names=("get_time", "current_time", "get_current_time", "local_time", "clock"),
        parameters=("city", "location", "place"),
        questions=(
            *("What time is it in {0}?", "What is the time in {0}?", "How late is it in {0}?"),
            *("Tell me the time in {0}.", "What is the local time in {0}?", "Current time in {0}?", "time in {0}"),
            *("Which time do they have in {0}?", "Please check what time it is in {0}."),
            *("What does the clock say in {0}?", "I want to call a friend in {0}. What time is it there?"),
            *("Can you tell me the time in {0}?", "Do you know the current time in {0}?"),
        ),
        value=_city,
        result=lambda rng, _: f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}",
        answer="The time in {0}: {1}.",
        joinable=True,
    ),
    Kind(
        noun="math",
        names=("calculate", "calculator", "compute", "evaluate", "calc"),
        parameters=("expression", "formula", "input"),
        questions=(
            *("What is {0}?", "Calculate {0}.", "How much is {0}?", "Compute {0}.", "{0}", "{0} = ?"),
            *("What does {0} give?", "Please work out {0}.", "I need the result of {0}.", "Evaluate {0}"),
            *("Can you calculate {0}?", "Tell me how much {0} is."),
        ),
        value=lambda rng, _: _sum(rng),
        result=lambda rng, _: _amount(rng),
        answer="{0} = {1}.",
    ),
    Kind(
        noun="search",
        names=("search", "web_search", "search_web", "lookup", "search_documents"),
        parameters=("query", "text", "keywords"),
        questions=(
            *("Search for {0}.", "Search the web for {0}.", "Find pages about {0}.", "Look up {0}."),
            *("Find information about {0}.", "Can you find something about {0}?", "search {0}", "Please look for {0}."),
            *("What can you find about {0}?", "I want to read about {0}."),
            *("Could you search for {0}?", "Find me articles about {0}."),
        ),
        value=_phrase,
        result=lambda rng, values: rng.choice((values.phrase(rng), f"{rng.randint(0, 99)} pages")),
        answer="I found: {1}.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool of one dialogue: a kind under one name."""

    kind: Kind
    name: str
    parameter: str

    def declaration(self) -> dict[str, Any]:
        """Return the tool as chat completions declare it."""
        schema = {
            "type": "object",
            "properties": {self.parameter: {"type": "string"}},
            "required": [self.parameter],
        }
        return {"type": "function", "function": {"name": self.name, "parameters": schema}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call, the tool's result, and the part of the final answer that reports it."""

    name: str
    arguments: Mapping[str, str]
    result: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A question and what follows: calls with results and a final answer, or the answer alone."""

    question: str
    calls: tuple[Call, ...] = ()
    answer: str

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages of the exchange."""
        question = {"role": "user", "content": self.question}
        answer = {"role": "assistant", "content": self.answer}
        if not self.calls:
            return [question, answer]
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
        ]
        results = [{"role": "tool", "content": call.result} for call in self.calls]
        return [question, {"role": "assistant", "content": "", "tool_calls": calls}, *results, answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDialogue:
    """A conversation with the tools that it declares."""

    tools: tuple[Tool, ...]
    system: str | None = None
    exchanges: tuple[Exchange, ...] = ()

    def messages(self) -> list[dict[str, Any]]:
        """Return all messages."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(message for exchange in self.exchanges for message in exchange.messages())]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The choices of a dialogue's parts, and how often each occurs."""

    values: Values
    held_out: bool | None = False
    """The part of the values: those of training, those kept out of it, or all of them."""
    invented_names: float = 0.1
    """Share of the tools whose name is a word and the kind's noun."""
    held_out_questions: bool = False
    refusals: float = 0.16
    """Share of the questions that no tool fits."""
    pairs: float = 0.3
    """Share of the questions about cities that are about two of them."""

    def tools(self, rng: random.Random, count: int) -> tuple[Tool, ...]:
        """Return tools of ``count`` different kinds in random order."""
        return tuple(self._tool(kind, rng) for kind in rng.sample(KINDS, count))

    def _tool(self, kind: Kind, rng: random.Random) -> Tool:
        name = rng.choice(kind.names)
        if rng.random() < self.invented_names:
            parts = [rng.choice(self.values.words), kind.noun]
            rng.shuffle(parts)
            name = "_".join(parts)
        return Tool(kind=kind, name=name, parameter=rng.choice(kind.parameters))

    def exchange(self, tools: Sequence[Tool], rng: random.Random) -> Exchange:
        """Return an exchange: mostly one call, sometimes two, a refusal, or small talk."""
        share = rng.random()
        if share < 0.06:
            return _small_talk(rng)
        if share < 0.06 + self.refusals or not tools:
            return self.refusal(tools, rng)
        tool = rng.choice(tools)
        return self.calls(tool, rng, self.count(tool, rng))

    def count(self, tool: Tool, rng: random.Random) -> int:
        """Return the number of values that a question for this tool has."""
        return 2 if tool.kind.joinable and rng.random() < self.pairs else 1

    def calls(self, tool: Tool, rng: random.Random, count: int) -> Exchange:
        """Return a question that needs ``count`` calls of one tool, with different arguments."""
        found: dict[str, str] = {}
        while len(found) < count:
            asked, argument = self._value(tool.kind, rng)
            found[argument] = asked
        question = self._wording(tool.kind, rng).format(" and ".join(found.values()))
        calls = tuple(self._call(tool, argument, rng) for argument in found)
        return Exchange(question=question, calls=calls, answer=" ".join(call.answer for call in calls))

    def _value(self, kind: Kind, rng: random.Random) -> tuple[str, str]:
        """Return the words that a question has for an argument, and the argument."""
        while True:
            asked, argument = kind.value(rng, self.values)
            if self.held_out in (None, is_held_out(kind.noun, argument)):
                return asked, argument

    def _call(self, tool: Tool, argument: str, rng: random.Random) -> Call:
        result = tool.kind.result(rng, self.values)
        answer = tool.kind.answer.format(argument, result)
        if rng.random() < _FAILING:
            error = rng.choice(_ERRORS)
            result, answer = f"Error: {error}", FAILED.format(error)
        return Call(name=tool.name, arguments={tool.parameter: argument}, result=result, answer=answer)

    def refusal(self, tools: Sequence[Tool], rng: random.Random) -> Exchange:
        """Return a question that no tool of the dialogue can answer."""
        if len(tools) < len(KINDS) and rng.random() < 0.6:
            return self.undeclared(tools, rng)
        return self.other(rng)

    def undeclared(self, tools: Sequence[Tool], rng: random.Random) -> Exchange:
        """Return a question for a kind of tool that the dialogue lacks."""
        kind = rng.choice([kind for kind in KINDS if kind not in [tool.kind for tool in tools]])
        question = self._wording(kind, rng).format(self._value(kind, rng)[0])
        return Exchange(question=question, answer=NO_TOOL)

    def other(self, rng: random.Random) -> Exchange:
        """Return a question that no kind of tool can answer."""
        wordings = _OTHER[-_HELD_OUT:] if self.held_out_questions else _OTHER[:-_HELD_OUT]
        question = rng.choice(wordings).format(self.values.phrase(rng), self.values.city(rng))
        return Exchange(question=question, answer=NO_TOOL)

    def _wording(self, kind: Kind, rng: random.Random) -> str:
        return rng.choice(kind.questions[-_HELD_OUT:] if self.held_out_questions else kind.questions[:-_HELD_OUT])

    def dialogue(self, rng: random.Random, exchanges: int) -> ToolDialogue:
        """Return a conversation with so many exchanges, and with no tools in one of twenty."""
        tools = () if rng.random() < 0.05 else self.tools(rng, rng.choice((1, 2, 3, 3, 4, 4)))
        return ToolDialogue(
            tools=tools,
            system=rng.choice((None, rng.choice(_SYSTEM))),
            exchanges=tuple(self.exchange(tools, rng) for _ in range(exchanges)),
        )


def _small_talk(rng: random.Random) -> Exchange:
    if rng.random() < 0.5:
        return Exchange(question=rng.choice(_GREETINGS), answer=GREETING)
    return Exchange(question=rng.choice(_THANKS), answer=WELCOME)
