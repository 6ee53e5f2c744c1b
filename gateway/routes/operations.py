"""Routes about the server itself, for operators and client libraries: readiness, models, facts. No sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from common.config import GatewayConfig
from common.text.tokenization import MAX_CHARS_PER_TOKEN
from common.wire.messages import PROTOCOL_VERSION, ModelFacts, max_rows
from gateway.edge.body import BodyLimits
from gateway.edge.http import HttpLimits
from gateway.parsing import is_served, model_not_found
from gateway.routes import contextual, rerank
from gateway.status import Readiness, Status

_PACKAGES = ("aiohttp", "tokenizers", "pyzmq", "numpy")


class Health(msgspec.Struct):
    status: Literal["alive"] = "alive"


class Workers(msgspec.Struct):
    ready: int
    total: int


class ModelReady(msgspec.Struct):
    """The readiness of one of several models."""

    status: Status
    workers: Workers
    reason: str | UnsetType = UNSET


class Ready(msgspec.Struct):
    """Whether a worker can serve; with several models, whether each model has one."""

    status: Status
    workers: Workers
    model: str | None
    reason: str | UnsetType = UNSET
    models: Annotated[
        dict[str, ModelReady] | UnsetType, Meta(description="The readiness of each model, if there are several.")
    ] = UNSET


class ModelCard(msgspec.Struct):
    id: str
    created: Annotated[int, Meta(description="When this gateway started, in seconds since 1970 (UTC).")]
    object: Literal["model"] = "model"
    owned_by: str = "hedgerow"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class ModelInfo(msgspec.Struct):
    """Facts of the model."""

    name: str
    fingerprint: str
    architecture: str
    dtype: str
    device: str
    attention: str
    dimensions: int
    max_tokens: int
    vocab_size: int
    max_batch_tokens: int
    pooling: str
    normalize: bool
    tasks: list[str]
    encodings: list[str]
    prompts: Annotated[list[str], Meta(description="The names of the prompts.")]
    default_prompt_name: str | None
    include_prompt: bool
    num_labels: int
    labels: list[str]
    score_activation: str
    pair_template: str


class LimitsInfo(msgspec.Struct):
    """The limits on requests."""

    max_body_bytes: int
    max_body_chunks: int
    max_held_bytes: Annotated[
        int, Meta(description="Bytes of all requests in one gateway: bodies, token ids and rows.")
    ]
    max_target_bytes: int
    max_headers: int
    max_header_line_bytes: int
    max_header_bytes: int
    max_connections: int
    max_concurrent_requests: int
    max_inputs: int
    max_request_tokens: int
    max_rerank_documents: Annotated[
        int, Meta(description="The most `documents`. TEI's `texts` are limited by `max_inputs`.")
    ]
    max_contextual_documents: int
    max_contextual_chunks: int
    max_contextual_tokens: int
    header_timeout_ms: int
    body_timeout_ms: int
    min_body_bytes_per_s: int
    write_timeout_ms: int
    keepalive_timeout_ms: int
    default_timeout_ms: int
    max_timeout_ms: int
    auto_truncate: bool
    max_input_tokens: int | None
    max_input_chars: Annotated[int | None, Meta(description="The most characters of a text that may not be cut.")]
    max_embed_all_tokens: int | None


class Classifier(msgspec.Struct):
    id2label: dict[str, str]
    label2id: dict[str, int]


class Pooling(msgspec.Struct):
    pooling: str


class ModelType(msgspec.Struct):
    """Exactly one of these is set."""

    embedding: Pooling | UnsetType = UNSET
    reranker: Annotated[Classifier | UnsetType, Meta(description="Set if the model gives one score.")] = UNSET
    classifier: Classifier | UnsetType = UNSET


class Info(msgspec.Struct):
    """Facts of the server; those that clients of text-embeddings-inference read are there under its names, too."""

    model: ModelInfo | None
    versions: dict[str, str | int | None]
    limits: LimitsInfo
    model_id: str | None
    model_dtype: str | None
    model_type: ModelType | None
    served_model_name: str | None
    max_concurrent_requests: int
    max_input_length: int | None
    max_batch_tokens: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str | None
    models: Annotated[
        dict[str, ModelInfo | None] | UnsetType,
        Meta(
            description="Facts of each model, if there are several. The other fields are those of the first model, or "
            "of the one that `X-Model` names."
        ),
    ] = UNSET
    model_sha: None = None
    max_batch_requests: None = None
    sha: None = None
    docker_label: None = None


def health() -> Health:
    """The process lives and its event loop runs. Nothing else is checked, so nothing else can slow this down."""
    return Health()


def ready(readiness: Readiness, model: str | None, each: Mapping[str, Readiness] | None = None) -> Ready:
    """`each` has the readiness of each model if there are several."""
    return Ready(
        status=readiness.status,
        workers=Workers(readiness.workers_ready, readiness.workers_total),
        model=model,
        reason=readiness.reason or UNSET,
        models=UNSET if each is None else {name: _model_ready(one) for name, one in each.items()},
    )


def _model_ready(readiness: Readiness) -> ModelReady:
    workers = Workers(readiness.workers_ready, readiness.workers_total)
    return ModelReady(readiness.status, workers, readiness.reason or UNSET)


def models(names: Sequence[str], created_s: int) -> ModelList:
    return ModelList([ModelCard(name, created_s) for name in names])


def model(name: str, names: Sequence[str], created_s: int) -> ModelCard:
    """Raises NotFound (model_not_found)."""
    for served in names:
        if is_served(name, served):
            return ModelCard(served, created_s)
    raise model_not_found()


class ServerFacts:
    """The facts in /info that do not depend on the model, and do not change while the gateway lives.

    They are gathered once, because a package's version is read from its files.
    """

    def __init__(self, config: GatewayConfig, http: HttpLimits, body: BodyLimits) -> None:
        self._config = config
        self._versions: dict[str, str | int | None] = {"hedgerow": _version("hedgerow"), "protocol": PROTOCOL_VERSION}
        self._versions |= {name: _version(name) for name in _PACKAGES}
        self._limits: dict[str, object] = {
            "max_body_bytes": body.max_bytes,
            "max_body_chunks": body.max_chunks,
            "max_held_bytes": config.max_held_bytes,
            "max_target_bytes": http.max_target_bytes,
            "max_headers": http.max_headers,
            "max_header_line_bytes": http.max_header_line_bytes,
            "max_header_bytes": http.max_header_bytes,
            "max_connections": http.max_connections,
            "max_concurrent_requests": config.max_concurrent_requests,
            "max_inputs": config.max_inputs,
            "max_request_tokens": config.max_request_tokens,
            "max_rerank_documents": min(config.max_inputs, rerank.MAX_DOCUMENTS),
            "max_contextual_documents": contextual.MAX_DOCUMENTS,
            "max_contextual_chunks": contextual.MAX_CHUNKS,
            "max_contextual_tokens": min(config.max_request_tokens, contextual.MAX_TOKENS),
            "header_timeout_ms": config.header_timeout_s * 1000,
            "body_timeout_ms": config.body_timeout_s * 1000,
            "min_body_bytes_per_s": config.min_body_bytes_per_s,
            "write_timeout_ms": config.write_timeout_s * 1000,
            "keepalive_timeout_ms": config.keepalive_timeout_s * 1000,
            "default_timeout_ms": config.default_timeout_s * 1000,
            "max_timeout_ms": config.max_timeout_s * 1000,
            "auto_truncate": config.auto_truncate,
            "max_input_tokens": None,
            "max_input_chars": None,
            "max_embed_all_tokens": None,
        }

    @property
    def version(self) -> str:
        """This server's version; "unknown" if it runs from a folder that was never installed."""
        return str(self._versions["hedgerow"] or "unknown")

    def info(self, facts: ModelFacts | None, each: Mapping[str, ModelFacts | None] | None = None) -> Info:
        """The model, the server's versions and its limits. `each` has the facts of each model if there are several."""
        config, limits = self._config, self._limits
        if facts is not None:
            limits = limits | {
                "max_input_tokens": facts.max_tokens,
                "max_input_chars": MAX_CHARS_PER_TOKEN * facts.max_tokens,
                "max_embed_all_tokens": min(config.max_request_tokens, max_rows(facts)),
            }
        return Info(
            model=None if facts is None else _model_info(facts),
            versions=self._versions,
            limits=msgspec.convert(limits, LimitsInfo),
            model_id=None if facts is None else facts.name,
            model_dtype=None if facts is None else facts.dtype,
            model_type=None if facts is None else _model_type(facts),
            served_model_name=None if facts is None else facts.name,
            max_concurrent_requests=config.max_concurrent_requests,
            max_input_length=None if facts is None else facts.max_tokens,
            max_batch_tokens=None if facts is None else facts.max_batch_tokens,
            max_client_batch_size=config.max_inputs,
            auto_truncate=config.auto_truncate,
            tokenization_workers=config.tokenizer_threads,
            version=self.version,
            models=UNSET
            if each is None
            else {name: None if one is None else _model_info(one) for name, one in each.items()},
        )


def _model_type(facts: ModelFacts) -> ModelType:
    if "sparse" in facts.tasks:
        return ModelType(embedding=Pooling("splade"))
    if "score" not in facts.tasks:
        return ModelType(embedding=Pooling(facts.pooling))
    classifier = Classifier({}, {})
    for number, label in enumerate(facts.labels):
        classifier.id2label[str(number)] = label
        classifier.label2id[label] = number
    return ModelType(reranker=classifier) if facts.num_labels == 1 else ModelType(classifier=classifier)


def _model_info(facts: ModelFacts) -> ModelInfo:
    values: dict[str, object] = {name: getattr(facts, name) for name in ModelInfo.__struct_fields__}
    return msgspec.convert(values | {"prompts": sorted(facts.prompts)}, ModelInfo)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
