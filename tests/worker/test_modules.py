"""Each way from hidden states to a row against sentence-transformers itself, on the same tiny folder.

sentence-transformers makes and saves every folder; what it writes no more (old flags, old files) is edited into it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Transformer,
)
from torch import nn
from transformers import BertConfig, BertModel, Gemma3TextConfig, Gemma3TextModel, PreTrainedModel
from transformers import PreTrainedTokenizerFast as FastTokenizer

from common.text.tokenization import Tokenizer, TruncationRule
from tests import parity
from tests.models import edit_json, make_batch, tokenizer, write_json
from tests.parity import VOCAB_SIZE
from tests.worker.conftest import make_engine
from worker.checkpoint.declared import Checkpoint
from worker.checkpoint.files import ModelError
from worker.engine.engine import Engine

pytestmark = pytest.mark.slow

WIDTH = 32
LIMIT = 40
POOLING = "1_Pooling/config.json"
SETTINGS = "config_sentence_transformers.json"
TRANSFORMER = "sentence_bert_config.json"
MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# One word, a few, capitals (which are no words here), more than there are positions, the few in another order.
TEXTS = ["w3", "w5 w9 w5 w55 w9", "W5 w9", " ".join(f"w{3 + 7 * i % 53}" for i in range(LIMIT + 20)), "w9 w5 w5 w55 w9"]
PROMPT = "w60 w61 w62 "

Rows = npt.NDArray[np.float32]
Edit = Callable[[Path], None]


def save_bare(model: PreTrainedModel, folder: Path) -> Path:
    parity.seeded(model).save_pretrained(folder)
    words = tokenizer(VOCAB_SIZE - 3)
    special = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[UNK]"}
    FastTokenizer(tokenizer_object=words, model_max_length=LIMIT, **special).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BertModel and its tokenizer."""
    shape = {"hidden_size": WIDTH, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=VOCAB_SIZE, max_position_embeddings=LIMIT, **shape))
    return save_bare(model, tmp_path_factory.mktemp("bare"))


def save(bare: Path, folder: Path, *modules: nn.Module, **options: object) -> Path:
    """What sentence-transformers writes of this model with these modules after it; their weights are random."""
    generator = torch.Generator().manual_seed(len(modules))
    with torch.no_grad():
        for parameter in (parameter for module in modules for parameter in module.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.5 * noise)
    model = SentenceTransformer(modules=[Transformer(str(bare)), *modules], device="cpu", **options)
    model.save(str(folder), create_model_card=False)
    return folder


def reference(folder: Path, texts: list[str] = TEXTS, **options: object) -> Rows:
    rows: Rows = SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=3, **options)
    return rows


def rows_of(engine: Engine, texts: list[str] = TEXTS, prompt_name: str | None = None) -> Rows:
    """Our rows, as a gateway asks for them where the client says nothing more."""
    facts = engine.hello()
    prompt_name = prompt_name or facts.default_prompt_name
    prompt = facts.prompts[prompt_name] if prompt_name else ""
    reader = Tokenizer(facts)
    ids = [row.tolist() for row in reader.encode([prompt + text for text in texts], TruncationRule(allowed=True))]
    first = 0 if facts.include_prompt else reader.prompt_length(prompt)
    batch = make_batch(
        ids,
        width=facts.dimensions,
        normalize=[int(facts.normalize)] * len(ids),
        spans=[[(first, len(row))] for row in ids] if first else None,
    )
    rows: Rows = engine.step(batch).numpy().rows.view(np.float32)
    return rows


def check(folder: Path, texts: list[str] = TEXTS, prompt_name: str | None = None) -> Engine:
    """Load the folder with both, and compare."""
    engine = make_engine(folder)
    expected = reference(folder, texts, prompt_name=prompt_name)
    rows = rows_of(engine, texts, prompt_name)
    assert rows.shape == expected.shape
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
    return engine


# --- poolings ---


@pytest.mark.parametrize("mode", MODES)
def test_each_pooling_is_that_of_sentence_transformers(bare: Path, tmp_path: Path, mode: str) -> None:
    engine = check(save(bare, tmp_path, Pooling(WIDTH, mode)))

    assert engine.hello().dimensions == WIDTH


