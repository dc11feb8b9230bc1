import json
import os
import re
import subprocess
import sys

import pytest

from pdserve import __version__
from pdserve.cli.flag_hints import COMMANDS as FOREIGN
from pdserve.cli.flag_hints import FLAGS
from pdserve.cli.main import COMMANDS, main
from pdserve.cli.serve import read_flags
from pdserve.launch import exit_codes
from pdserve.launch.config.options import GROUPS, OPTIONS


@pytest.fixture
def clean_environment(monkeypatch, tmp_path):
    """No configuration of whoever runs the tests."""
    for option in OPTIONS:
        monkeypatch.delenv(option.variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(tmp_path)


def test_version_is_printed(capsys):
    assert main(["version"]) == exit_codes.OK
    assert main(["--version"]) == exit_codes.OK
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"pdserve {__version__} ") for line in lines)
    assert len(lines) == 2


def test_help_has_every_group_flag_default_variable_and_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for group, title in GROUPS.items():
        assert f"{group}: {title}" in text
    for option in OPTIONS:
        assert option.flag in text
        assert option.variable in text
    for command in COMMANDS:
        assert f" {command} " in text
    assert "[127.0.0.1; PDSERVE_HOST]" in text


def test_help_of_a_group_is_the_whole_help(capsys):
    for words in (["--help=all"], ["tier", "--help=all"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0
    assert "--host-kv SIZE" in capsys.readouterr().out


@pytest.mark.usefixtures("clean_environment")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--prot", "1"], "--prot is unknown, did you mean --port?"),
        (["--kv-memry=1GiB"], "--kv-memry is unknown, did you mean --kv-memory?"),
        (["--join", "x"], "--join: 'x' is not of the form HOST:PORT"),
        (["--frontends", "0"], "--frontends: 0 is out of range"),
        (["--disagg=maybe"], "--disagg: 'maybe' is unknown: use one of rule, predict, always"),
        (["--role", "planer"], "--role: 'planer' is unknown: use one of all-in-one"),
        (["--role", "rooter"], "--role: 'rooter' is unknown: use one of all-in-one"),
        (["--port"], "--port: expected one argument"),
        (["--port", "x"], "--port: 'x' is not a whole number"),
        (["--port", "1", "stray"], "unexpected argument 'stray'"),
        (["chatt"], "unknown sub-command 'chatt', did you mean 'chat'?"),
        (["xyzzy"], "unknown sub-command 'xyzzy' (try pdserve --help)"),
        (["llama3"], "unknown sub-command 'llama3' (try"),
        (["run", "llama3"], "unknown sub-command 'run', did you mean 'serve'?"),
        (["help"], "did you mean '--help'?"),
        (["Qwen/Qwen3-0.6B"], "did you mean `pdserve serve Qwen/Qwen3-0.6B`?"),
        (["m.gguf"], "did you mean `pdserve serve m.gguf`?"),
        (["serve", "a", "b"], "unexpected argument 'b': a model is named by `pdserve serve b`"),
        (["serve", "a", "--model", "b"], "the model is given twice, as 'a' and as --model b"),
        (["serve", "--modl", "b"], "--modl is unknown, did you mean --model?"),
        (["-v"], "-v is unknown: use --version"),
        (
            ["--tensor-parallel-size", "2"],
            "--tensor-parallel-size is unknown: use --tp N with engine torch",
        ),
        (["serve", "x", "--quantization=awq"], "--engine-option quantization=NAME"),
        (["--api-server-count=2"], "--api-server-count is unknown: use --frontends"),
        (["bench", "serve"], "unexpected argument 'serve' (try pdserve bench --help)"),
        (["drain"], "name the nodes to drain as `pdserve status` shows them or"),
        (["drain", "--port", "0"], "--port: '0' is no port such as 8000"),
        (["top", "--port", "1", "--join", "h:1"], "give one of them"),
        (["drain", ""], "a name of a node is empty: give names as `pdserve status` shows them"),
        (["drain", "w,"], "a name of a node is empty"),
        (["drain", "w", "--wiat"], "--wiat is unknown, did you mean --wait?"),
        (["config", "--jsn"], "--jsn is unknown, did you mean --json?"),
        (["chat", "--temperature", "hot"], "--temperature: invalid float value"),
        (["--engine-option", "novalue"], "--engine-option: 'novalue' is not of the form"),
    ],
)
def test_a_mistake_is_one_line_and_exit_status_2(capsys, arguments, says):
    assert main(arguments) == exit_codes.USAGE
    printed = capsys.readouterr()
    assert says in printed.err
    assert printed.err.startswith("pdserve: ")
    assert printed.err.count("\n") == 1
    assert not printed.out


