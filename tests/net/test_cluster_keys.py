"""Keys: made for their owner alone, refused when others can read them, required beyond loopback."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from pdserve.errors import ConfigError
from pdserve.net.cluster_keys import (
    KeyFile,
    cluster_key_file,
    default_key_path,
    make_key_file,
    read_hash_secret,
    read_keys,
)

ONE, TWO = "11" * 32, "22" * 32


def key_file(path, text: str = ONE, mode: int = 0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


# ---------------------------------------------------------------------- the user's own key


def test_a_key_is_made_at_first_use_and_then_kept(tmp_path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    first = cluster_key_file(None, ["127.0.0.1:7000", "[::1]:0"], environ)
    path = default_key_path(environ)
    assert first.path == path
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    (key,) = first.keys()
    assert len(key) == 32
    assert cluster_key_file(None, [], environ).keys() == (key,)
    assert [entry.name for entry in path.parent.iterdir()] == ["cluster.key"]


def test_the_default_is_below_home_without_xdg() -> None:
    assert str(default_key_path({"HOME": "/home/u"})) == "/home/u/.config/pdserve/cluster.key"


def test_two_users_have_different_keys(tmp_path) -> None:
    for name in "ab":
        make_key_file(tmp_path / name)
    assert read_keys(tmp_path / "a") != read_keys(tmp_path / "b")


def test_processes_that_start_together_agree_on_one_key(tmp_path) -> None:
    path = tmp_path / "deep" / "cluster.key"
    start = threading.Barrier(8)
    seen = []

    def begin() -> None:
        start.wait()
        make_key_file(path)
        seen.append(read_keys(path))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len(set(seen)) == 1
    assert os.listdir(path.parent) == ["cluster.key"]


def test_a_home_that_cannot_be_written_is_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="no cluster key can be made at"):
        make_key_file(tmp_path / "file" / "cluster.key")


# ---------------------------------------------------------------------- who needs one given


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "10.1.2.3:7000", "[::]:7000", "node-7:7000"])
def test_beyond_loopback_a_key_must_be_given(tmp_path, address) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match="--cluster-key-file"):
        cluster_key_file(None, ["127.0.0.1:7000", address], environ)
    assert not default_key_path(environ).exists()
    given = key_file(tmp_path / "given")
    assert cluster_key_file(given, [address], environ).keys() == (bytes.fromhex(ONE),)


# ---------------------------------------------------------------------- what a file may be


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o602, 0o601])
def test_a_file_that_others_can_get_at_is_refused_with_the_remedy(tmp_path, mode) -> None:
    path = key_file(tmp_path / "open", mode=mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600 {path}"):
        read_keys(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_of_the_owner_alone_is_read(tmp_path, mode) -> None:
    assert read_keys(key_file(tmp_path / "mine", mode=mode)) == (bytes.fromhex(ONE),)


def test_what_is_no_file_of_ours_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_keys(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"cannot be read|not a regular file"):
        read_keys(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path) -> None:
    path = key_file(tmp_path / "theirs")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_keys(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one key or two"),
        ("# only a comment\n\n", "one key or two"),
        (f"{ONE}\n{TWO}\n{ONE}", "one key or two"),
        ("zz" * 32, "not hexadecimal"),
        ("ü" * 64, "not hexadecimal"),
        ("11" * 31, "31 bytes"),
        (f"{ONE}\nab", "key 2"),
        (f"{ONE}\n" + "#" * 5000, "one key or two"),
    ],
)
def test_a_malformed_file_says_what_is_wrong_and_shows_no_key(tmp_path, text, words) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_keys(key_file(tmp_path / "bad", text))
    assert "11" * 8 not in caught.value.message


# ---------------------------------------------------------------------- rotation


def test_a_key_is_replaced_without_a_restart(tmp_path) -> None:
    path = key_file(tmp_path / "key", f"{ONE}  # since spring\n")
    file, heard = KeyFile(path), []
    file.on_change(lambda: heard.append(file.keys()))
    assert not file.reload()
    key_file(path, f"{ONE}\n{TWO}\n")
    assert file.reload()
    assert heard == [file.keys()]
    assert file.keys() == (bytes.fromhex(ONE), bytes.fromhex(TWO))
    key_file(path, "nonsense")
    with pytest.raises(ConfigError):
        file.reload()
    assert file.keys() == (bytes.fromhex(ONE), bytes.fromhex(TWO)), "the old keys stay in force"


# ---------------------------------------------------------------------- the hash secret's file


def test_a_hash_secret_is_one_line_of_a_file_of_the_same_form(tmp_path) -> None:
    assert read_hash_secret(key_file(tmp_path / "s", f"# ours\n{ONE}\n")) == b"\x11" * 32
    assert read_hash_secret(key_file(tmp_path / "s", "33" * 64)) == b"\x33" * 64


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        (f"{ONE}\n{TWO}\n", 0o600, "one line of 64 to 128"),
        ("33" * 65, 0o600, "one line of 64 to 128"),
        ("33" * 31, 0o600, "31 bytes, not 32"),
        ("", 0o600, "must hold"),
        (ONE, 0o644, "chmod 600"),
    ],
)
def test_another_file_is_no_hash_secret(tmp_path, text: str, mode: int, words: str) -> None:
    path = key_file(tmp_path / "s", text, mode)
    with pytest.raises(ConfigError, match=words) as refused:
        read_hash_secret(path)
    assert "cluster key" not in refused.value.message


def test_a_hash_secret_that_is_missing_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"the hash secret file .* cannot be read"):
        read_hash_secret(tmp_path / "nothing")
