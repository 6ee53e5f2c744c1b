"""pplx-embed: a Qwen3 that sees every token and quantises; pplx-embed-context, whose chunks see each other.

Its own code is never run: what it computes is known from its text alone (`modeling.py` and `st_quantize.py` of
perplexity-ai/pplx-embed-v1-0.6b), so the vectors of a real checkpoint have yet to be compared.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.models import embed, pplx_config, random_sequences, tokenizer, write_bert, write_json, write_pplx
from tests.reference import Qwen3Reference
from tests.worker.conftest import make_engine
from worker.checkpoint.files import ModelError
from worker.process.inspection import Inspection


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_pplx_embed_sees_every_token(tmp_path: Path, pooling: str) -> None:
    folder, sequences = write_pplx(tmp_path), random_sequences([1, 7, 48, 7, 2])
    write_json(
        folder / "1_Pooling" / "config.json",
        {{"mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken"}[pooling]: True},
    )

    rows = embed(make_engine(folder), sequences)

    reference = Qwen3Reference(folder, causal=False)
    np.testing.assert_allclose(rows, np.stack([reference.embed(s, pooling) for s in sequences]), rtol=0, atol=1e-5)


def test_pplx_embed_tells_its_encodings_and_does_not_normalise(tmp_path: Path) -> None:
    facts = make_engine(write_pplx(tmp_path)).hello()

    assert facts.encodings == ["float32", "int8", "binary"]
    assert (facts.pooling, facts.normalize, facts.architecture) == ("mean", False, "PPLXQwen3Model")


@pytest.mark.parametrize("auto_map", [None, {"AutoModel": "perplexity-ai/pplx-embed-v1-0.6b--modeling.PPLXQwen3Model"}])
def test_pplx_embeds_own_code_may_be_absent_or_in_another_repository(
    tmp_path: Path, auto_map: dict[str, str] | None
) -> None:
    folder = write_pplx(tmp_path, config=pplx_config(auto_map=auto_map))

    assert make_engine(folder).hello().architecture == "PPLXQwen3Model"


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path)
    for name in ("modeling.py", "configuration.py", "st_quantize.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")

    make_engine(folder)

    assert not (tmp_path / "ran").exists()


def test_a_quantising_module_behind_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path)
    write_bert(tmp_path / "bert")
    (tmp_path / "bert" / "modules.json").write_text((folder / "modules.json").read_text())

    with pytest.raises(ModelError, match=r"modules\.json: type: FlexibleQuantizer is not known of a BertModel"):
        make_engine(tmp_path / "bert")


def write_context(folder: Path, settings: dict[str, object], separator: str) -> Path:
    """A pplx-embed-context whose tokenizer has this token, which no text makes of its own."""
    write_pplx(folder, config=pplx_config(auto_map=CONTEXT_CODE))
    own = tokenizer(num_words=60)
    own.add_special_tokens([separator])
    own.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", settings)
    return folder


CONTEXT_CODE = {"AutoConfig": "configuration.PPLXQwen3Config", "AutoModel": "modeling.PPLXQwen3ContextualModel"}


@pytest.mark.parametrize("with_modules", [True, False])
@pytest.mark.parametrize(
    ("settings", "separator", "separator_id"),
    [({"sep_token": "[SEP]"}, "[SEP]", 2), ({"sep_token": {"content": "[UNUSED]"}}, "[UNUSED]", 63)],
)
def test_a_context_model_tells_its_separator_and_quantises(
    tmp_path: Path, settings: dict[str, object], separator: str, separator_id: int, with_modules: bool
) -> None:
    folder = write_context(tmp_path, settings, separator)
    if not with_modules:
        (folder / "modules.json").unlink()

    facts = make_engine(folder).hello()

    assert facts.separator_id == separator_id
    assert (facts.pooling, facts.normalize, facts.encodings) == ("mean", False, ["float32", "int8", "binary"])


def test_a_context_model_whose_separator_is_no_token_is_refused(tmp_path: Path) -> None:
    folder = write_pplx(tmp_path, config=pplx_config(auto_map=CONTEXT_CODE))

    with pytest.raises(ModelError, match=r"tokenizer_config\.json: sep_token: '<\|endoftext\|>' is no token of"):
        make_engine(folder)


def test_a_separator_that_is_a_word_like_any_other_is_refused(tmp_path: Path) -> None:
    folder = write_context(tmp_path, {"sep_token": "w4"}, "[SEP]")

    with pytest.raises(ModelError, match=r"tokenizer\.json: the separator 7 is none of its added tokens") as refusal:
        make_engine(folder)

    assert Inspection.of("context", folder).problems == [str(refusal.value)]


def test_chunks_are_pooled_on_their_own_and_see_each_other(tmp_path: Path) -> None:
    engine = make_engine(write_context(tmp_path, {"sep_token": "[SEP]"}, "[SEP]"))
    chunks = [[10, 11, 12], [20], [30, 31]]
    joined = [*chunks[0], 2, *chunks[1], 2, *chunks[2]]
    tokens = embed(engine, [joined], spans=[[(i, i + 1) for i in range(len(joined))]])

    rows = embed(engine, [joined], spans=[[(0, 3), (4, 5), (6, 8)]])

    expected = [tokens[0:3].mean(0), tokens[4:5].mean(0), tokens[6:8].mean(0)]
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
    assert np.abs(rows[1] - embed(engine, [chunks[1]])[0]).max() > 0.01
