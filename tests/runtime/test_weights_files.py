# SPDX-License-Identifier: AGPL-3.0-only
"""Which files a checkpoint consists of, and what happens when they contradict each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from spark_py.runtime import GpuBackend, errors
from spark_py.runtime import weight_reader as reader_module
from spark_py.runtime.weights import WeightStore

from .weights_support import f32, write, write_index

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def opened(path: Path) -> dict[str, str]:
    """Tensor -> file name, as a store sees them."""
    store = WeightStore.open(path)
    return {name: store.info(name).file.name for name in store.names()}


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        [ONE, TWO],
        ["model-a.safetensors", "model-b.safetensors"],
        ["model.safetensors-00001-of-00002", "model.safetensors-00002-of-00002"],
        ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"],
        ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"],
        ["consolidated.safetensors"],
        ["consolidated-00001-of-00001.safetensors", "mtp.safetensors"],
        ["mtp.safetensors"],
        ["extra_weights.safetensors"],
    ],
    ids="+".join,
)
def test_found_without_an_index(tmp_path: Path, names: list[str]) -> None:
    for i, name in enumerate(names):
        write(tmp_path / name, {f"t{i}": f32(i)})
    for stray in ("model.safetensors.bak", "model.bin", "model.safetensors-x.json", "optimizer.pt"):
        (tmp_path / stray).write_bytes(b"not a checkpoint")
    assert opened(tmp_path) == {f"t{i}": name for i, name in enumerate(names)}


def test_a_single_file_stands_alone(tmp_path: Path) -> None:
    write(tmp_path / "mtp.safetensors", {"a": f32(1)})
    path = write(tmp_path / "any.name", {"b": f32(1)})
    assert opened(path) == {"b": "any.name"}


def test_one_family_counts_and_the_rest_is_named(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {"model.norm": f32(1)})
    write(tmp_path / "consolidated.safetensors", {"norm": f32(1)})
    write(tmp_path / "adapter.safetensors", {"mtp.fc": f32(1)})
    store = WeightStore.open(tmp_path)
    assert store.names() == ("model.norm",)
    assert [p.name for p in store.ignored_files()] == ["adapter.safetensors", "consolidated.safetensors"]
    with pytest.raises(errors.MissingWeightError, match=r"not looked into: adapter\.safetensors"):
        store.info("mtp.fc")


@pytest.mark.parametrize("family", ["model", "consolidated"])
def test_the_index_and_the_headers_are_united(tmp_path: Path, family: str) -> None:
    """An index rewritten without the drafter: its tensors are found in the shard, in a shard it does not name, and in
    mtp.safetensors."""
    one, two = f"{family}-00001-of-00002.safetensors", f"{family}-00002-of-00002.safetensors"
    write(tmp_path / one, {"a": f32(1), "mtp.in_indexed_shard": f32(2)})
    write(tmp_path / two, {"mtp.in_lost_shard": f32(3)})
    write(tmp_path / "weird.bin", {"b": f32(4)})
    write(tmp_path / "mtp.safetensors", {"mtp.own_file": f32(5)})
    write_index(tmp_path, {"a": one, "b": "weird.bin"}, family)
    assert opened(tmp_path) == {
        "a": one,
        "b": "weird.bin",
        "mtp.in_indexed_shard": one,
        "mtp.in_lost_shard": two,
        "mtp.own_file": "mtp.safetensors",
    }


def test_an_index_naming_a_missing_shard(tmp_path: Path) -> None:
    write(tmp_path / ONE, {"a": f32(1)})
    index = write_index(tmp_path, {"a": ONE, "b": TWO, "c": TWO})
    with pytest.raises(errors.WeightIndexError, match=f"'{TWO}' holds 2 tensors, 'b' among them") as caught:
        WeightStore.open(tmp_path)
    assert caught.value.path == index


@pytest.mark.parametrize(("shard", "found"), [(TWO, f"'{ONE}' has it"), (ONE, "no file has it")])
def test_an_index_naming_the_wrong_shard(tmp_path: Path, shard: str, found: str) -> None:
    tensor = "a" if shard == TWO else "ghost"
    write(tmp_path / ONE, {"a": f32(1)})
    write(tmp_path / TWO, {"b": f32(1)})
    write_index(tmp_path, {tensor: shard, "b": TWO})
    with pytest.raises(errors.WeightIndexError, match=f"'{tensor}': says '{shard}', whose header lacks it; {found}"):
        WeightStore.open(tmp_path)


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_a_gap_in_the_shard_numbers_without_an_index(tmp_path: Path, gone: int) -> None:
    for i in {1, 2, 3} - {gone}:
        write(tmp_path / f"model-0000{i}-of-00003.safetensors", {f"t{i}": f32(i)})
    with pytest.raises(errors.WeightFileError, match=rf"shard {gone} is missing: .* one of 3, the folder has 2"):
        WeightStore.open(tmp_path)
    write(tmp_path / "model-00001-of-99999999999999999999.safetensors", {"x": f32(1)})
    with pytest.raises(errors.WeightFileError):
        WeightStore.open(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "JSON"),
        (b"{", "JSON"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "weight_map"),
        (b"{}", "weight_map"),
        (b'{"weight_map": []}', "weight_map"),
        (b'{"weight_map": {"a": 1}}', "plain file name"),
        (b'{"weight_map": {"a": "../other/model.safetensors"}}', "plain file name"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "plain file name"),
        (b'{"weight_map": {"a": ".."}}', "plain file name"),
        (b'{"weight_map": {"a": ""}}', "plain file name"),
        (b'{"weight_map": {"a": "x\\u0000"}}', "plain file name"),
        (b'{"weight_map": {"a": "\\ud800"}}', "the folder has none"),
        (b'{"weight_map": {"a": "model.safetensors", "a": "b.safetensors"}}', "twice"),
        (b'{"weight_map": {"\\ud800": "model.safetensors"}}', "no file has it"),
        (b'{"weight_map": {"a": ' + b"9" * 5000 + b"}}", "JSON"),
    ],
)
def test_damaged_index_files(tmp_path: Path, text: bytes, message: str) -> None:
    write(tmp_path / "model.safetensors", {"a": f32(1)})
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(errors.WeightIndexError, match=message) as caught:
        WeightStore.open(tmp_path)
    str(caught.value).encode()


def test_extra_weights_replace(gpu: GpuBackend, tmp_path: Path) -> None:
    """Whatever their dtype and shape, and also where the index names another file for the tensor."""
    write(tmp_path / "model.safetensors", {"a": f32(1), "b": f32(2)})
    write(tmp_path / "extra_weights.safetensors", {"a": f32(7, 8), "c": f32(9)})
    write_index(tmp_path, {"a": "model.safetensors", "c": "extra_weights.safetensors"})
    with WeightStore.open(tmp_path) as store:
        assert store.info("a").file.name == store.info("c").file.name == "extra_weights.safetensors"
        store.load(gpu, lambda _: True)
        assert store.get("a").shape == (2,)
        assert [store.read(n).tolist() for n in "abc"] == [[7, 8], [2], [9]]


def test_extra_weights_settle_what_the_shards_dispute(tmp_path: Path) -> None:
    write(tmp_path / ONE, {"a": f32(1)})
    write(tmp_path / TWO, {"a": f32(2)})
    write(tmp_path / "extra_weights.safetensors", {"a": f32(3)})
    assert WeightStore.open(tmp_path).read("a").tolist() == [3]


@pytest.mark.parametrize("with_index", [False, True])
def test_copies_that_differ_in_shape_are_refused(tmp_path: Path, with_index: bool) -> None:
    write(tmp_path / ONE, {"a": f32(1)})
    write(tmp_path / TWO, {"a": f32(1, 2)})
    if with_index:
        write_index(tmp_path, {"a": TWO})
    with pytest.raises(errors.DuplicateWeightError, match=r"'a': is F32 \[1\] here, F32 \[2\] in") as caught:
        WeightStore.open(tmp_path)
    assert {caught.value.path.name, caught.value.other.name} == {ONE, TWO}


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("at", [None, 0, 9, 99])
def test_copies_must_have_equal_bytes(
    gpu: GpuBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_index: bool, at: int | None
) -> None:
    monkeypatch.setattr(reader_module, "_COMPARED", 64)
    values = [float(i) for i in range(100)]
    write(tmp_path / ONE, {"tied": f32(*values), "b": f32(1)})
    if at is not None:
        values[at] = -values[at]  # the sign bit alone, of 0 too
    write(tmp_path / TWO, {"pad": f32(5), "tied": f32(*values)})
    if with_index:
        write_index(tmp_path, {"tied": TWO})
    store = WeightStore.open(tmp_path)
    assert store.info("tied").file.name == (TWO if with_index else ONE)
    if at is None:
        assert store.read("tied").tolist() == values
        store.load(gpu, ["tied"])
        store.release()
        return
    calls = (
        lambda: store.load(gpu, ["b", "tied"], progress=lambda *_: pytest.fail("uploaded")),
        lambda: store.read("tied"),
    )
    for call in calls:
        with pytest.raises(errors.DuplicateWeightError, match=rf"'tied': byte {4 * at + 3} is 0x.. here and 0x.. in"):
            call()
    assert gpu.live_bytes() == 0
    assert store.read("b").tolist() == [1], "what does not disagree is readable"


@pytest.mark.skipif(os.name != "posix", reason="named pipes and device files are POSIX")
def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").symlink_to(tmp_path / "nowhere")
    for path in ("pipe", "empty", "broken", "absent", "x\0y"):
        with pytest.raises(errors.WeightFileError):
            WeightStore.open(tmp_path / path)


def test_links_are_followed(tmp_path: Path) -> None:
    """A download cache keeps the files elsewhere, under other names."""
    blob = write(tmp_path / "0123abcd", {"a": f32(1)})
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(blob)
    assert opened(folder) == {"a": "model.safetensors"}


def test_an_empty_file_and_an_empty_index(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", {})
    assert opened(tmp_path) == {}
    index: dict[str, Any] = {"weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert opened(tmp_path) == {}
