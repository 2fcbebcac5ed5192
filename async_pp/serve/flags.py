"""The command line: every flag of `vllm serve`, plus the group "async-pp".

It is parsed twice. *Lightly*, from the catalogue, within milliseconds and without vLLM: enough to refuse what is
plainly wrong and to learn model, address and sizes. Then *really*, by vLLM's own parser, whose word is final. Both
raise `ConfigError` with one line instead of leaving the process, so the caller decides on exit codes.
"""

import argparse
import difflib
import json
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NoReturn, get_args

from async_pp.core.policy import PolicyName
from async_pp.core.recovery import ON_LOSS, Intensity
from async_pp.errors import ConfigError
from async_pp.serve.catalogue import Catalogue, Flag

PROG = "python -m async_pp.serve"
GROUP = "async-pp"
GROUP_TEXT = "What this server adds to vllm serve, and where its defaults differ."

CHANGED_DEFAULTS: dict[str, str | None] = {
    "model": None,  # the embedded default model, see async_pp.models
    "host": "127.0.0.1",  # vLLM binds all interfaces; here that has to be asked for
    "uvicorn_log_level": "warning",
}
"""Flags of vLLM's whose default differs here."""

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)

DRAIN_S = 30.0
RESTARTS = "3-in-300"

_RESTARTS = re.compile(r"(\d+)-in-(\d+(?:\.\d+)?)")
_TYPES = {"int": int, "float": float}
_VALUE_OF_DOTTED = "{}"


