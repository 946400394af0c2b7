"""The cluster's secret: one for all, for its owner alone, and readable nowhere but in its file."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.core.errors import UserError
from phalanx.runtime.secret import load_keys, load_secret, write_token


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cluster" / "secret"


def test_it_is_made_on_first_use_and_stays(path):
    first = load_secret(path)
    assert load_secret(path) == first and len(first.key) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert os.listdir(path.parent) == ["secret"]


def test_no_mask_makes_it_wider(path):
    before = os.umask(0)
    try:
        load_secret(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_many_who_come_first_have_the_same(path):
    path.parent.mkdir()
    with ThreadPoolExecutor(16) as pool:
        assert len({secret.key for secret in pool.map(lambda _: load_secret(path), range(64))}) == 1
    assert os.listdir(path.parent) == ["secret"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o601, 0o777])
def test_a_file_that_others_can_reach_is_refused(path, mode):
    load_secret(path)
    path.chmod(mode)
    with pytest.raises(UserError, match=rf"secret has mode {mode:o}: others.*\n.*remedy: chmod 600 .*secret"):
        load_secret(path)


def test_a_file_of_somebody_else_is_refused(path, monkeypatch):
    load_secret(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(UserError, match=rf"belongs to user {path.stat().st_uid}, and this is"):
        load_secret(path)


def test_a_link_is_not_followed_and_a_pipe_not_waited_for(path, tmp_path):
    load_secret(tmp_path / "other")
    path.parent.mkdir()
    path.symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="symbolic links"):
        load_secret(path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UserError, match="is not a file"):
        load_secret(path)


@pytest.mark.parametrize("text", [b"", b"abcd\n", b"zz" * 32, b"\xff" * 64, b"ab" * 600])
def test_a_damaged_one_is_not_shown(path, text):
    load_secret(path).path.write_bytes(text)
    with pytest.raises(UserError, match="is damaged") as told:
        load_secret(path)
    assert "zz" not in str(told.value) and "abab" not in str(told.value)


def test_one_that_must_be_there_is_not_made(path):
    with pytest.raises(UserError, match=r"cannot be read: .*No such file.*\n.*remedy: copy it"):
        load_secret(path, create=False)
    assert not path.exists()


def test_it_does_not_show_itself(path):
    secret = load_secret(path)
    for text in (repr(secret), str(secret), f"{secret}"):
        assert secret.key.hex() not in text and repr(secret.key) not in text and str(path) in text
    code = "import sys; from phalanx.runtime.secret import load_secret; print(load_secret(sys.argv[1]), end='')"
    child = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert child.stdout == repr(secret)


def test_a_nodes_token_is_guarded_as_the_secret_is(path):
    secret = load_secret(path)
    token = write_token(path.with_name("token"), secret, "agent", "node-1")
    assert stat.S_IMODE(token.stat().st_mode) == 0o600 and secret.key.hex() not in token.read_text()
    keys = load_keys(token)
    assert keys.key == secret.token_of("agent", "node-1") and keys.key.hex() not in repr(keys)
    token.chmod(0o644)
    with pytest.raises(UserError, match="has mode 644: others"):
        load_keys(token)