@pytest.mark.parametrize(
    ("modes", "named"),
    [
        (("cls", "mean"), "cls+mean"),
        (("lasttoken", "max", "cls"), "last+max+cls"),
        (("weightedmean", "mean_sqrt_len_tokens"), "weighted_mean+mean_sqrt_len"),
    ],
)
def test_several_poolings_stand_side_by_side_in_their_order(
    bare: Path, tmp_path: Path, modes: tuple[str, ...], named: str
) -> None:
    engine = check(save(bare, tmp_path, Pooling(WIDTH, modes), Normalize()))

    assert (engine.hello().pooling, engine.hello().dimensions) == (named, len(modes) * WIDTH)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls+mean"),
        ({"pooling_mode_lasttoken": True, "pooling_mode_weightedmean_tokens": True}, "weighted_mean+last"),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_mean_tokens": False}, "mean_sqrt_len"),
        ({"pooling_mode": ["max"]}, "max"),
        ({"pooling_mode": "cls", "pooling_mode_cls_token": True}, "cls"),
        ({}, "mean"),
    ],
)
def test_older_and_newer_names_of_poolings_mean_the_same(
    bare: Path, tmp_path: Path, config: dict[str, object], named: str
) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH))
    write_json(folder / POOLING, {"word_embedding_dimension": WIDTH} | config)

    assert check(folder).hello().pooling == named


@pytest.mark.parametrize("mode", ["cls", "mean", "max", "lasttoken", "mean_sqrt_len_tokens", ["cls", "mean"]])
def test_a_prompt_that_is_not_to_be_pooled_is_left_out(bare: Path, tmp_path: Path, mode: str | list[str]) -> None:
    pooling = Pooling(WIDTH, mode, include_prompt=False)
    folder = save(bare, tmp_path, pooling, Normalize(), prompts={"query": PROMPT})

    engine = check(folder, prompt_name="query")

    assert not engine.hello().include_prompt
    check(folder)  # without a prompt nothing is left out


# --- what follows the pooling ---


@pytest.mark.parametrize(
    ("modules", "width"),
    [
        pytest.param([Dense(WIDTH, 20)], 20, id="tanh"),
        pytest.param([Dense(WIDTH, 20, bias=False, activation_function=nn.Identity())], 20, id="identity-no-bias"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.GELU())], 50, id="gelu"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.ReLU()), Normalize()], 50, id="relu"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.LeakyReLU())], 50, id="leaky-relu"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.ELU())], 50, id="elu"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.Sigmoid())], 50, id="sigmoid"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.SiLU())], 50, id="silu"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.Mish())], 50, id="mish"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.Softplus())], 50, id="softplus"),
        pytest.param([Dense(WIDTH, 50, activation_function=nn.Softsign())], 50, id="softsign"),
        pytest.param([Dense(WIDTH, WIDTH, use_residual=True)], WIDTH, id="residual"),
        pytest.param([Dense(WIDTH, 20, use_residual=True)], 20, id="residual-of-another-width"),
        pytest.param([LayerNorm(WIDTH)], WIDTH, id="layer-norm"),
        pytest.param([Normalize(), Dense(WIDTH, 20)], 20, id="normalize-first"),
        pytest.param([Dropout(0.5), Normalize(), Dropout(0.5)], WIDTH, id="dropout"),
        pytest.param(
            [Normalize(), Dense(WIDTH, 48), LayerNorm(48), Dropout(0.5), Dense(48, 7), Normalize()], 7, id="many"
        ),
    ],
)
def test_each_module_after_the_pooling_is_that_of_sentence_transformers(
    bare: Path, tmp_path: Path, modules: list[nn.Module], width: int
) -> None:
    engine = check(save(bare, tmp_path, Pooling(WIDTH), *modules))

    assert engine.hello().dimensions == width


@pytest.mark.parametrize(
    ("modules", "normalize"),
    [
        ([Dense(WIDTH, 20), Normalize()], True),
        ([Normalize(), Dropout(0.5)], True),
        ([Normalize(), Dense(WIDTH, 20)], False),
        ([], False),
    ],
)
def test_a_normalisation_at_the_end_is_the_checkpoints_own_and_can_be_left_off(
    bare: Path, tmp_path: Path, modules: list[nn.Module], normalize: bool
) -> None:
    engine = make_engine(save(bare, tmp_path, Pooling(WIDTH), *modules))
    width = engine.hello().dimensions

    row = engine.step(make_batch([[1, 5, 9, 2]], width=width, normalize=[0])).numpy().rows.view(np.float32)

    assert engine.hello().normalize is normalize
    assert np.abs(np.linalg.norm(row) - 1) > 1e-2


