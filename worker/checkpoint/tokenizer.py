"""A model's tokenizer.json, and whether it says everything about the tokenizer.

Texts are tokenized only as tokenizer.json says (`common.text.tokenization`). transformers reads tokenizer_config.json,
too. Some of its classes rebuild the normalisation, or the space before a text, from that file and from defaults of
their own, and it adds the tokens that the file lists. If that would give other tokens than tokenizer.json, the start is
refused with file and field. Following the settings instead was rejected: nothing tells which of the two files a model
was trained with.

Fields that change no token are ignored: whether offsets are trimmed, how text is decoded, how a batch is padded.

Source: transformers 5.24, models/auto/tokenization_auto.py, AutoTokenizer.from_pretrained (which class is taken);
tokenization_utils_tokenizers.py, TokenizersBackend (what a class takes of tokenizer.json), and each class's own file.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from common.text.tokenization import load_tokenizer
from worker.checkpoint.files import JsonFile, ModelError, read_file

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

logger = logging.getLogger(__name__)

# The token that joins the chunks of pplx-embed-context, unless its tokenizer's settings name another.
_PPLX_SEPARATOR = "<|endoftext|>"

# At least one of these texts can be tokenized by any tokenizer in use; the last gives only the tokens around a text.
_PROBES = ("a", "0", ".", "")

# transformers' tokenizer class for a `model_type` whose files name no class. For other types tokenizer.json is all.
_CLASS_OF_TYPE: Mapping[str, str] = MappingProxyType(
    {
        "bert": "BertTokenizer",
        "distilbert": "BertTokenizer",
        "nomic_bert": "BertTokenizer",
        "mpnet": "MPNetTokenizer",
        "roberta": "RobertaTokenizer",
        "xlm-roberta": "XLMRobertaTokenizer",
        "gte": "XLMRobertaTokenizer",
        "camembert": "CamembertTokenizer",
        "qwen3": "Qwen2Tokenizer",
    }
)

# Model types for which transformers takes tokenizer.json as it is, whatever class the files name.
_TYPES_OF_FILE_ALONE = frozenset({"modernbert", "qwen2", "mistral"})

# Classes that make a BertNormalizer of their own. Some are other names of BertTokenizer.
_BERT_CLASSES = frozenset(
    {"BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer", "ElectraTokenizer", "MobileBertTokenizer"}
)

# Their settings, the name of each in tokenizer.json, and its default.
_BERT_SETTINGS = (("do_lower_case", "lowercase", True), ("tokenize_chinese_chars", "handle_chinese_chars", True))

# Classes that make a pre-tokenizer of their own: its type, and the default of `add_prefix_space`, which puts a space
# before each text.
_PREFIX_CLASSES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "RobertaTokenizer": ("ByteLevel", False),
        "GPT2Tokenizer": ("ByteLevel", False),
        "Qwen2Tokenizer": ("ByteLevel", False),
        "XLMRobertaTokenizer": ("Metaspace", True),
        "CamembertTokenizer": ("Metaspace", True),
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerFile:
    """A model's tokenizer.json, which says everything about its tokenizer."""

    path: Path
    sha256: str
    settings: JsonFile  # tokenizer_config.json; without fields if it is missing
    vocab_size: int  # rows of the embedding table
    tokenizer: Tokenizer

    @classmethod
    def read(cls, folder: Path, config: JsonFile) -> TokenizerFile:
        """The tokenizer beside config.json, loaded once: a large one takes most of a second.

        Raises:
            ModelError: tokenizer.json is missing or malformed, has words without a row in the embedding table, or
                contradicts its settings.
        """
        path = folder / "tokenizer.json"
        content = read_file(path)
        try:
            tokenizer = load_tokenizer(content)
        except Exception as error:  # noqa: BLE001  # the library raises plain Exception
            raise ModelError(f"{path}: not a tokenizer: {error}") from None
        file = cls(
            path=path,
            sha256=hashlib.sha256(content).hexdigest(),
            settings=JsonFile.read_optional(folder / "tokenizer_config.json"),
            vocab_size=config.integer("vocab_size"),
            tokenizer=tokenizer,
        )
        file._check_ids(config)
        file._check_settings()
        file._check_added_tokens()
        kind = _class_name(file.settings, config)
        if kind in _BERT_CLASSES:
            file._check_normalization(kind)
        elif kind in _PREFIX_CLASSES:
            file._check_prefix_space(kind)
        return file

    def vocabulary(self) -> dict[str, int]:
        """Token → id, for all tokens that have a row in the embedding table."""
        tokens = self.tokenizer.get_vocab(with_added_tokens=True)
        return {token: number for token, number in tokens.items() if number < self.vocab_size}

    def separator_id(self) -> int:
        """The token that joins the chunks of pplx-embed-context: its own code takes the tokenizer's separator."""
        text = _content(self.settings.values.get("sep_token")) or _PPLX_SEPARATOR
        separator_id = self.vocabulary().get(text)
        if separator_id is None:
            self.settings.refuse("sep_token", f"{text!r} is no token of tokenizer.json.")
        return separator_id

    def check_room(self, length_limit: int | None) -> None:
        """Raises ModelError: special tokens leave no room for a text of at most `length_limit` tokens."""
        num_special = self.tokenizer.num_special_tokens_to_add(is_pair=False)
        if length_limit is not None and num_special >= length_limit:
            raise ModelError(
                f"{self.path}: its {num_special} special tokens alone fill the {length_limit} that a text may have."
            )

    def _check_ids(self, config: JsonFile) -> None:
        """Raises ModelError: a word, or a special token around a text, has no row in the embedding table.

        Added tokens may lie beyond the table, as EmbeddingGemma's <image_soft_token> does. A text that contains one is
        refused when it arrives.
        """
        added = self.tokenizer.get_added_tokens_decoder()
        largest = max(self.tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)
        for is_pair in (False, True):
            around = self._probe(is_pair)
            numbers = zip(around.ids, around.special_tokens_mask, strict=True) if around else ()
            largest = max([largest, *(number for number, is_special in numbers if is_special)])
        if largest >= self.vocab_size:
            raise ModelError(
                f"{self.path}: its ids go up to {largest}, but {config.path}: vocab_size is {self.vocab_size}."
            )
        if beyond := [token.content for number, token in sorted(added.items()) if number >= self.vocab_size]:
            logger.info(
                "%s: added tokens beyond the embedding table's %d rows, which no text may spell: %s",
                self.path,
                self.vocab_size,
                ", ".join(beyond),
            )

    def _probe(self, is_pair: bool) -> Encoding | None:
        """How a short text or pair is encoded; None if no probe can be."""
        for probe in _PROBES:
            try:
                return self.tokenizer.encode(probe, probe if is_pair else None)
            except Exception:  # noqa: BLE001  # the library raises plain Exception; the word is not in the vocabulary
                continue
        return None

    def _check_settings(self) -> None:
        settings = self.settings
        if settings.values.get("auto_map"):
            settings.refuse("auto_map", "this tokenizer brings its own code, which is never run.")
        if settings.flag("split_special_tokens", default=False):
            settings.refuse(
                "split_special_tokens", "true is not supported: text that spells a special token is that token."
            )
        if settings.text("truncation_side") not in (None, "right"):
            logger.info(
                "%s: truncation_side: here a request says which end of a text is cut, by default the right",
                settings.path,
            )
        # Some of transformers' tokenizers add these tokens themselves; here only tokenizer.json does.
        encoding = self._probe(is_pair=False)
        tokens = encoding.tokens if encoding else []
        for field, token_field, place in (("add_bos_token", "bos_token", 0), ("add_eos_token", "eos_token", -1)):
            if not settings.flag(field, default=False):
                continue
            text = _content(settings.values.get(token_field))
            if not tokens or tokens[place] != text:
                settings.refuse(field, f"true, but {self.path.name} does not add {text!r}.")

    def _check_added_tokens(self) -> None:
        """Raises ModelError: a listed token is not in tokenizer.json. transformers would find it in any text."""
        listed = self.settings.values.get("added_tokens_decoder") or {}
        if not isinstance(listed, dict):
            self.settings.refuse("added_tokens_decoder", "a map of ids to tokens is needed.")
        added = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        for token in listed.values():
            text = _content(token)
            if text is None:
                self.settings.refuse("added_tokens_decoder", f"{token!r} is no token.")
            if text in added:
                continue
            # A special token that is a plain word here is found as well, unless a text spells it within another word.
            is_special = isinstance(token, dict) and token.get("special") is True
            if not is_special or self.tokenizer.token_to_id(text) is None:
                self.settings.refuse("added_tokens_decoder", f"{text!r} is no added token of {self.path.name}.")

    def _check_normalization(self, kind: str) -> None:
        """Raises ModelError: the BertNormalizer contradicts the settings. Another normalizer is taken as it is."""
        for done in _components(self.tokenizer.normalizer):
            if done.get("type") != "BertNormalizer":
                continue
            asked = {own: self.settings.flag(field, default=default) for field, own, default in _BERT_SETTINGS}
            for field, own, _ in _BERT_SETTINGS:
                if asked[own] != done.get(own):
                    self._refuse_contradiction(field, kind, asked[own], f"the normalizer of {{}} has {own} {done[own]}")
            # By default accents are stripped if letters are made small.
            strips, stripped = self.settings.values.get("strip_accents"), done.get("strip_accents")
            strips = asked["lowercase"] if strips is None else strips
            stripped = done.get("lowercase") if stripped is None else stripped
            if strips != stripped:
                why = f"the normalizer of {{}} has strip_accents {done.get('strip_accents')}"
                self._refuse_contradiction("strip_accents", kind, strips, why)
            if done.get("clean_text") is not True:
                raise ModelError(f"{self.path}: normalizer: clean_text is not true, as that of a {kind} always is.")

    def _check_prefix_space(self, kind: str) -> None:
        """Raises ModelError: the pre-tokenizer contradicts `add_prefix_space`. (The post-processor's flag of that name
        concerns only offsets.)"""
        made, default = _PREFIX_CLASSES[kind]
        asked = self.settings.flag("add_prefix_space", default=default)
        for done in _components(self.tokenizer.pre_tokenizer):
            if done.get("type") != made:
                continue
            does = done["prepend_scheme"] != "never" if made == "Metaspace" else done["add_prefix_space"]
            if asked != does:
                why = f"the pre-tokenizer of {{}} {'puts a' if does else 'puts no'} space before a text"
                self._refuse_contradiction("add_prefix_space", kind, asked, why)

    def _refuse_contradiction(self, field: str, kind: str, asked: object, why: str) -> None:
        value = self.settings.values.get(field)
        asks = f"{value!r}" if value is not None else f"missing, which for a {kind} is {asked!r}"
        self.settings.refuse(field, f"{asks}, but {why.format(self.path.name)}.")


def _class_name(settings: JsonFile, config: JsonFile) -> str:
    """The class of transformers that reads the tokenizer; "" if it takes tokenizer.json as it is."""
    model_type = config.text("model_type") or ""
    if model_type in _TYPES_OF_FILE_ALONE:
        return ""
    named = settings.text("tokenizer_class") or config.text("tokenizer_class")
    return named.removesuffix("Fast") if named else _CLASS_OF_TYPE.get(model_type, "")


def _content(token: object) -> str | None:
    """The text of a token, which settings write as a text or as a map."""
    text = cast("dict[str, object]", token).get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _components(part: Normalizer | PreTokenizer | None) -> Iterator[dict[str, object]]:
    """A normalizer or pre-tokenizer as tokenizer.json writes it; the members of a sequence one by one."""
    if part is None:
        return
    # The library offers no other way to read their fields.
    waiting = [json.loads(part.__getstate__())]
    while waiting:
        component = waiting.pop()
        if component.get("type") == "Sequence":
            waiting += [*component.get("normalizers", []), *component.get("pretokenizers", [])]
        else:
            yield component
