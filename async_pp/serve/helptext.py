"""`--help`, without importing vLLM.

    --help            the groups, one line each, and the flags of our own group
    --help=all        every flag
    --help=GROUP      one group (ModelConfig, Frontend, async-pp, ...)
    --help=WORD       every flag whose name contains the word

Text is wrapped to the terminal. Names and defaults come from the catalogue, explanations from vLLM's source.
"""

import argparse
import re
import shutil
import textwrap
from collections.abc import Sequence

from async_pp.serve import catalogue as facts
from async_pp.serve.catalogue import Catalogue, Flag, Group, Words
from async_pp.serve.flags import CHANGED_DEFAULTS, GROUP, GROUP_TEXT, PROG, add_group

_INDENT = 26
_UNNAMED = {"positional arguments": "The model.", "options": "Flags outside the groups below."}
_ABOUT = (
    "Serve a language model behind an OpenAI-compatible HTTP API, on an asyncio pipeline of ranks. "
    "MODEL is a folder or the name of a model on the Hugging Face hub; without it the embedded default model "
    "(SmolLM2-135M-Instruct) is served. Every flag of `vllm serve` is accepted. Unlike there, the server listens "
    "on 127.0.0.1 unless --host says otherwise."
)
_MORE = "--help=GROUP shows a group, --help=WORD the flags with that word in their name, --help=all everything."
_JSON_TIP = (
    "A flag that takes JSON also takes its keys one by one: --flag.key value, --flag.outer.inner value; "
    "list elements with +: --flag.key+ a,b."
)


def asked_for(argv: Sequence[str]) -> str | None:
    """What help was asked for: "" for plain help, a search word, or None when none was."""
    for word in argv:
        if word in ("-h", "--help"):
            return ""
        if word.startswith("--help="):
            return word.partition("=")[2]
    return None


def text(topic: str, *, catalogue: Catalogue | None = None, width: int | None = None) -> str:
    """The help text about a topic ("" for the overview), wrapped to `width` columns (default: the terminal's).

    Raises:
        UnsupportedVersion: no vLLM is installed.
    """
    catalogue = facts.load() if catalogue is None else catalogue
    width = max(shutil.get_terminal_size().columns if width is None else width, 60)
    groups = (*catalogue.groups, _own_group())
    words = Words()
    topic = topic.lower().replace("_", "-")
    if not topic:
        return _overview(groups, words, width)
    chosen = [group for group in groups if topic in ("all", group.title.lower())]
    if not chosen:
        found = [(g.title, f) for g in groups for f in g.flags if any(topic in option.lower() for option in f.options)]
        titles = dict.fromkeys(title for title, _ in found)
        chosen = [Group(title, tuple(flag for of, flag in found if of == title)) for title in titles]
    if not chosen:
        return f"No group and no flag matches {topic!r}. --help lists the groups, --help=all every flag.\n"
    parts = [_section(group, words, width) for group in chosen]
    return "\n".join([*([_usage(width)] if topic == "all" else []), *parts, textwrap.fill(_JSON_TIP, width), ""])


def _usage(width: int) -> str:
    return f"usage: {PROG} [MODEL] [flags]\n\n{textwrap.fill(_ABOUT, width)}\n"


def _overview(groups: Sequence[Group], words: Words, width: int) -> str:
    lines = [_usage(width), "Groups of flags:"]
    for group in groups[:-1]:
        lines += _entry(group.title, words.group(group.title) or _UNNAMED.get(group.title, ""), width)
    lines += ["", _section(groups[-1], words, width)]
    lines.append(textwrap.fill(_MORE, width))
    return "\n".join(lines) + "\n"


def _section(group: Group, words: Words, width: int) -> str:
    about = GROUP_TEXT if group.title == GROUP else words.group(group.title)
    lines = [f"{group.title}:", *textwrap.wrap(about, width - 2, initial_indent="  ", subsequent_indent="  ")]
    for flag in sorted(group.flags, key=lambda flag: flag.options):
        own = _OWN_WORDS.get(flag.dest) if group.title == GROUP else None
        lines += _entry(_name(flag), _explain(flag, own or words.flag(group.title, flag)), width)
    return "\n".join(lines) + "\n"


def _name(flag: Flag) -> str:
    if not flag.options:
        return flag.dest.upper()
    value = ""
    if flag.kind in ("store", "append"):
        value = flag.metavar or ("{" + ",".join(flag.choices) + "}" if flag.choices else flag.dest.upper())
        value = f" {value} ..." if flag.nargs in ("+", "*") else f" {value}"
    return ", ".join(flag.options) + value


def _explain(flag: Flag, text: str) -> str:
    default = CHANGED_DEFAULTS.get(flag.dest, flag.default)
    return f"{text} (default: {default})" if default is not None and flag.kind != "switch" else text


def _entry(name: str, text: str, width: int) -> list[str]:
    head = textwrap.wrap(name, width - 2, initial_indent="  ", subsequent_indent="      ", break_long_words=True)
    body: list[str] = []
    for paragraph in _paragraphs(text):
        body += textwrap.wrap(paragraph, width - _INDENT)
    if len(head) == 1 and len(head[0]) < _INDENT - 1 and body:
        head[0] = head[0].ljust(_INDENT) + body.pop(0)
    return head + [" " * _INDENT + line for line in body]


def _paragraphs(text: str) -> list[str]:
    """Lines that belong together joined; lists and blank lines kept apart."""
    joined = re.sub(r"(?<!\n)\n(?!\n)(?!\s*([-*+]|\d+\.)\s)\s*", " ", text)
    return [" ".join(line.split()) for line in joined.splitlines() if line.strip()]


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add_group(parser)
    return parser


def _own_group() -> Group:
    return Catalogue.from_parser(_own_parser(), "").groups[0]


_OWN_WORDS = {action.dest: action.help or "" for action in _own_parser()._actions}  # noqa: SLF001
