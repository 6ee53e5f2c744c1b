"""What a folder declares changes its vectors exactly as it does in sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.model_location import find_model
from common.text.tokenization import Tokenizer, TruncationRule
from tests.models import make_batch
from tests.variants import TEXTS, VARIANTS, write_variant
from tests.worker.conftest import make_engine

REFERENCE = Path(__file__).parent.parent / "data" / "variant_reference.npz"


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_an_edited_folder_gives_the_vectors_that_sentence_transformers_gives(name: str, tmp_path: Path) -> None:
    write_variant(find_model("all-MiniLM-L6-v2").path, tmp_path, name)
    engine = make_engine(tmp_path)
    facts = engine.hello()
    prompt = facts.prompts[facts.default_prompt_name] if facts.default_prompt_name else ""
    sequences = Tokenizer(facts).encode([prompt + text for text in TEXTS], TruncationRule(allowed=True))
    batch = make_batch(
        [ids.tolist() for ids in sequences], width=384, normalize=[int(facts.normalize)] * len(sequences)
    )
    with np.load(REFERENCE, allow_pickle=False) as reference:
        expected = reference[name]
    tolerance = 1e-5 * float(np.linalg.norm(expected, axis=1).max())  # of rows that are not normalised, in proportion
    assert np.abs(engine.step(batch).numpy().rows.view(np.float32) - expected).max() <= tolerance


def test_the_variants_differ_so_that_each_of_them_is_tested() -> None:
    with np.load(REFERENCE, allow_pickle=False) as reference:
        rows = {name: reference[name] for name in VARIANTS}
    same = {name for name in VARIANTS if np.allclose(rows[name], rows["unchanged"], atol=5e-5)}
    assert same == {"unchanged", "later_class_names"}
    np.testing.assert_allclose(rows["cls"], rows["cls_by_name"], atol=1e-6)
