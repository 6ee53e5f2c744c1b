"""What a folder declares about scores: how many a pair gets, what is done with them, and how a pair is written.

Two kinds of model score. A classifier has a head of its own. A language model answers by its next token: the score is
the logit of one token, usually minus that of another. Whether a language model scores is never guessed. Its folder says
so (a LogitScore module of sentence-transformers), or the operator does (`--task score`). The published folders of
Qwen3-Reranker and bge-reranker-v2-gemma declare nothing, so they need the operator.

Scores leave the worker as the model makes them. sentence-transformers' CrossEncoder then applies an activation. It
keeps their order, so the worker only reports it (`activation`), and the gateway applies it.

A pair is written as the tokenizer writes one. The template of an architecture is used only if the operator asks for it.
A checkpoint's chat template is a program, and never run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypeAlias

from common.wire.messages import MAX_LABELS_BYTES, OWN_PAIRS, labels_bytes
from worker.checkpoint.architectures import ARCHITECTURES

if TYPE_CHECKING:
    from worker.checkpoint.architectures import Architecture, Template
    from worker.checkpoint.files import JsonFile

Task: TypeAlias = Literal["auto", "embed", "score", "sparse"]
Activation: TypeAlias = Literal["identity", "sigmoid"]

# A Transformer with this modality puts texts into a chat template.
MESSAGE = "message"

_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "torch.nn.Sigmoid": "sigmoid",
        "torch.nn.modules.activation.Sigmoid": "sigmoid",
        "torch.nn.Identity": "identity",
        "torch.nn.modules.linear.Identity": "identity",
    }
)

# The only tokenizer of transformers, among those of the models served here, that tells a pair's texts apart.
_TYPING_TOKENIZER = "BertTokenizer"

# transformers writes no `id2label` for this number of labels.
_DEFAULT_NUM_LABELS = 2


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """The tokens that a language model scores by: logit(yes) - logit(no), or only logit(yes)."""

    yes: int
    no: int | None
    tied: bool  # the embedding table is the language-model head, unless a head is stored


@dataclass(frozen=True, slots=True)
class Scoring:
    labels: tuple[str, ...]  # the names of a pair's scores, in their order
    activation: Activation
    pair_template: str
    instruction: str | None  # default for the template; None: the template's own default
    has_token_types: bool  # whether the tokenizer tells a pair's second text from its first; the model must, too
    answers: AnswerTokens | None  # None: the model has a head of its own

    @property
    def num_labels(self) -> int:
        """The scores of a pair."""
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class CrossEncoderFiles:
    """The files of a CrossEncoder as sentence-transformers saves it; a missing one has no fields."""

    settings: JsonFile  # config_sentence_transformers.json
    transformer: JsonFile  # sentence_bert_config.json
    tokenizer: JsonFile  # tokenizer_config.json
    logit_score: JsonFile | None  # the config.json of a LogitScore

    @property
    def has_chat_template(self) -> bool:
        """Whether pairs are put into a chat template."""
        modalities = self.transformer.values.get("modality_config")
        return isinstance(modalities, dict) and MESSAGE in modalities

    def default_prompt(self) -> str | None:
        """The text before a query unless a client says otherwise; None if there is none.

        Raises:
            ModelError: it is not among the prompts.
        """
        name, prompts = self.settings.text("default_prompt_name"), self.settings.values.get("prompts")
        if name is None:
            return None
        text = prompts.get(name) if isinstance(prompts, dict) else None
        if not isinstance(text, str):
            self.settings.refuse("default_prompt_name", f"{name!r} is none of the prompts.")
        return text or None


def read_classifier(architecture: Architecture, config: JsonFile, files: CrossEncoderFiles) -> Scoring:
    """The scores of a model with a head of its own.

    Raises:
        ModelError: a field is not understood, or pairs would be put into a chat template.
    """
    if files.has_chat_template:
        files.transformer.refuse("modality_config", f"{MESSAGE!r}: pairs in a chat template are not supported.")
    if files.default_prompt() is not None:
        files.settings.refuse("default_prompt_name", "a prompt before every query is not supported.")
    labels = _read_labels(config)
    return Scoring(
        labels=labels,
        activation=_read_activation(config, files.settings, len(labels)),
        pair_template=OWN_PAIRS,
        instruction=None,
        has_token_types=_read_token_types(architecture, config, files.tokenizer),
        answers=None,
    )


def read_language_model(
    architecture: Architecture, config: JsonFile, files: CrossEncoderFiles, task: Task, vocabulary: Mapping[str, int]
) -> Scoring:
    """The score of a model that answers by its next token.

    Raises:
        ModelError: a field is not understood, or only the operator can say how the model scores.
    """
    template = None
    if files.logit_score is None or files.has_chat_template:
        template = _find_template(architecture, config, files, task)
    instruction = files.default_prompt()
    if instruction is not None and template is None:
        files.settings.refuse("default_prompt_name", "a prompt before every query is not supported.")
    return Scoring(
        labels=_default_labels(1),
        activation=_read_activation(config, files.settings, 1),
        pair_template=OWN_PAIRS if template is None else template.pair_template,
        instruction=instruction,
        has_token_types=False,
        answers=_read_answers(architecture, config, files.logit_score, vocabulary, template),
    )


def _find_template(architecture: Architecture, config: JsonFile, files: CrossEncoderFiles, task: Task) -> Template:
    """Raises ModelError: the operator does not ask for a template, or the architecture has none."""
    template = architecture.template
    if task != "score":
        why = f"{MESSAGE!r}: pairs are put into a chat template, which is a program and never run."
        if template is not None:
            why += f" If this is a {template.model}, --task score serves it with that model's own template."
        files.transformer.refuse("modality_config", why)
    if template is None:
        rows = ARCHITECTURES.values()
        known = " and ".join(f"{row.template.model} ({row.name})" for row in rows if row.template is not None)
        config.refuse(
            "architectures",
            f"--task score: of language models only {known} are known by their templates, not a {architecture.name}.",
        )
    return template


def read_num_labels(config: JsonFile) -> int:
    """How many scores a classifier gives.

    Raises:
        ModelError: none, or two fields disagree.

    Source: transformers' PreTrainedConfig: `id2label` has a name for each; without it `num_labels` counts, or it is 2.
    """
    names = config.values.get("id2label")
    number = config.optional_integer("num_labels")
    if names is None:
        return _DEFAULT_NUM_LABELS if number is None else number
    if not isinstance(names, dict) or not names:
        config.refuse("id2label", f"a map with at least one label is needed, not {names!r}.")
    if number is not None and number != len(names):
        config.refuse("num_labels", f"{number}, but id2label has {len(names)}.")
    return len(names)


def _read_labels(config: JsonFile) -> tuple[str, ...]:
    """The names of a classifier's scores.

    Raises:
        ModelError: not each of them has one, or they are too long.

    Source: transformers' PreTrainedConfig, which calls those without names LABEL_0, LABEL_1 and so on.
    """
    num_labels = read_num_labels(config)
    names = config.values.get("id2label")
    if not isinstance(names, dict):  # `read_num_labels` has passed it: there are none
        labels = _default_labels(num_labels)
    else:
        found = [names.get(str(label)) for label in range(num_labels)]
        if not all(type(name) in (str, int) for name in found):  # a few checkpoints have numbers for names
            config.refuse("id2label", f'a name for each of "0" to "{num_labels - 1}" is needed.')
        labels = tuple(map(str, found))
    if labels_bytes(labels) > MAX_LABELS_BYTES:
        config.refuse("id2label", f"the names have more than {MAX_LABELS_BYTES} bytes together.")
    return labels


def _default_labels(num_labels: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{label}" for label in range(num_labels))


def _read_activation(config: JsonFile, settings: JsonFile, num_labels: int) -> Activation:
    """Source: sentence-transformers' CrossEncoder, the places where its releases have kept it, the latest first."""
    nested = config.values.get("sentence_transformers") or {}
    if not isinstance(nested, dict) or not {"activation_fn", "version"}.issuperset(nested):
        config.refuse("sentence_transformers", f"only activation_fn and version are understood, not {nested!r}.")
    file, field, name = settings, "activation_fn", settings.values.get("activation_fn")
    if name is None:
        file, field = config, "sbert_ce_default_activation_function"
        name = config.values.get(field)
        if "activation_fn" in nested:
            field, name = "sentence_transformers.activation_fn", nested["activation_fn"]
    if name is None:
        return "sigmoid" if num_labels == 1 else "identity"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        file.refuse(field, f"{name!r} is not supported; supported are {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _read_token_types(architecture: Architecture, config: JsonFile, tokenizer: JsonFile) -> bool:
    """Source: transformers' tokenizers: `model_input_names`, or else what their class has."""
    num_types = config.values.get("type_vocab_size")
    if type(num_types) is not int or num_types < 2:
        return False
    names = tokenizer.values.get("model_input_names")
    if names is not None:
        if not isinstance(names, list):
            tokenizer.refuse("model_input_names", f"a list of names is needed, not {names!r}.")
        return "token_type_ids" in names
    kind = tokenizer.text("tokenizer_class") or config.text("tokenizer_class")
    if kind is None:
        # Without a `model_type` transformers knows of no class.
        return architecture.types_tokens and config.text("model_type") is not None
    if kind == "PreTrainedTokenizerFast":
        tokenizer.refuse(
            "model_input_names",
            f"missing, and a {kind} gives pairs token types before transformers 5 and none since. Write the names, "
            "with token_type_ids if the model was trained with them.",
        )
    return kind.removesuffix("Fast") == _TYPING_TOKENIZER


def _read_answers(
    architecture: Architecture,
    config: JsonFile,
    logit_score: JsonFile | None,
    vocabulary: Mapping[str, int],
    template: Template | None,
) -> AnswerTokens:
    """The tokens that a LogitScore names. A template has its own tokens, which a LogitScore may only repeat."""
    yes = no = None
    if logit_score is not None:
        logit_score.refuse_unknown(frozenset({"true_token_id", "false_token_id", "module_input_name"}))
        if logit_score.text("module_input_name") not in (None, "causal_logits"):
            logit_score.refuse("module_input_name", "only 'causal_logits' is supported.")
        yes, no = _token_id(config, logit_score, "true_token_id"), _token_id(config, logit_score, "false_token_id")
        if yes is None:
            logit_score.refuse("true_token_id", "missing: the token by whose logit a pair is scored.")
    if template is not None:
        words = [word for word in (template.yes, template.no) if word is not None]
        for word in words:
            if word not in vocabulary:
                config.refuse(
                    "vocab_size", f"no token {word!r}, by which a {template.model} answers, is in the vocabulary."
                )
        spelled = (vocabulary[template.yes], None if template.no is None else vocabulary[template.no])
        if logit_score is not None and (yes, no) != spelled:
            answers = ", ".join(map(repr, words))
            logit_score.refuse(
                "true_token_id, false_token_id",
                f"{yes}, {no}, but a {template.model} answers by {answers}: {spelled}.",
            )
        yes, no = spelled
    assert yes is not None, "neither a LogitScore nor a template: this is a bug"
    return AnswerTokens(yes, no, config.flag("tie_word_embeddings", default=architecture.is_tied))


def _token_id(config: JsonFile, logit_score: JsonFile, field: str) -> int | None:
    value = logit_score.values.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < config.integer("vocab_size"):
        logit_score.refuse(field, f"a token id below vocab_size is needed, not {value!r}.")
    return value
