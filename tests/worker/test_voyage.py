"""voyage-4-nano's folder as it is published, in small: what its files say, and what is not taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import parity
from tests.families import VOYAGE, declared, tiny
from tests.models import edit_json, embed, write_json
from tests.reference import unit
from tests.worker.conftest import make_engine
from worker.checkpoint.files import ModelError
from worker.process.inspection import Inspection

PROMPTS = {
    "query": "Represent the query for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    name = "Qwen3BidirectionalModel"
    parity.save(parity.seeded(tiny(name)), tmp_path, **declared(name))
    kinds = ("Transformer", "Pooling", "Normalize")
    write_json(
        tmp_path / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (kind, path) in enumerate(zip(kinds, ("", "1_Pooling", "2_Normalize"), strict=True))
        ],
    )
    pooling = {"word_embedding_dimension": VOYAGE["num_labels"], "pooling_mode_mean_tokens": True}
    write_json(tmp_path / "1_Pooling" / "config.json", pooling | {"include_prompt": True})
    write_json(tmp_path / "sentence_bert_config.json", {"max_seq_length": 100, "do_lower_case": False})
    versions = {"sentence_transformers": "5.0.0", "transformers": "4.51.3", "pytorch": "2.7.0"}
    settings = {
        "__version__": versions,
        "prompts": PROMPTS,
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    write_json(tmp_path / "config_sentence_transformers.json", settings)
    return tmp_path


def test_the_published_folder_is_served_as_its_own_code_and_sentence_transformers_do(folder: Path) -> None:
    model = parity.seeded(tiny("Qwen3BidirectionalModel"))
    engine = make_engine(folder)
    facts, ids = engine.hello(), parity.sequences(100)

    rows = embed(engine, ids, width=48, normalize=[1] * len(ids))

    assert (facts.architecture, facts.dimensions, facts.max_tokens) == ("Qwen3BidirectionalModel", 48, 100)
    assert (facts.pooling, facts.normalize, facts.encodings) == ("mean", True, ["float32"])
    assert (facts.prompts, facts.default_prompt_name) == (PROMPTS, None)
    np.testing.assert_allclose(rows, unit(parity.reference_rows(model, ids)), rtol=0, atol=1e-5)
    assert Inspection.of("voyage", folder).problems == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        # Without that code it is a Qwen3, whose fields do not say what these do.
        ({"auto_map": None}, "use_bidirectional_attention: not a field of this architecture's"),
        ({"auto_map": {"AutoModel": "modeling.Qwen3OtherModel"}}, "auto_map: this model brings its own code"),
        ({"auto_map": VOYAGE["auto_map"] | {"AutoConfig": "own.Config"}}, "auto_map: 'own.Config' is code"),
        # Giga-Embeddings has a class of the same name, and no linear layer.
        ({"architectures": ["Qwen3BidirectionalModel"]}, "architectures: Qwen3BidirectionalModel is not supported"),
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention: false, but a Qwen3BidirectionalModel"),
        ({"is_causal": True}, "is_causal: true, but a Qwen3BidirectionalModel never is"),
        ({"use_sliding_window": True}, "use_sliding_window: not supported of a Qwen3BidirectionalModel"),
        ({"model_type": "qwen2"}, "model_type: 'qwen2' is not this architecture's"),
        ({"num_labels": None}, "num_labels: missing"),
    ],
)
def test_what_is_not_a_voyage_is_refused(changes: dict[str, object], message: str, folder: Path) -> None:
    edit_json(folder / "config.json", **changes)
    (folder / "modules.json").unlink()

    with pytest.raises(ModelError, match=rf"config\.json: {message}"):
        make_engine(folder)


def test_a_width_that_the_weights_do_not_have_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", num_labels=32)
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    write_json(folder / "1_Pooling" / "config.json", pooling | {"word_embedding_dimension": 32})

    with pytest.raises(ModelError, match=r"tensor linear.weight: shape \[48, 32\], but the model needs \[32, 32\]"):
        make_engine(folder)
