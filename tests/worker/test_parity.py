"""The BERT families against transformers' own classes (other families' tests are in files of their own)."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

from tests import parity
from tests.parity import VOCAB_SIZE

LIMIT = 160

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def bert(**changes: object) -> PreTrainedModel:
    return BertModel(BertConfig(**SHAPE | {"max_position_embeddings": LIMIT} | changes))


def roberta(**changes: object) -> PreTrainedModel:
    return RobertaModel(RobertaConfig(**SHAPE | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1} | changes))


def xlm_roberta(**changes: object) -> PreTrainedModel:
    shape = SHAPE | {"max_position_embeddings": LIMIT + 2, "type_vocab_size": 1}
    return XLMRobertaModel(XLMRobertaConfig(**shape | changes))


def distilbert(**changes: object) -> PreTrainedModel:
    shape = {"vocab_size": VOCAB_SIZE, "dim": 32, "hidden_dim": 80, "n_layers": 2, "n_heads": 4}
    return DistilBertModel(DistilBertConfig(**shape | {"max_position_embeddings": LIMIT} | changes))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(bert(), id="bert"),
        pytest.param(bert(hidden_act="gelu_new"), id="bert-gelu_new"),
        pytest.param(bert(hidden_act="relu"), id="bert-relu"),
        pytest.param(bert(type_vocab_size=1), id="bert-one-type"),
        pytest.param(bert(layer_norm_eps=0.3), id="bert-epsilon"),
        pytest.param(roberta(), id="roberta"),
        pytest.param(xlm_roberta(), id="xlm-roberta"),
        pytest.param(xlm_roberta(layer_norm_eps=0.3), id="xlm-roberta-epsilon"),
        pytest.param(distilbert(), id="distilbert"),
        pytest.param(distilbert(activation="relu"), id="distilbert-relu"),
    ],
)
def test_the_vectors_are_those_of_transformers(model: PreTrainedModel, tmp_path: Path) -> None:
    parity.check(model, tmp_path, LIMIT)
