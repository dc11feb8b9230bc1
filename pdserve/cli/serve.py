"""Runs `pdserve` without a sub-command: parses the flags, then calls `launch`."""

from __future__ import annotations

from pdserve import __version__
from pdserve.cli.main import COMMANDS
from pdserve.cli.parser import Parser, add_options, given_flags
from pdserve.errors import ConfigError
from pdserve.launch.config.resolve import resolve

_DESCRIPTION = f"""\
pdserve {__version__}: serve a large language model over the OpenAI API.

  pdserve                                   the bundled model on http://127.0.0.1:8000
  pdserve serve MODEL --port 9000           another model on another port; or --model MODEL
  pdserve --role=router                     a cluster: then --role=worker and --role=frontend,
                                            each with --join 127.0.0.1:7700

sub-commands (pdserve COMMAND --help tells more):
"""
_EPILOG = """\
SIZE is 512MiB, 4GiB or bytes; TIME is 500ms, 30s, 5min or seconds. In brackets: the default and
the environment variable. Every option is also a key of the configuration file; a flag wins over
a variable, a variable over the file.
"""


def make_parser() -> Parser:
    """The parser of the serving command."""
    listed = [f"  {name:<12}{text}" for name, (_, text) in COMMANDS.items()]
    parser = Parser("pdserve", _DESCRIPTION + "\n".join(listed), _EPILOG)
    parser.own.add_argument("-V", "--version", action="store_true", help="Print the version.")
    add_options(parser)
    return parser


def read_flags(arguments: list[str]) -> dict[str, str]:
    """Returns option names and texts. `serve` itself may come first, and accepts a model as an
    argument.

    Errors: `ConfigError`.
    """
    parser = make_parser()
    if arguments[:1] != ["serve"]:
        return given_flags(parser.parse(arguments))
    parser.own.add_argument("MODEL", nargs="?", help="The model, as by --model.")
    parsed = parser.parse(arguments[1:])
    flags = given_flags(parsed)
    if parsed.MODEL is None:
        return flags
    if "model" in flags:
        raise ConfigError(
            f"the model is given twice, as {parsed.MODEL!r} and as --model {flags['model']}"
        )
    return flags | {"model": parsed.MODEL}


def run(arguments: list[str]) -> int:
    """Serves until it is stopped."""
    config = resolve(read_flags(arguments))
    from pdserve.launch.process import serve

    return serve(config)
