"""A bounded part of the mutation run, and proof that its judge would notice a reader that is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from bridge.wire import errors
from tests.attacks import attack, build
from tests.fuzz import judge as judging
from tests.fuzz.judge import ACCEPTED, Fault, Judge, check_meaning, check_values, dump
from tests.fuzz.mutate import Mutant, Mutator, make_seeds
from tests.fuzz.plain import read_plainly
from tests.fuzz.run import clauses, run

MUTATIONS, SEED = 10_000, 2


@pytest.mark.slow
def test_no_mutation_changes_the_meaning():
    found = run(MUTATIONS, SEED)
    assert not found["faults"]
    assert not found["never_hit"]
    assert set(found["hits"]) == {*clauses(), ACCEPTED}
    assert found["mutations"] == MUTATIONS
    assert found["decoded"] > 20
    # Half were repaired with the key; what was not repaired and is no honest container was refused, or the run had a fault.
    assert 0.4 < sum(found["hits_repaired"].values()) / MUTATIONS < 0.6
    assert found["hits_repaired"][ACCEPTED] == found["hits"][ACCEPTED]


def test_the_second_reader_takes_part():
    """Where the C reader cannot be compiled this fails, so that nobody takes a run with one judge for a run with two."""
    assert judging.find_second_judge() is not None


def test_mutants_depend_on_their_number_only():
    first, second = Mutator(5), Mutator(5)
    forward = [first.make(number) for number in range(50)]
    assert [second.make(number) for number in reversed(range(50))] == forward[::-1]
    assert len({mutant.data for mutant in forward}) > 45


@pytest.mark.parametrize("seed", make_seeds(), ids=lambda seed: seed.name)
def test_seeds_are_honest(seed):
    manifest = attack.read(seed.data)
    plain = read_plainly(seed.data)
    check_meaning(manifest, plain)
    check_values(manifest, plain)
    names = [field.name for field in seed.fields]
    assert len(set(names)) == len(names)
    # The fields cover the manifest but for the padding of sections.
    assert sum(build.struct.calcsize("<" + field.code) for field in seed.fields) > len(seed.manifest) - 8 * len(seed.sections)


# A judge that never objects would let every run pass. Each reader below is wrong in one way. ---------------------------------------


def judged(monkeypatch, reader, mutant):
    monkeypatch.setattr(judging, "read", reader)
    Judge(frozenset({build.honest_small().pack()})).judge(mutant)


def honest_mutant(repaired: bool = True) -> Mutant:
    return Mutant(build.honest_small(lease=99).pack(), "another lease", repaired)


def test_an_honest_reader_passes_the_judge(monkeypatch):
    judged(monkeypatch, attack.read, honest_mutant())


def test_the_judge_notices_acceptance_without_the_key(monkeypatch):
    with pytest.raises(Fault, match="nobody used the key"):
        judged(monkeypatch, attack.read, honest_mutant(repaired=False))


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(attack.Manifest)])
def test_the_judge_notices_a_field_read_wrongly(monkeypatch, field):
    others = {
        "model_digest": bytes(32),
        "content": (),
        "request_id": "x",
        "groups": (),
        "codecs": (),
        "layers": (),
        "shard": attack_shard(),
    }

    def reader(data: bytes) -> object:
        manifest = attack.read(data)
        return dataclasses.replace(manifest, **{field: others.get(field, 3)})

    with pytest.raises(Fault, match="its bytes say"):
        judged(monkeypatch, reader, honest_mutant())


def attack_shard():
    from bridge.wire import Shard

    return Shard(1, 2)


def accept_anything(data: bytes):
    """A reader that does not look at the payload."""
    manifest, _, _ = attack.read_stream(attack.io.BytesIO(data), len(data))
    return manifest


@pytest.mark.parametrize(
    ("place", "message"), [("block", "its tag is wrong"), ("tag", "its tag is wrong"), ("padding", "no block and no tag")]
)
def test_the_judge_notices_a_payload_that_was_not_verified(monkeypatch, place, message):
    raw = build.honest_small(lease=99)
    last = list(build.walk(48, raw.groups, raw.codecs, raw.layers))[-1]
    payload = bytearray(raw.payload)
    payload[{"block": last.offset, "tag": last.tag, "padding": last.tag + 8}[place]] ^= 1
    raw.payload = bytes(payload)
    with pytest.raises(Fault, match=message):
        judged(monkeypatch, accept_anything, Mutant(raw.pack(), place, True))


def test_the_judge_notices_rows_that_are_not_zero(monkeypatch):
    raw = build.honest_small(lease=99)
    payload = bytearray(raw.payload)
    payload[0] = 1
    raw.payload = bytes(payload)
    with pytest.raises(Fault, match="rows that are not valid"):
        judged(monkeypatch, accept_anything, Mutant(raw.tagged().pack(), "dirty row", True))


def test_the_judge_notices_other_exceptions(monkeypatch):
    def reader(data: bytes) -> object:
        raise IndexError("list index out of range")

    with pytest.raises(Fault, match="IndexError"):
        judged(monkeypatch, reader, honest_mutant())


def test_the_judge_notices_time(monkeypatch):
    monkeypatch.setattr(judging, "MAX_SECONDS", 0.01)

    def reader(data: bytes) -> object:
        sum(range(3_000_000))
        return attack.read(data)

    with pytest.raises(Fault, match="CPU time"):
        judged(monkeypatch, reader, honest_mutant())


def test_the_judge_notices_two_encodings_of_one_meaning(monkeypatch):
    def reader(data: bytes) -> object:
        return attack.read(data[:-1])

    with pytest.raises(Fault):
        judged(monkeypatch, reader, Mutant(honest_mutant().data + b"\0", "a byte more", True))


def test_the_judge_notices_readers_that_disagree():
    judge = Judge(frozenset(), second=lambda data: errors.BadTag.clause)
    with pytest.raises(Fault, match="disagree"):
        judge.judge(honest_mutant())


def test_the_judge_notices_values_decoded_wrongly(monkeypatch):
    decode = judging.reference.decode
    data = build.honest_mixed().pack()
    check_values(attack.read(data), read_plainly(data))
    monkeypatch.setattr(judging.reference, "decode", lambda *arguments: decode(*arguments) * 1.001)
    with pytest.raises(Fault, match="its bytes say"):
        check_values(attack.read(data), read_plainly(data))


def test_the_dump_has_every_field_of_the_manifest():
    """A field that is added to the manifest must be added to both dumps."""
    manifest = attack.read(build.honest_small().pack())
    assert len(dump(manifest)) == len(dataclasses.fields(manifest))
    for kind, count in ((manifest.groups[0], 8), (manifest.layers[0], 6), (manifest.codecs[0].key, 6), (manifest.shard, 4)):
        assert len(dataclasses.fields(kind)) == count
