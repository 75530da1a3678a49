"""The harmony format of gpt-oss: messages with a channel and a recipient, between tags of one token each."""

import re

from quire_engine.text.answers.reader import Reader, Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
_ENDS = (END, CALL, RETURN, START)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.\-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


def harmony(reader: Reader) -> Steps:
    """Read messages: analysis is reasoning, one to a function is a call, everything else is content."""
    reader.content_ends_at_calls = False
    first = True
    while True:
        head, tag = yield from reader.take_until((MESSAGE, *_ENDS))
        if tag != MESSAGE:
            # Between messages there is white space at most; an answer without tags is content.
            if CHANNEL not in head and (first or head.strip()):
                reader.content(head)
            if not tag:
                return
            first = False
            continue
        first = False
        channel = _CHANNEL.search(head)
        recipient = _RECIPIENT.search(head)
        if recipient is not None and recipient[1] != "assistant":
            reader.start_call(recipient[1])
            tag = yield from reader.until(_ENDS, reader.arguments)
        elif channel is not None and channel[1] == "analysis":
            tag = yield from reader.until(_ENDS, reader.reasoning)
        else:
            tag = yield from reader.until(_ENDS, reader.content)
        if not tag:
            return
