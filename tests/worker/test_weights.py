"""The headers of safetensors files: whatever the library refuses is refused, and an index has to describe its files."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save, save_file

from tests.models import bert_config, bert_tensors, write_bert, write_json
from worker.checkpoint.files import ModelError
from worker.checkpoint.weights import WeightFile, open_weights

QUERY = "encoder.layer.0.attention.self.query.weight"
INDEX = "model.safetensors.index.json"

Header = dict[str, dict[str, object]]

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "F16", "shape": [4], "data_offsets": [24, 32]}


def content(header: Header | str, num_bytes: int = 32) -> bytes:
    """A file with this header and so many bytes of numbers."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def open_content(folder: Path, data: bytes) -> WeightFile:
    path = folder / "x.safetensors"
    path.write_bytes(data)
    file = WeightFile.open(path)
    file.stream.close()
    return file


def test_a_header_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    tensors = {
        "b": torch.zeros(2, 3),
        "a": torch.zeros(5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(1),
        "flags": torch.ones(3, dtype=torch.bool),
    }
    data = save(tensors, {"format": "pt", "x": "a"})

    file = open_content(tmp_path, data)

    expected = {name: (spec["dtype"], spec["shape"], spec["data"]) for name, spec in safetensors.deserialize(data)}
    read = {
        name: (tensor.dtype, list(tensor.shape), data[tensor.start : tensor.start + tensor.num_bytes])
        for name, tensor in file.tensors.items()
    }
    assert read == expected
    assert file.metadata == {"format": "pt", "x": "a"}
    assert file.size_bytes == len(data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are too few"),
        (b"1234567", "7 bytes are too few"),
        (b"\xff" * 64, "it has 64 bytes and says that 18446744073709551615 are its header"),
        (content("[]"), "its header is not a JSON object"),
        (content(" {}", 0), "its header is not a JSON object"),
        (content("{"), "its header is not JSON"),
        (content("{}\xff"), "its header is not JSON"),
        (content("{" + '"a":{' * 100_000), "its header is not JSON"),
        (content(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}', 24), "a name is there twice"),
        (content({"__metadata__": {"a": 1}}, 0), "its metadata is not a map of texts"),
        (content({"a": {**A, "extra": 1}, "b": B}), "tensor a is not described by dtype, shape and data_offsets"),
        (content({"a": {**A, "dtype": "F33"}, "b": B}), "tensor a has the unknown dtype 'F33'"),
        (content({"a": {**A, "shape": [2, -3]}, "b": B}), "tensor a has no valid shape"),
        (content({"a": {**A, "shape": [2, 3.0]}, "b": B}), "tensor a has no valid shape"),
        (content({"a": {**A, "shape": [True, 6]}, "b": B}), "tensor a has no valid shape"),
        (content({"a": {**A, "shape": [1] * 99 + [6]}, "b": B}), "tensor a has no valid shape"),
        (content({"a": {**A, "data_offsets": [0, 24, 32]}, "b": B}), "tensor a has no valid shape and data_offsets"),
        (content({"a": {**A, "shape": [2, 4]}, "b": B}), "tensor a takes 32 bytes, but has 24"),
        (content({"a": {**A, "shape": [2**62, 2**62]}, "b": B}), "tensor a takes .* bytes, but has 24"),
        (content({"a": {**A, "data_offsets": [24, 0]}, "b": B}), "tensor a takes 24 bytes, but has -24"),
        (content({"a": A, "b": {**B, "data_offsets": [16, 24]}}, 24), "tensor b begins at byte .* ends at"),
        (content({"a": A, "b": {**B, "data_offsets": [28, 36]}}, 36), "tensor b begins at byte .* ends at"),
        (content({"a": A, "b": B}, 31), "its tensors end at byte .*, the file at"),
        (content({"a": A, "b": B}, 33), "its tensors end at byte .*, the file at"),
    ],
)
def test_a_damaged_header_is_refused_on_one_line(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=rf"x\.safetensors is damaged: .*{message}.*\.$") as refusal:
        open_content(tmp_path, data)

    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_whatever_the_library_refuses_is_refused(tmp_path: Path) -> None:
    generator = random.Random(1)
    good = save({"a": torch.arange(6.0).view(2, 3), "b": torch.zeros(4, dtype=torch.float16)}, {"format": "pt"})
    header_bytes = 8 + int.from_bytes(good[:8], "little")
    verdicts = set()
    for _ in range(600):
        damaged = bytearray(good)
        for _ in range(generator.choice((1, 1, 2, 4))):
            damaged[generator.randrange(header_bytes)] = generator.choice(b'0123456789[]{},:"ABFI\x00\xff ')
        try:
            safetensors.deserialize(bytes(damaged))
            accepted_there = True
        except Exception:  # noqa: BLE001  # the library raises several kinds
            accepted_there = False
        try:
            open_content(tmp_path, bytes(damaged))
            accepted_here = True
        except ModelError:
            accepted_here = False
        assert accepted_there or not accepted_here, bytes(damaged[:header_bytes])
        verdicts.add((accepted_there, accepted_here))
    assert {(True, True), (False, False)} <= verdicts


def test_a_file_that_is_cut_short_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    file = WeightFile.open(path)
    with file.stream:
        os.truncate(path, path.stat().st_size - 4)

        with pytest.raises(ModelError, match=r"x\.safetensors is damaged: it was cut short while it was read"):
            file.read_into(memoryview(bytearray(400)))


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], r"model\.safetensors is missing: only safetensors weights are read\.$"),
        (["pytorch_model.bin"], r"\(found pytorch_model\.bin\)\.$"),
        (["a.onnx", "flax_model.msgpack"], r"\(found a\.onnx, flax_model\.msgpack\)\.$"),
    ],
)
def test_other_formats_alone_are_refused_and_named(tmp_path: Path, others: list[str], message: str) -> None:
    for name in others:
        (tmp_path / name).write_bytes(b"")

    with pytest.raises(ModelError, match=message), open_weights(tmp_path):
        pass


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin"])
def test_pytorchs_weights_are_to_be_converted_by_their_own_class_into_another_folder(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / "config.json", {"architectures": ["BertForSequenceClassification"]})
    (tmp_path / name).write_bytes(b"")

    with pytest.raises(ModelError) as refusal, open_weights(tmp_path):
        pass

    way = f'BertForSequenceClassification.from_pretrained("{tmp_path}").save_pretrained("{tmp_path}-safetensors")'
    assert str(refusal.value).endswith(f"transformers.{way}")


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("pytorch_model.bin", {"architectures": ["NewModel"], "auto_map": {"AutoModel": "modeling.NewModel"}}),
        ("pytorch_model.bin", {"architectures": ["BertModel", "BertForMaskedLM"]}),
        ("pytorch_model.bin", {"architectures": ["a b"]}),
        ("pytorch_model.bin", {}),
        ("training_args.bin", {"architectures": ["BertModel"]}),
        ("model.onnx", {"architectures": ["BertModel"]}),
    ],
)
def test_where_no_class_of_transformers_is_known_to_read_the_weights_no_way_is_given(
    tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    write_json(tmp_path / "config.json", fields)
    (tmp_path / name).write_bytes(b"")

    with pytest.raises(ModelError, match=rf"\(found {name}\)\.$"), open_weights(tmp_path):
        pass


def test_what_was_opened_is_closed_when_a_later_file_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    os.truncate(tmp_path / "a-2.safetensors", 100)
    num_open = len(os.listdir("/proc/self/fd"))

    with pytest.raises(ModelError, match=r"a-2\.safetensors is damaged"), open_weights(tmp_path):
        pass

    assert weight_map
    assert len(os.listdir("/proc/self/fd")) == num_open


# --- several files ---


def write_shards(folder: Path) -> dict[str, str]:
    """A model in two files; returns the index's map. The query's weight is in the first."""
    write_bert(folder)
    (folder / "model.safetensors").unlink()
    tensors = bert_tensors(bert_config())
    names = sorted(tensors, key=lambda name: name != QUERY)
    shards = {"a-1.safetensors": names[::2], "a-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    write_json(folder / INDEX, {"weight_map": weight_map})
    return weight_map


def test_a_tensor_that_the_index_does_not_name_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    del weight_map[QUERY]
    write_json(tmp_path / INDEX, {"weight_map": weight_map})

    with (
        pytest.raises(ModelError, match=rf"{INDEX}: weight_map: tensor {QUERY} of a-1\.safetensors is not listed"),
        open_weights(tmp_path),
    ):
        pass


def test_a_tensor_in_another_file_than_the_index_says_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": weight_map | {QUERY: "a-2.safetensors"}})

    with (
        pytest.raises(ModelError, match=rf"tensor {QUERY} is listed in a-2\.safetensors, but a-1\.safetensors holds"),
        open_weights(tmp_path),
    ):
        pass


def test_a_tensor_that_is_in_no_file_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_json(tmp_path / INDEX, {"weight_map": weight_map | {"more.weight": "a-2.safetensors"}})

    with (
        pytest.raises(ModelError, match=r"tensor more\.weight is listed in a-2\.safetensors, which does not hold it"),
        open_weights(tmp_path),
    ):
        pass


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path)
    tensors = bert_tensors(bert_config())
    second = {name: tensors[name] for name in tensors if name not in (QUERY,)}
    save_file({QUERY: tensors[QUERY]}, tmp_path / "a-1.safetensors")
    save_file({**second, QUERY: tensors[QUERY]}, tmp_path / "a-2.safetensors")
    write_json(tmp_path / INDEX, {"weight_map": {**dict.fromkeys(second, "a-2.safetensors"), QUERY: "a-1.safetensors"}})

    with (
        pytest.raises(ModelError, match=rf"tensor {QUERY} is listed in a-1\.safetensors, but a-2\.safetensors holds"),
        open_weights(tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "a map of tensor names to files is needed"),
        ({}, "a map of tensor names to files is needed"),
        ([QUERY], "a map of tensor names to files is needed"),
        ({QUERY: 1}, "1 is not the name of a safetensors file"),
        ({QUERY: "../a-1.safetensors"}, "'../a-1.safetensors' is not the name of a safetensors file"),
        ({QUERY: "/a-1.safetensors"}, "'/a-1.safetensors' is not the name of a safetensors file"),
        ({QUERY: ""}, "'' is not the name of a safetensors file"),
        ({QUERY: "pytorch_model.bin"}, "'pytorch_model.bin' is not the name of a safetensors file"),
        ({QUERY: ".."}, "'..' is not the name of a safetensors file"),
    ],
)
def test_an_index_without_a_map_to_file_names_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    write_json(tmp_path / INDEX, {"weight_map": weight_map})

    with pytest.raises(ModelError, match=rf"{INDEX}: weight_map: {message}"), open_weights(tmp_path):
        pass
