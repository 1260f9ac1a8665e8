"""Settings of an engine that the connector refuses at its start, with vLLM's own classes but no engine; and what its log line counts."""

import json
import os
import subprocess
from typing import get_args

import pytest

from bridge.cli import check
from bridge.vllm.errors import BadConfiguration
from tests.vllm.engine import ROOT, vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def said():
    command = [vllm_python() or "", "-m", "tests.vllm.start_checks"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_engines_that_would_share_a_name_and_a_port_are_refused(said):
    assert said["alone"] == said["data, each engine by itself"] == ""
    assert "2 data-parallel engines would share one name" in said["data"]
    assert "start each engine by itself" in said["data"]
    assert "pipeline parallelism of 2" in said["pipeline"]


def test_the_log_line_has_no_differences_of_gauges(said):
    assert said["log line"] == {"prefiller_offered": 1}


def test_the_weights_that_vllm_loads_are_compared(said):
    assert len(said["weight files"]) == 42
    for which, theirs, compared in said["weight files"]:
        assert compared == theirs, which


def test_the_command_check_knows_vllms_own_class(said, tmp_path):
    theirs = said["transfer config"]
    assert theirs["roles"] == {role: list(meaning) for role, meaning in check.ROLES.items()}
    assert set(get_args(check.FIELDS["kv_role"])) == set(check.ROLES)
    fields = {name: str(kind) for name, kind in check.FIELDS.items()}
    fields["kv_role"] = theirs["fields"]["kv_role"]  # compared above; theirs allows None, and refuses it beside kv_connector
    assert fields == theirs["fields"]

    path = tmp_path / "given.json"

    def takes(given, encoding="utf-8"):
        path.write_bytes(json.dumps(given).encode(encoding))
        try:
            check.check_fields(check.read(path))
        except BadConfiguration:
            return False
        return True

    for given, taken in theirs["taken"]:
        assert takes(given) == taken, given
    for encoding, taken in theirs["encodings"]:
        assert takes(given, encoding) == taken, encoding
    assert {taken for _, taken in theirs["taken"]} == {taken for _, taken in theirs["encodings"]} == {True, False}


def test_token_ids_that_no_tokenizer_gives_end_no_scheduler(said):
    """HTTP refuses them, a program that calls the engine may not."""
    assert said["fetch"] == [3, "", False]
    count, error, _ = said["fetch of no tokens"]
    assert count == 3
    assert error.startswith("bad_content: a token id is")
    assert said["prefill"] == [0, "", True]
    assert said["prefill of no tokens"] == [0, "", False]


def test_an_adapter_that_cannot_be_compared_is_not_handed_off(said):
    count, error, _ = said["fetch with an adapter that is not here"]
    assert count == 3
    assert error.startswith("adapter_unknown: the files of the adapter 'tuned' were not found on this host")
    assert said["prefill with an adapter that is not here"] == [0, "", False]


def test_what_an_engine_first_used_an_adapter_as_counts_from_any_request(said):
    """[not handed off, handed off, after a change], and after a change behind a request that was not handed off."""
    assert said["an adapter that was replaced"] == [False, True, False, False]


def test_an_adapter_that_is_replaced_in_the_midst_of_a_prefill_is_not_handed_off(said):
    """vLLM loads it after the request has come, so nobody knows with which of the two it has computed."""
    assert said["an adapter that was replaced meanwhile"] == [[True, [], []], [False, ["adapter_unknown"], ["r"]]]


def test_images_that_this_engine_only_counts_are_not_compared(said):
    """Without its caches vLLM's identifiers are counters, and hashes of counters: of two images they are the same."""
    for kind in ("images that are counted", "images that are counted, and hashed"):
        (one, other), (count, error, _) = said[kind]
        assert one == other
        assert count == 3
        assert error.startswith("unsupported_engine: this engine does not hash images")
    assert said["images that are hashed"] == [3, "", False]


def test_embeddings_of_a_prompt_are_compared(said):
    """In a prompt of both, token ids alone say nothing of the positions that are vectors."""
    one, again, other, elsewhere = said["embeddings"]
    assert one == again
    assert one[0] == other[0] == elsewhere[0], "the tokens are the same"
    assert len({one[1], other[1], elsewhere[1]}) == 3
    assert said["embeddings of another type"][0][1] != one[1]


def test_overrides_of_the_configuration_count(said):
    plain, other, again = said["overrides"]
    assert plain != other == again


def test_a_stranger_at_the_port_is_one_line_of_the_log(said):
    (line,) = said["refusals"]
    assert "from 10.0.0.9 to its control port (self-signed certificate)" in line
    assert "must stand under peers" in line


def test_payloads_that_nobody_asks_for_are_one_line_of_the_log(said):
    """As where a router does not pass the parameters on, which nothing else says."""
    (line,) = said["expired"]
    assert "no decoder asked for the KV of request 'r'" in line
    assert "kv_transfer_params" in line
    assert said["expired, but claimed"] == []
