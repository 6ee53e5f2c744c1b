"""RoBERTa, XLM-RoBERTa and CamemBERT: multilingual-e5, all-distilroberta and others of their shape.

Source: Liu et al., RoBERTa (2019); Conneau et al., Unsupervised Cross-lingual Representation Learning at Scale (2019);
Martin et al., CamemBERT (2019). transformers' classes of the three families compute the same.

The encoder is BERT's. A sequence's first token has the position after the padding token's id, so the rows of the
position table up to there are for padding alone, and so many fewer tokens fit than the table has rows.

A padding token within a sequence, which no text but a literal `<pad>` makes, counts as any other token here. In
transformers it has a position of its own and the tokens after it move up by one. Following that was rejected: it would
cost every step a pass over its tokens.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from worker.models.families.bert import BertConfig, BertModel, bare_name

if TYPE_CHECKING:
    from worker.checkpoint.files import JsonFile

_MODEL_TYPES = ("roberta", "xlm-roberta", "camembert")

# A buffer, the pooler of the classifiers and the head of pre-training: not part of an embedding.
_UNUSED = re.compile(r"embeddings\.position_ids|pooler\..*|lm_head\..*")


class RobertaModel(BertModel):
    def canonical_name(self, stored_name: str) -> str | None:
        return bare_name(stored_name, "roberta.", _UNUSED)


def build(architecture: str, config: JsonFile) -> RobertaModel:
    """Raises ModelError: the configuration asks for what this file does not implement."""
    return RobertaModel(_parse(config))


def _parse(config: JsonFile) -> BertConfig:
    parsed = BertConfig.parse(config, _MODEL_TYPES)
    num_rows = parsed.max_positions
    padding_id = config.values.get("pad_token_id")
    if padding_id is None:
        config.refuse("pad_token_id", "missing; the first position follows from it.")
    if type(padding_id) is not int or not 0 <= padding_id < num_rows - 1:
        config.refuse("pad_token_id", f"a whole number from 0 to {num_rows - 2} is needed, not {padding_id!r}.")
    offset = padding_id + 1
    return dataclasses.replace(parsed, max_positions=num_rows - offset, position_offset=offset)
