"""What logs that a config sets up put out: a line for each record, and no codes."""

from __future__ import annotations

import logging
import logging.config
from pathlib import Path
from typing import Any

import pytest

from runner.cli.arguments import read_arguments
from runner.cli.preflight import check
from runner.composing import compose_raw
from runner.errors import SecurityError
from runner.security.intent.formats import ENCODINGS
from runner.security.intent.logs import check_logging
from runner.security.intent.said import Said
from runner.security.intent.written import check_job

HONEST = [
    {},
    {"format": None, "datefmt": None},
    {"format": "%(asctime)s\t%(levelname)-8s\t%(message)s"},
    {"format": "[%(asctime)s] %(message)s\n"},  # a folded block of YAML's
    {"format": "%(asctime)s.%(msecs)03d %(levelname)8.8s 100 %% %(lineno)d %(created).3f"},
    {"format": "→ %(name)s[%(process)d]: %(message)s", "datefmt": "%Y-%m-%dT%H:%M:%S%z"},
    {"format": "%(asctime)s %(message)s", "datefmt": "%-d. %b %Y,\t%I:%M %p (%a, %j) %% %s"},
    {"format": "%(asctime)s %(message)s", "datefmt": "%c %x %X %D %F %R %T %r %Z"},
    {"style": "$", "format": "$asctime ${levelname} $$ $message"},
    {"()": "logging.Formatter", "format": "%(message)s %(rank)d", "defaults": {"rank": 3}},
]
HOSTILE: list[tuple[dict[str, object], str]] = [
    ({"format": "%(levelno)c%(message)s"}, "'%(levelno)c' is refused"),
    ({"format": "%(message)s %(lineno)03c"}, "'%(lineno)03c' is refused"),
    ({"format": "%(message)r"}, "'%(message)r' is refused"),
    ({"format": "%(message)999999999s"}, "%(message)999999999s"),
    ({"format": "%(message)s %s"}, "'%s' is refused"),
    ({"format": "%(message)s %5%(levelno)c"}, "'%5%' is refused"),
    ({"format": "%(message)s %"}, "write fields as %(message)s"),
    ({"format": "%(x)c %(message)s", "defaults": {"x": 10}}, "'%(x)c' is refused"),
    ({"format": "%(x)s %(message)s", "defaults": {"x": "\n"}}, "begin another line"),
    ({"fmt": "%(levelno)c", "()": "logging.Formatter"}, "'%(levelno)c' is refused"),
    ({"style": "$", "format": "${message:c} $message"}, "refused"),
    ({"style": "$", "format": "$message $"}, "write fields as $message"),
    ({"style": "$", "format": ["$message"]}, "it is no text"),
    *(
        ({"style": style, "format": format}, "there are % and $")
        for style, format in (("{", "{levelno:c}{msg!r}"), ("?", "%(message)s"), (None, None))
    ),
    ({"datefmt": "%H:%M:%S done%n21:00:00 error: FORGED LINE%n"}, "'%n' is refused"),
    ({"datefmt": "%H%t%S"}, "'%t' is refused"),
    ({"datefmt": "%H %9n"}, "'%9n' is refused"),
    ({"datefmt": "%H %-n"}, "'%-n' is refused"),
    ({"datefmt": "%H %999999999d"}, "refused"),
    ({"datefmt": "%H %En"}, "'%En' is refused"),
    ({"datefmt": "%H%"}, "write dates as"),
    ({"datefmt": "%H:%M\n"}, r"it holds '\n', which would begin another line"),
    ({"format": "%(message)s\n\n"}, "`>-`"),
    ({"format": "a\nb %(message)s\n"}, "`>-`"),
    ({"format": "%(message)s\x1b[2J"}, r"it holds '\x1b', which"),
    ({"format": "%(message)s \u202e"}, r"it holds '\u202e', which"),
]


def formatter(settings: dict[str, Any]) -> dict[str, Any]:
    return {"version": 1, "formatters": {"own": settings}}


@pytest.mark.parametrize("settings", HONEST, ids=lambda one: str(one.get("format")))
def test_an_honest_format_passes_and_makes_one_line(settings: dict[str, Any]) -> None:
    check_logging(formatter(settings), "hydra.job_logging")
    ready = logging.config.DictConfigurator(formatter(settings))
    made: Any = ready.configure_formatter(ready.config["formatters"]["own"])
    for level in logging._nameToLevel.values():
        record = logging.LogRecord("runner", level, "a.py", 10, "said", (), None)
        line = made.format(record).removesuffix("\n")
        assert line.replace("\t", "").isprintable()


@pytest.mark.parametrize(("settings", "says"), HOSTILE, ids=lambda one: str(one))
def test_a_format_that_could_become_a_code_or_a_line_is_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SecurityError) as refused:
        check_logging(formatter(settings), "hydra.job_logging")
    said = str(refused.value)
    assert said.startswith("hydra.job_logging.formatters.own.") and says in said
    assert said.isprintable()


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("rich.logging.RichHandler", {"log_time_format": "[%X]%n"}, "'%n' is refused"),
        ("logging.FileHandler", {"encoding": "utf-16-le"}, "write utf-8"),
        ("logging.FileHandler", {"encoding": "iso2022_jp"}, "write utf-8"),
    ],
)
def test_a_handler_that_would_put_out_codes_is_refused(
    name: str, settings: dict[str, str], says: str
) -> None:
    handlers = {"own": {"class": name, **settings}}
    with pytest.raises(SecurityError, match=says):
        check_logging({"version": 1, "handlers": handlers}, "hydra.job_logging")
    plain = {"encoding": "UTF-8"} if "encoding" in settings else {"log_time_format": "[%X]"}
    handlers["own"].update(plain)
    check_logging({"version": 1, "handlers": handlers}, "hydra.job_logging")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_in_what_logs_are_written_in_no_letter_becomes_a_code(encoding: str) -> None:
    letters = "".join(filter(str.isprintable, map(chr, range(0x20000))))
    assert min(letters.encode(encoding, "ignore")) >= 0x20


@pytest.mark.parametrize("where", ["file", "job"])
def test_a_format_is_looked_at_as_each_job_of_a_sweep_has_it(where: str) -> None:
    """The folder of a run is called otherwise than that of a job."""
    format = "+hydra.job_logging.formatters.simple.datefmt='${hydra.runtime.output_dir}'"
    typed = [format, "hydra.sweep.subdir=%n21", "hydra.run.dir=outputs/x"]
    says = "'%n' is refused"
    if where == "file":
        with pytest.raises(SecurityError, match=says):
            check(read_arguments(["hydra/job_logging=default", "-m", "seed=0,1", *typed]))
        return
    config = compose_raw([*typed, "hydra/job_logging=default"], hydra_too=True)
    config.hydra.runtime.output_dir = str(Path("outputs/%n21").absolute())
    with pytest.raises(SecurityError, match=says):
        check_job(config, Said())
