"""What the other processes learn about a model, and whether its tokenizer fits.

A gateway tokenizes by these facts. An error that it would find in them is found here, before a worker says Hello.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from common.errors import InternalError
from common.text.chunks import ChunkTokenizer
from common.text.pairs import pair_tokenizer
from common.text.tokenization import Tokenizer
from common.wire.messages import ModelFacts
from worker.checkpoint.files import ModelError

if TYPE_CHECKING:
    from worker.checkpoint.declared import Checkpoint
    from worker.models.interface import Model


def length_limit(checkpoint: Checkpoint, model: Model) -> int:
    """The most tokens of a text: as declared, but never more than the model has positions for."""
    return min(checkpoint.length_limit or model.shape.max_positions, model.shape.max_positions)


def describe(
    checkpoint: Checkpoint,
    model: Model,
    *,
    name: str,
    fingerprint: str = "",
    dtype: str = "",
    device: str = "",
    attention: str = "",
    pooling: str = "",
    max_batch_tokens: int = 0,
) -> ModelFacts:
    """The facts of a model. The optional ones are known to a running engine alone."""
    scoring = checkpoint.scoring
    return ModelFacts(
        name=name,
        folder=str(checkpoint.folder),
        fingerprint=fingerprint,
        tokenizer_sha256=checkpoint.tokenizer_sha256,
        architecture=checkpoint.architecture,
        dtype=dtype,
        device=device,
        attention=attention,
        dimensions=checkpoint.dimensions,
        max_tokens=length_limit(checkpoint, model),
        vocab_size=model.shape.vocab_size,
        max_batch_tokens=max_batch_tokens,
        pooling=pooling,
        normalize=checkpoint.normalize,
        lower_case=checkpoint.lower_case,
        tasks=checkpoint.tasks,
        encodings=checkpoint.encodings,
        prompts=checkpoint.prompts,
        default_prompt_name=checkpoint.default_prompt_name,
        num_labels=0 if scoring is None else scoring.num_labels,
        labels=[] if scoring is None else list(scoring.labels),
        score_activation="" if scoring is None else scoring.activation,
        pair_template="" if scoring is None else scoring.pair_template,
        instruction=None if scoring is None else scoring.instruction,
        separator_id=checkpoint.separator_id,
        include_prompt=checkpoint.include_prompt,
        has_token_types=model.shape.has_token_types and (scoring is None or scoring.has_token_types),
    )


def check_pairs_and_chunks(facts: ModelFacts) -> None:
    """Raises ModelError: the tokenizer does not fit the pairs or the chunks that the model is for."""
    if not facts.pair_template and facts.separator_id is None:
        return
    try:
        tokenizer = Tokenizer(facts)
        if facts.pair_template:
            pair_tokenizer(facts, tokenizer)
        if facts.separator_id is not None:
            ChunkTokenizer(facts, tokenizer)
    except (OSError, ValueError, InternalError) as error:
        raise ModelError(f"{facts.folder}: {error}") from None