def embedding_gemma_modules() -> list[nn.Module]:
    identity = {"bias": False, "activation_function": nn.Identity()}
    return [
        Pooling(WIDTH, "mean"),
        Dense(WIDTH, 4 * WIDTH, **identity),
        Dense(4 * WIDTH, WIDTH, **identity),
        Normalize(),
    ]


def test_the_projections_of_embedding_gemma_are_run(tmp_path: Path) -> None:
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=LIMIT,
        sliding_window=8,
        use_bidirectional_attention=True,
    )
    folder = save(save_bare(Gemma3TextModel(config), tmp_path / "bare"), tmp_path, *embedding_gemma_modules())

    engine = check(folder)

    assert (engine.hello().dimensions, engine.hello().normalize) == (WIDTH, True)


def test_fewer_dimensions_are_those_of_the_last_module_at_unit_length(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, 24), Normalize())
    engine = make_engine(folder)
    ids = [[1, 5, 9, 2]]

    whole = engine.step(make_batch(ids, width=24, normalize=[1])).numpy().rows.view(np.float32)
    few = engine.step(make_batch(ids, width=24, normalize=[1], dimensions=[10])).numpy().rows.view(np.float32)

    np.testing.assert_allclose(few[0, :10], whole[0, :10] / np.linalg.norm(whole[0, :10]), atol=1e-6)


def test_dimensions_that_a_checkpoint_is_cut_to_are_its_dimensions(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Normalize(), truncate_dim=12)

    engine = check(folder)  # not at unit length, as in sentence-transformers

    assert (engine.hello().dimensions, engine.hello().normalize) == (12, False)


def test_more_dimensions_than_there_are_cut_nothing(bare: Path, tmp_path: Path) -> None:
    engine = check(save(bare, tmp_path, Pooling(WIDTH), Normalize(), truncate_dim=100))

    assert (engine.hello().dimensions, engine.hello().normalize) == (WIDTH, True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_in_half_precision_are_widened(bare: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, 20))
    path = folder / "2_Dense" / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(path).items()}, path)

    check(folder)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mode", ["mean", ("cls", "mean"), ("weightedmean", "lasttoken", "max")])
def test_on_a_gpu_all_of_it_is_part_of_a_steps_graph(bare: Path, tmp_path: Path, mode: str | tuple[str, ...]) -> None:
    pooling = Pooling(WIDTH, mode)
    width = pooling.get_embedding_dimension()
    folder = save(bare, tmp_path / "model", pooling, Normalize(), Dense(width, 48), LayerNorm(48), Dense(48, 20))
    expected = rows_of(make_engine(folder))

    engine = make_engine(folder, device="cuda", cache_dir=str(tmp_path / "cache"))

    for _ in range(3):  # eager, captured or eager again, replayed
        rows = rows_of(engine)
        engine.idle_work()
        cosines = (rows * expected).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(expected, axis=1)
        assert cosines.min() >= 0.999


# --- every flag counts ---


def edit(file: str, **changes: object) -> Edit:
    return lambda folder: edit_json(folder / file, **changes)


def without(kind: str) -> Edit:
    def remove(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_text())
        write_json(folder / "modules.json", [entry for entry in entries if not entry["type"].endswith(kind)])

    return remove


