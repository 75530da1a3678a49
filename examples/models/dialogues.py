"""Chats generated from the sections: questions in many wordings, with the documentation as the answer.

This is the second stage of training the demo models. It converts `Section`s into `Subject`s (possible questions with
their answers) and then into dialogues (lists of messages). It is pure: the same seed gives the same dialogues. It does
not depend on tokens.
"""

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from corpus import Block, Section

ANSWER_MAX_CHARS = 480


class Message(TypedDict):
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A subject of questions: its names, its answer, and the continuation when the user asks for more."""

    names: tuple[str, ...]
    kind: Literal["thing", "callable"]
    answer: str
    more: str | None


SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows the Python language.",
    "You answer questions about Python.",
    "You are a Python expert. Answer briefly.",
)

# `{name}` is replaced by one of the names of a subject.
THING_QUESTIONS = (
    "What is {name}?",
    "What is {name} in Python?",
    "What are {name}?",
    "Explain {name}.",
    "Explain {name} in Python.",
    "Please explain {name}.",
    "Can you explain {name}?",
    "Tell me about {name}.",
    "Tell me about Python's {name}.",
    "How does {name} work?",
    "How do {name} work?",
    "How do I use {name}?",
    "Describe {name}.",
    "What can you tell me about {name}?",
    "I want to learn about {name}.",
    "{name}",
)
CALLABLE_QUESTIONS = (
    "What does {name} do?",
    "What does {name} do in Python?",
    "What is {name}?",
    "Explain {name}.",
    "Tell me about {name}.",
    "How does {name} work?",
    "How do I use {name}?",
    "When is {name} called?",
    "{name}",
)
# Wordings for evaluation, which are not used in training.
HELD_OUT_QUESTIONS = (
    "Could you describe {name} to me?",
    "Give me a short explanation of {name}, please.",
    "I have a question. What is {name} about?",
)
MORE_QUESTIONS = ("Tell me more.", "Go on.", "Can you say more about that?", "What else should I know?", "And then?")

# Common names that differ from the headings of the documentation: title -> names.
COMMON_NAMES = {
    "List displays": ("a list comprehension", "list comprehensions", "a list display"),
    "Dictionary displays": ("a dict comprehension", "a dictionary comprehension", "a dict display"),
    "Dictionaries": ("a dictionary", "a dict", "dicts"),
    "Lists": ("a list", "the list type"),
    "Tuples": ("a tuple", "the tuple type"),
    "Ranges": ("a range", "the range type"),
    "Lambdas": ("a lambda", "a lambda expression", "an anonymous function"),
    "With Statement Context Managers": ("a context manager", "context managers"),
    "Generator functions": ("a generator", "generators", "a generator function"),
    "Coroutine function definition": ("a coroutine", "coroutines", "async def"),
    "Function definitions": ("a function", "functions", "def", "a decorator", "decorators"),
    "Class definitions": ("a class definition", "the class statement"),
    "Classes": ("a class",),
    "Class instances": ("an instance", "a class instance", "an object's attribute"),
    "Modules": ("a module",),
    "Exceptions": ("an exception", "exception handling"),
    'The "if" statement': ("if", "an if statement", "elif", "else"),
    'The "for" statement': ("for", "a for loop", "for loops", "a loop"),
    'The "while" statement': ("while", "a while loop", "while loops"),
    'The "with" statement': ("with", "a with statement", "with blocks"),
    'The "try" statement': ("try", "try and except", "a try block"),
    'The "match" statement': ("match", "pattern matching", "structural pattern matching"),
    'The "import" statement': ("import", "imports", "importing"),
    'The "return" statement': ("return",),
    'The "yield" statement': ("yield",),
    'The "raise" statement': ("raise", "raising an exception"),
    'The "assert" statement': ("assert", "an assertion", "assertions"),
    'The "pass" statement': ("pass",),
    'The "break" statement': ("break",),
    'The "continue" statement': ("continue",),
    'The "del" statement': ("del",),
    'The "global" statement': ("global",),
    'The "nonlocal" statement': ("nonlocal",),
    "String and Bytes literals": ("a string literal", "a string", "strings", "bytes"),
    "Format String Syntax": ("string formatting", "format strings", "str.format"),
    "Format Specification Mini-Language": ("a format specification", "the format mini-language"),
    "Assignment statements": ("assignment", "an assignment"),
    "Annotated assignment statements": ("a type annotation", "variable annotations"),
    "Objects, values and types": ("an object", "objects", "garbage collection", "identity"),
    "Slicings": ("a slice", "slicing"),
    "Calls": ("a call", "a function call", "keyword arguments"),
    "Operator precedence": ("precedence", "the order of operators"),
    "Metaclasses": ("a metaclass",),
    "Implementing Descriptors": ("a descriptor", "descriptors"),
    "__slots__": ("slots", "slots in a class"),
    "Keywords": ("a keyword", "the keywords of Python"),
    "Identifiers (Names)": ("an identifier", "a name"),
    "Resolution of names": ("a scope", "scopes", "name resolution"),
    "Truth Value Testing": ("truth", "truthiness", "a true value"),
    "Boolean operations": ("and", "or", "not", "a boolean"),
    "Integer literals": ("an integer", "integers"),
    "Floating point literals": ("a float", "floats", "floating point numbers"),
    '"pdb" — The Python Debugger': ("pdb", "the debugger", "debugging"),
}

# Typical first messages of users, which the documentation does not answer.
SMALL_TALK = (
    (("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning"), "Hello! Ask me something about Python."),
    (
        ("Who are you?", "What are you?", "What is your name?", "What can you do?", "Help", "Help me"),
        "I am quire's demo model, a very small one. I have read Python's built-in documentation and nothing else. "
        'Try: "Explain the with statement."',
    ),
    (("Thanks", "Thank you!", "Thanks a lot.", "Great, thanks"), "You are welcome. Ask me more about Python."),
    (("Bye", "Goodbye!", "See you"), "Goodbye!"),
    (
        ("What is Python?", "Tell me about Python.", "Explain Python."),
        "Python is a programming language. Its programs are made of statements and expressions, and all data in a "
        "Python program is represented by objects or by relations between objects.",
    ),
)


def build_subjects(sections: Sequence[Section]) -> list[Subject]:
    """Return every section, documented callable and defined term that has an answer in prose."""
    subjects = [Subject(names=names, kind="thing", answer=answer, more=None) for names, answer in SMALL_TALK]
    for section in sections:
        subjects += _section_subject(section)
    for section in sections:
        subjects += _callable_subjects(section.blocks)
    for section in sections:
        subjects += _term_subjects(section.blocks)
    return _with_names_claimed_once(subjects)


def _with_names_claimed_once(subjects: Iterable[Subject]) -> list[Subject]:
    """Keep each name only for its first subject. Two answers to one question would train the model to guess."""
    claimed: set[str] = set()
    kept = []
    for subject in subjects:
        names = tuple(name for name in subject.names if name not in claimed)
        claimed.update(names)
        if names:
            kept.append(replace(subject, names=names))
    return kept


def is_small_talk(subject: Subject) -> bool:
    return any(subject.answer == answer for _, answer in SMALL_TALK)


def question(subject: Subject, rng: random.Random) -> str:
    name = rng.choice(subject.names)
    if is_small_talk(subject):
        return name
    wording = rng.choice(THING_QUESTIONS if subject.kind == "thing" else CALLABLE_QUESTIONS)
    asked = wording.format(name=name)
    return asked[0].upper() + asked[1:] if rng.random() < 0.8 else asked.lower().rstrip("?.")


def dialogue(subject: Subject, others: Sequence[Subject], rng: random.Random) -> list[Message]:
    """Return a chat of one or two turns, sometimes with a system prompt.

    The second turn continues or changes the subject.
    """
    messages: list[Message] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    messages += _turn(question(subject, rng), subject.answer)
    chance = rng.random()
    if subject.more is not None and chance < 0.3:
        messages += _turn(rng.choice(MORE_QUESTIONS), subject.more)
    elif chance > 0.8:
        other = rng.choice(others)
        messages += _turn(question(other, rng), other.answer)
    return messages


def held_out_questions(subjects: Sequence[Subject], count: int, rng: random.Random) -> list[str]:
    """Return questions in unseen wordings about trained subjects."""
    chosen = rng.sample([subject for subject in subjects if not is_small_talk(subject)], count)
    return [
        HELD_OUT_QUESTIONS[number % len(HELD_OUT_QUESTIONS)].format(name=rng.choice(subject.names))
        for number, subject in enumerate(chosen)
    ]


def _turn(asked: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _section_subject(section: Section) -> list[Subject]:
    answer, rest = take_answer(section.blocks)
    if answer is None:
        return []
    more, _ = take_answer(rest)
    names = (*COMMON_NAMES.get(section.title, ()), *_spoken_titles(section.title))
    return [Subject(names=names, kind="thing", answer=answer, more=more)]


def _spoken_titles(title: str) -> tuple[str, ...]:
    """Return the heading as used in a question: without quotes, and with capitals only in names."""
    words = title.replace('"', "").replace("*", "").split()
    lowered = " ".join(word.lower() if word.istitle() else word for word in words)
    return (lowered,) if len(words) > 1 else tuple(dict.fromkeys((words[0], lowered)))


def _callable_subjects(blocks: Sequence[Block]) -> list[Subject]:
    """Return subjects such as `str.split(sep=None)` with the indented text below them."""
    subjects = []
    for number, block in enumerate(blocks):
        if block.kind != "entry":
            continue
        body = []
        for following in blocks[number + 1 :]:
            if following.indent <= block.indent:
                break
            body.append(following)
        answer, rest = take_answer(body)
        if answer is not None:
            names = dict.fromkeys(_callable_name(line) for line in block.text.splitlines())
            spelled = tuple(f"{name}{end}" for name in names for end in ("()", ""))
            subjects.append(Subject(names=spelled, kind="callable", answer=answer, more=take_answer(rest)[0]))
    return subjects


def _callable_name(signature: str) -> str:
    bare = re.sub(r"^(class|exception|async) ", "", signature)
    return bare.split("(", 1)[0].removeprefix("object.")


_LEFT_OUT = re.compile(r"::=|^(New|Changed|Deprecated since|Removed) (in )?version ")
_DEFINITION = re.compile(r"^(?:An?|The) \*([a-z][a-z -]{2,30})\*")


def _term_subjects(blocks: Sequence[Block]) -> list[Subject]:
    """Return the terms that a paragraph defines by starting with "A *term* …"."""
    subjects = []
    for number, block in enumerate(blocks):
        defined = _DEFINITION.match(block.text) if block.kind == "prose" else None
        answer, rest = take_answer(blocks[number:]) if defined else (None, ())
        if defined and answer is not None:
            term = defined[1]
            article = "an" if term[0] in "aeiou" else "a"
            names = (term, f"{article} {term}", f"{term}s")
            subjects.append(Subject(names=names, kind="thing", answer=answer, more=take_answer(rest)[0]))
    return subjects


def take_answer(blocks: Sequence[Block]) -> tuple[str | None, Sequence[Block]]:
    """Return an answer of at most `ANSWER_MAX_CHARS` from the first paragraphs, and the remaining blocks.

    An answer starts with prose. Grammar rules and version notes are omitted. A paragraph that ends with a colon
    includes the block that it announces; otherwise the colon becomes a full stop.
    """
    start = next((number for number, block in enumerate(blocks) if block.kind == "prose"), None)
    if start is None:
        return None, ()
    taken: list[str] = []
    position = start
    while position < len(blocks) and blocks[position].kind != "entry":
        text = blocks[position].text
        if _LEFT_OUT.search(text):
            if taken:
                taken[-1] = _full_stop(taken[-1])
        elif taken and len("\n\n".join([*taken, text])) > ANSWER_MAX_CHARS:
            break
        else:
            taken.append(text)
        position += 1
    while len(taken) > 1 and taken[-1].endswith(":"):
        taken.pop()
        position -= 1
    answer = _full_stop(_cut_at_sentence("\n\n".join(taken), ANSWER_MAX_CHARS)) if taken else None
    return answer, blocks[position:]


def _full_stop(text: str) -> str:
    return text[:-1].rstrip() + "." if text.endswith(":") else text


def _cut_at_sentence(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    ends = [match.end() for match in re.finditer(r"[.!?](?= [A-Z\"*])", text) if match.end() <= limit]
    if ends:
        return text[: ends[-1]]
    first = re.search(r"[.!?](?=\s|$)", text)
    return text[: first.end()] if first else text
