"""run.hosts: where nodes are, and what is said of a file that cannot be used."""

from __future__ import annotations

import json

import pytest

from phalanx.core.errors import UserError
from phalanx.runtime.cluster import places_of

NODE = {"host": "10.0.0.2", "interface": "eth0", "prefix": ["nsenter", "--net=/x"]}


def test_nodes_listen_where_the_file_says_and_on_loopback_without_one(tmp_path):
    host, (only,) = places_of("")
    assert (host, only.host, only.environment) == ("127.0.0.1", "127.0.0.1", {})
    path = tmp_path / "hosts.json"
    path.write_text(json.dumps({"host": "10.0.0.1", "nodes": [NODE]}))
    host, (node,) = places_of(str(path))
    assert (host, node.host, node.prefix) == ("10.0.0.1", "10.0.0.2", ("nsenter", "--net=/x"))
    assert node.environment["GLOO_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"host": "a"}', '{"host": "a", "nodes": []}', '{"host": "a", "nodes": [{}]}']
)
def test_a_file_that_cannot_be_used_is_named_with_the_remedy(tmp_path, text):
    path = tmp_path / "hosts.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"run\.hosts = .*hosts\.json") as raised:
        places_of(str(path))
    assert '"nodes"' in raised.value.remedy
    with pytest.raises(UserError, match=r"run\.hosts"):
        places_of(str(tmp_path / "nowhere.json"))