@pytest.fixture(scope="module")
def rich(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = [Pooling(WIDTH), Dense(WIDTH, 24), LayerNorm(24), Dense(24, 24, bias=False), Normalize()]
    return save(bare, tmp_path_factory.mktemp("rich"), *modules, prompts={"query": PROMPT, "document": "w61 "})


@pytest.mark.parametrize(
    "flip",
    [
        *(pytest.param(edit(POOLING, pooling_mode=mode), id=mode) for mode in MODES if mode != "mean"),
        pytest.param(edit("2_Dense/config.json", activation_function="torch.nn.modules.activation.ReLU"), id="relu"),
        pytest.param(edit("4_Dense/config.json", use_residual=True), id="residual"),
        pytest.param(without("LayerNorm"), id="no-layer-norm"),
        pytest.param(without("Normalize"), id="no-normalize"),
        pytest.param(edit(SETTINGS, truncate_dim=16), id="truncate_dim"),
        pytest.param(edit(SETTINGS, default_prompt_name="query"), id="default_prompt_name"),
        pytest.param(edit(TRANSFORMER, max_seq_length=6), id="max_seq_length"),
        pytest.param(edit("tokenizer_config.json", model_max_length=6), id="model_max_length"),
        pytest.param(edit(TRANSFORMER, do_lower_case=True), id="do_lower_case"),
    ],
)
def test_each_flag_changes_the_vector_as_it_does_in_sentence_transformers(
    rich: Path, tmp_path: Path, flip: Edit
) -> None:
    for path in rich.rglob("*.*"):
        copy = tmp_path / path.relative_to(rich)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    flip(tmp_path)

    before, engine = make_engine(rich), check(tmp_path)

    rows, former = rows_of(engine), rows_of(before)
    assert rows.shape != former.shape or np.abs(rows - former).max() > 1e-3


def test_a_prompt_that_is_left_out_changes_the_vector(bare: Path, tmp_path: Path) -> None:
    folders = [
        save(bare, tmp_path / str(flag), Pooling(WIDTH, include_prompt=flag), prompts={"query": PROMPT})
        for flag in (True, False)
    ]

    with_prompt, without_prompt = (rows_of(check(folder, prompt_name="query"), TEXTS, "query") for folder in folders)

    assert np.abs(with_prompt - without_prompt).max() > 1e-3


# --- limits ---


@pytest.mark.parametrize(
    ("max_seq_length", "tokenizer_limit", "expected"),
    [(9, 30, 9), (30, 9, 30), (None, 9, 9), (None, int(1e30), LIMIT), (None, LIMIT + 500, LIMIT), (None, None, LIMIT)],
)
def test_the_length_limit_is_that_of_sentence_transformers(
    bare: Path, tmp_path: Path, max_seq_length: int | None, tokenizer_limit: int | None, expected: int
) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH))
    edit_json(folder / TRANSFORMER, max_seq_length=max_seq_length)
    edit_json(folder / "tokenizer_config.json", model_max_length=tokenizer_limit)

    engine = check(folder)

    assert engine.hello().max_tokens == SentenceTransformer(str(folder), device="cpu").max_seq_length == expected


def test_a_limit_above_the_position_table_is_cut_to_it_and_said(
    bare: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH))
    edit_json(folder / TRANSFORMER, max_seq_length=LIMIT + 500)

    with caplog.at_level("INFO"):
        engine = make_engine(folder)

    assert engine.hello().max_tokens == LIMIT
    assert f"a limit of {LIMIT + 500} tokens is cut to its {LIMIT} positions" in caplog.text


# --- what older releases have written ---


def test_a_folder_of_an_older_release_loads(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, 20), Normalize())
    (folder / TRANSFORMER).unlink()
    write_json(folder / "sentence_roberta_config.json", {"max_seq_length": 11, "do_lower_case": False})
    write_json(folder / SETTINGS, {"__version__": {"sentence_transformers": "2.0.0"}})
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False, "pooling_mode_max_tokens": True}
    write_json(
        folder / POOLING, {"word_embedding_dimension": WIDTH, "pooling_mode_mean_sqrt_len_tokens": False} | flags
    )
    dense = {"in_features": WIDTH, "out_features": 20, "bias": True}
    activation = {"activation_function": "torch.nn.modules.activation.Tanh"}
    write_json(folder / "2_Dense/config.json", dense | activation)
    (folder / "3_Normalize/config.json").unlink()
    write_json(
        folder / "modules.json",
        [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
            {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
            {"idx": 3, "name": "3", "path": "3_Normalize", "type": "sentence_transformers.models.Normalize"},
        ],
    )

    engine = check(folder)

    assert (engine.hello().pooling, engine.hello().max_tokens, engine.hello().normalize) == ("max", 11, True)


def test_a_bare_folder_is_pooled_as_sentence_transformers_pools_it(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH, "cls"), Normalize(), prompts={"query": PROMPT})
    edit_json(folder / SETTINGS, default_prompt_name="query")
    edit_json(folder / TRANSFORMER, max_seq_length=7)
    (folder / "modules.json").unlink()

    engine = check(folder)

    assert (engine.hello().pooling, engine.hello().normalize, engine.hello().prompts) == ("mean", False, {})


# --- weights and fingerprint ---


