"""The two configurations that docs/vllm.md gives to paste are taken as they are, and fit each other."""

import json
import re
from pathlib import Path

import pytest

from bridge.handoff import create_identity
from bridge.vllm.config import ConnectorConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "vllm.md").read_text()


@pytest.fixture
def pasted(tmp_path):
    """By kv_role, with the folder of the certificates replaced."""
    for name in ("prefill-0", "decode-0"):
        create_identity(name, tmp_path)
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", PAGE.replace("/etc/kvbridge", str(tmp_path)), re.DOTALL)]
    assert len(blocks) == 2
    return {block["kv_role"]: (block, ConnectorConfig.parse(block["kv_connector_extra_config"])) for block in blocks}


def test_they_are_whole_and_fit_each_other(pasted):
    (_, prefiller), (given, decoder) = pasted["kv_producer"], pasted["kv_consumer"]
    prefiller.check_role(produces=True, consumes=False)
    decoder.check_role(produces=False, consumes=True)
    assert decoder.peers[prefiller.identity.name].port == prefiller.port
    assert set(prefiller.peers) == {decoder.identity.name}
    assert prefiller.agent == decoder.agent == "stream"
    assert prefiller.data_port
    assert given["kv_load_failure_policy"] == "recompute"
    for name in (str(prefiller.port), str(prefiller.data_port)):
        assert name in re.search(r"Open TCP .*", PAGE).group()


def test_the_table_names_every_key(pasted):
    from bridge.vllm.config import Entries

    table = PAGE[PAGE.index("## Keys of") : PAGE.index("## What the router does")]
    assert set(re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE)) <= {f"`{name}`" for name in Entries.__struct_fields__} | {
        "`certificate`, `private_key`"
    }
    for name in Entries.__struct_fields__:
        assert f"`{name}`" in table
