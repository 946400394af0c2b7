"""The rules that keep strangers off: what they contain, and that nft accepts them."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from phalanx.core.errors import UserError
from phalanx.runtime.firewall import rules


def test_members_come_in_on_the_named_interfaces_and_others_do_not():
    said = rules(["10.0.0.2", "10.1.0.0/24", "fd00::1"], ["eth1"], [22, 443])
    assert 'iifname { "eth1" } ip saddr { 10.0.0.2/32, 10.1.0.0/24 } accept' in said
    assert 'iifname { "eth1" } ip6 saddr { fd00::1/128 } accept' in said
    assert 'iifname { "eth1" } tcp dport { 22, 443 } accept' in said
    assert said.index("accept\n    iif") < said.index('iifname { "eth1" } meta l4proto { tcp, udp } drop')
    assert "iifname" not in rules(["10.0.0.2"]) and "dport" not in rules(["10.0.0.2"], keep=())


def test_what_is_no_address_is_named():
    with pytest.raises(UserError, match=r"member = 'node-1'.*\n  remedy: name addresses"):
        rules(["node-1"])
    with pytest.raises(UserError, match="nobody could speak"):
        rules([])


@pytest.mark.skipif(bool(os.geteuid()) or not shutil.which("nft"), reason="needs root and nft")
def test_nft_takes_them_also_twice():
    text = rules(["10.0.0.2", "fd00::/8"], ["eth0", "eth1"])
    done = subprocess.run(["unshare", "--net", "nft", "-f", "-"], input=text * 2, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