def add_group(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this server to a parser, light or real."""
    group = parser.add_argument_group(title=GROUP, description=GROUP_TEXT)
    group.add_argument(
        "--verbose",
        action="store_true",
        default=False,
        help="Show the informational logs of vLLM and uvicorn too. Errors are always shown.",
    )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default="balanced",
        help="Which requests share a step, with more than one stage: balanced keeps all stages busy, fill-first is "
        "vLLM's behaviour.",
    )
    group.add_argument(
        "--no-uvloop",
        dest="uvloop",
        action="store_false",
        default=True,
        help="Run on asyncio's stock event loop instead of uvloop.",
    )
    group.add_argument(
        "--drain-timeout",
        type=_seconds,
        metavar="SECONDS",
        default=DRAIN_S,
        help="After SIGTERM or SIGINT open requests may go on for so long; what is left then ends with an error. "
        "--shutdown-timeout, vLLM's flag, says the same.",
    )
    group.add_argument(
        "--on-rank-loss",
        choices=ON_LOSS,
        default="replay",
        help="When a rank dies, hangs or raises: replay starts the ranks anew and lets every request go on from the "
        "tokens it has, fail starts them anew and ends the open requests with an error, exit ends the server with exit "
        "code 3.",
    )
    group.add_argument(
        "--max-restarts",
        type=restarts,
        metavar="N-in-SECONDS",
        default=RESTARTS,
        help="So many restarts of the ranks are tried within so many seconds; the next loss ends the server with exit "
        "code 3.",
    )
    group.add_argument(
        "--step-deadline",
        type=_some_seconds,
        metavar="SECONDS",
        default=None,
        help="A rank that has not ended a step so long after it could begin it counts as lost. Without the flag the "
        "deadline follows the measured times of steps: 10 times their 99th percentile, 5 s at least, 60 s at most.",
    )


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return value


def _some_seconds(text: str) -> float:
    if not (value := _seconds(text)):
        raise ArgumentTypeError("must be greater than 0 seconds")
    return value


def restarts(text: str) -> Intensity:
    """The limit that "N-in-SECONDS" means.

    Raises:
        ArgumentTypeError: it is not of that form, or the time is zero.
    """
    found = _RESTARTS.fullmatch(text)
    if found is None or not float(found[2]):
        raise ArgumentTypeError(f"must be like {RESTARTS}: a number of restarts and a number of seconds, not {text!r}")
    return Intensity(int(found[1]), float(found[2]))


def drain_s(given: Mapping[str, Any]) -> float:
    """Seconds to drain for, by what was given: our flag or vLLM's, else our default.

    Raises:
        ConfigError: both were given and differ.
    """
    values = {float(given[name]) for name in ("drain_timeout", "shutdown_timeout") if name in given}
    if len(values) > 1:
        raise ConfigError("--drain-timeout and --shutdown-timeout are the same here: give one of them")
    return values.pop() if values else DRAIN_S


class _LightParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def light_parser(catalogue: Catalogue) -> argparse.ArgumentParser:
    """A parser with vLLM's names, arity and plain types; namespaces hold only what was given."""
    parser = _LightParser(prog=PROG, add_help=False, argument_default=argparse.SUPPRESS)
    for flag in catalogue.flags():
        add_flag(parser, flag)
    add_group(parser)
    for action in parser._actions:  # noqa: SLF001 - also of our group: "given" must mean given
        action.default = argparse.SUPPRESS
    return parser


def add_flag(target: argparse._ActionsContainer, flag: Flag, **more: Any) -> None:
    """Add one catalogue flag to a parser or group."""
    if flag.kind == "switch":
        target.add_argument(*flag.options, dest=flag.dest, action="store_true", **more)
        return
    if flag.kind == "pair":
        positive = [option for option in flag.options if not option.startswith("--no-")] or list(flag.options)
        target.add_argument(*positive, dest=flag.dest, action=argparse.BooleanOptionalAction, **more)
        return
    convert = _TYPES.get(flag.type)
    choices = [convert(choice) if convert else choice for choice in flag.choices] if flag.type != "other" else None
    settings: dict[str, Any] = {"nargs": flag.nargs, "type": convert, "choices": choices or None, **more}
    if flag.metavar is not None:
        settings["metavar"] = flag.metavar
    if flag.kind == "append":
        settings.pop("nargs")
        settings["action"] = "append"
    if flag.options:
        settings["dest"] = flag.dest
    target.add_argument(*(flag.options or (flag.dest,)), **settings)


def light_parse(argv: Sequence[str], catalogue: Catalogue) -> dict[str, Any]:
    """What the command line and its config file say, by destination; JSON and other converted values as raw text.

    Raises:
        ConfigError: an unknown flag, a missing value, a wrong number, an unreadable config file.
    """
    parser = light_parser(catalogue)
    given, unknown = parser.parse_known_args(list(normalise(argv)))
    if unknown and not entry_points(group="vllm.platform_plugins"):  # such a plugin may bring flags of its own
        raise ConfigError(_unknown(unknown[0], parser))
    return vars(given)


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: give one model, everything else is a flag (see --help)"
    name = word.partition("=")[0]
    close = difflib.get_close_matches(name, list(parser._option_string_actions), n=1)  # noqa: SLF001
    return f"unknown flag {name}" + (f": did you mean {close[0]}?" if close else " (see --help=all)")


def normalise(argv: Sequence[str]) -> Iterator[str]:
    """Spell the words as a plain parser wants them, in the ways vLLM's parser allows.

    `--a_b` is `--a-b`; `-O3` is `--optimization-level 3`; `--x.key value` is a part of the JSON flag `--x`, of which
    only the name is kept; `--config FILE` is replaced by what the file says.
    """
    words = iter(_with_config_file(list(argv)))
    for word in words:
        name, equals, value = word.partition("=")
        dotted = "." in name and len(name) > 1 and name[0] == "-" and not name[1].isdigit() and name[1] != "."
        head = name.partition(".")[0] if dotted else name
        if head.startswith("--"):
            head = "--" + head[2:].replace("_", "-")
        if dotted:
            if not equals:
                next(words, None)
            yield from (head, _VALUE_OF_DOTTED)
        elif name.startswith("-O"):
            yield "--optimization-level"
            if level := (value if equals else name[2:]):
                yield level
        elif word.startswith("--"):
            yield head + equals + value
        else:
            yield word


def _with_config_file(argv: list[str]) -> list[str]:
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    if at + 1 == len(argv):
        raise ConfigError("--config needs the path of a YAML file")
    words = _read_config_file(Path(argv[at + 1]))
    rest = argv[:at] + argv[at + 2 :]
    first = 0 if not rest or rest[0].startswith("-") else 1  # the model stays first; later words win over the file's
    return rest[:first] + words + rest[first:]


def _read_config_file(path: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]

    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--config wants a file that ends in .yaml or .yml, not {path}")
    try:
        data = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path} must hold `flag: value` lines")
    words: list[str] = []
    for key, value in data.items():
        match value:
            case True:
                words.append(f"--{key}")
            case False:
                words.append(f"--no-{key}")
            case list():
                words += [f"--{key}", *map(str, value)] if value else []
            case dict():
                words += [f"--{key}", json.dumps(value)]
            case _:
                words += [f"--{key}", str(value)]
    return words


def parse(argv: Sequence[str]) -> Namespace:
    """Parse with vLLM's own parser, and make vLLM's own checks of the result. Imports vLLM.

    `model` is the model given in any way, or None. vLLM's logging is configured from the flags.

    Raises:
        ConfigError: anything is wrong with the flags, in one line.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.launchers.launcher import validate_api_server_args
    from vllm.exceptions import VLLMError
    from vllm.logger import configure_logging_from_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(" ".join(message.split()))  # a validator's spans several lines

    parser = make_arg_parser(Parser(prog=PROG))
    add_group(parser)
    parser.set_defaults(**CHANGED_DEFAULTS)
    try:
        args: Namespace = parser.parse_args(list(argv))
        args.model = args.model_tag or args.model
        if args.verbose and "--uvicorn-log-level" not in " ".join(argv).replace("_", "-"):
            args.uvicorn_log_level = "info"
        configure_logging_from_args(args)
        validate_parsed_serve_args(args)
        if args.tool_parser_plugin:
            ToolParserManager.import_tool_parser(args.tool_parser_plugin)
        if args.reasoning_parser_plugin:
            ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
        validate_api_server_args(args)
    except (ValueError, TypeError, KeyError, OSError, AssertionError, RuntimeError, VLLMError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
        raise ConfigError(" ".join(str(text).split()).removeprefix("Error: ")) from error
    return args