@pytest.mark.usefixtures("clean_environment")
def test_config_prints_values_and_where_they_come_from(capsys, monkeypatch, tmp_path):
    (tmp_path / "pdserve.toml").write_text('kv-memory = "64MiB"\n')
    monkeypatch.setenv("PDSERVE_HOST", "0.0.0.0")
    options = [
        "--port",
        "9000",
        "--no-prefix-cache",
        "--engine-option",
        "a=b",
        "--engine-option=c=d",
    ]
    assert main(["config", *options, "--json"]) == exit_codes.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": "9000", "source": "--port"}
    assert shown["host"] == {"value": "0.0.0.0", "source": "PDSERVE_HOST"}
    assert shown["kv-memory"]["value"] == "64MiB"
    assert shown["kv-memory"]["source"].endswith("pdserve.toml: kv-memory")
    assert shown["prefix-cache"]["value"] == "false"
    assert shown["engine-option"]["value"] == "a=b,c=d"
    assert shown["dtype"] == {"value": "auto", "source": "default"}
    assert main(["config"]) == exit_codes.OK
    assert "host" in capsys.readouterr().out


def test_every_command_has_a_help_of_its_own(capsys):
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "usage: pdserve" in capsys.readouterr().out


def test_help_imports_nothing_heavy():
    """What makes it quick: no HTTP, no tokenizer, no torch."""
    code = (
        "import sys\n"
        "from pdserve.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'aiohttp', 'asyncio', 'torch', 'numpy', 'tokenizers', 'jinja2', 'msgspec',\n"
        "         'huggingface_hub', 'prometheus_client', 'uvloop'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "HEAVY []", done.stderr


def test_a_reader_that_goes_away_is_no_failure():
    command = f"{sys.executable} -m pdserve --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert done.stderr == ""


def test_an_output_without_our_characters_is_no_failure():
    command = [sys.executable, "-m", "pdserve", "status", "--help"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=environ, capture_output=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"HOST:PORT[,?]" in done.stdout


def test_an_error_cannot_steer_the_terminal(capsys):
    assert main(["status", "--port", "\x1b[2J8\u202e"]) == exit_codes.USAGE
    assert main(["\x1b]0;x\x07"]) == exit_codes.USAGE
    assert not {"\x1b", "\x07", "\u202e"} & set(capsys.readouterr().err)


def test_top_needs_an_output():
    closed = f"{sys.executable} -m pdserve top >&-"
    done = subprocess.run(["sh", "-c", closed], capture_output=True, text=True, timeout=30)
    assert done.returncode == exit_codes.USAGE
    assert done.stderr.startswith("pdserve: standard output is closed")


def test_serve_takes_a_model_as_an_argument():
    assert read_flags(["serve", "org/name", "--port", "1"]) == {"model": "org/name", "port": "1"}
    assert read_flags(["serve", "--port", "1", "org/name"]) == {"model": "org/name", "port": "1"}
    assert read_flags(["serve", "--model", "x"]) == {"model": "x"}
    assert read_flags(["serve"]) == read_flags([]) == {}


def test_remedies_for_foreign_flags_name_flags_of_ours():
    """And no flag of ours is taken for a foreign one."""
    ours = {option.flag for option in OPTIONS}
    assert not ours & FLAGS.keys()
    for remedy in FLAGS.values():
        for flag in re.findall(r"--[a-z-]+", remedy):
            assert flag in {*ours, "--version", "--no-prefix-cache"}
    assert {*FOREIGN.values()} <= {*COMMANDS, "--help"}