def test_the_fingerprint_depends_on_what_follows_the_pooling(rich: Path, bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, WIDTH))
    path = folder / "2_Dense" / "model.safetensors"
    prints = {make_engine(folder).hello().fingerprint}

    edit_json(folder / "2_Dense/config.json", activation_function="torch.nn.ReLU")
    prints.add(make_engine(folder).hello().fingerprint)
    edit_json(folder / "2_Dense/config.json", use_residual=True)
    prints.add(make_engine(folder).hello().fingerprint)
    save_file({name: tensor + 0.5 for name, tensor in load_file(path).items()}, path)
    prints.add(make_engine(folder).hello().fingerprint)
    edit_json(folder / POOLING, include_prompt=False)
    prints.add(make_engine(folder).hello().fingerprint)

    assert len(prints) == 5


def test_the_fingerprint_does_not_depend_on_where_the_folder_is(bare: Path, tmp_path: Path) -> None:
    folders = [save(bare, tmp_path / name, Pooling(WIDTH), Dense(WIDTH, 20)) for name in ("one", "other")]

    one, other = (make_engine(folder).hello().fingerprint for folder in folders)

    assert one == other


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bias": False}, r"Missing tensors: none\. Unexpected tensors: linear\.bias\."),
        ({"out_features": 21}, r"tensor linear\.bias: shape \[20\], but the model needs \[21\]"),
        ({"use_residual": True}, r"Missing tensors: residual\.weight\."),
    ],
)
def test_weights_that_are_not_those_of_the_module_are_refused(
    bare: Path, tmp_path: Path, config: dict[str, object], message: str
) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, 20))
    edit_json(folder / "2_Dense/config.json", **config)

    with pytest.raises(ModelError, match=rf"2_Dense/model\.safetensors: .*{message}"):
        make_engine(folder)


def test_weights_of_a_module_that_are_not_finite_are_refused(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), LayerNorm(WIDTH))
    path = folder / "2_LayerNorm" / "model.safetensors"
    save_file(load_file(path) | {"norm.bias": torch.full((WIDTH,), torch.nan)}, path)

    with pytest.raises(ModelError, match=r"2_LayerNorm/model\.safetensors: tensor norm\.bias: holds a NaN"):
        make_engine(folder)


def test_weights_in_another_format_are_refused_with_a_way_out(bare: Path, tmp_path: Path) -> None:
    folder = save(bare, tmp_path, Pooling(WIDTH), Dense(WIDTH, 20))
    (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")

    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors is missing: .*found pytorch_model\.bin; if you"):
        Checkpoint.read(folder)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("2_Dense/config.json", {"in_features": 31}, "in_features: 31, but the rows that come are 32 wide"),
        ("2_Dense/config.json", {"out_features": None}, "out_features: missing"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Threshold"}, "activation_function: 'torch.nn.Thr"),
        ("2_Dense/config.json", {"activation_function": "torch.tanh"}, "activation_function: 'torch.tanh' is not"),
        ("2_Dense/config.json", {"activation_function": "evil.Tanh"}, "activation_function: 'evil.Tanh' is not"),
        ("2_Dense/config.json", {"activation_function": None}, "activation_function: None is not"),
        ("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name: only 'sentence_emb"),
        ("2_Dense/config.json", {"module_output_name": "other"}, "module_output_name: only 'sentence_embedding'"),
        ("2_Dense/config.json", {"scale": 2}, "scale: a field that is not understood"),
        ("2_Dense/config.json", {"bias": "yes"}, "bias: true or false is needed"),
        ("3_LayerNorm/config.json", {"dimension": 23}, "dimension: 23, but the rows that come are 24 wide"),
        ("3_LayerNorm/config.json", {"epsilon": 1e-3}, "epsilon: a field that is not understood"),
        ("5_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name: only 'sentence"),
        ("5_Normalize/config.json", {"p": 1}, "p: a field that is not understood"),
        (POOLING, {"pooling_mode": "weightedmean", "include_prompt": False}, "include_prompt: false is not supported"),
    ],
)
def test_what_a_module_cannot_be_is_refused(
    rich: Path, tmp_path: Path, file: str, changes: dict[str, object], message: str
) -> None:
    for path in rich.rglob("*.*"):
        copy = tmp_path / path.relative_to(rich)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    edit_json(tmp_path / file, **changes)

    with pytest.raises(ModelError, match=f"{file}: {message}"):
        Checkpoint.read(tmp_path)
