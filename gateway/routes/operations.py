"""What operators and client libraries ask about the server itself: readiness, models, facts. No sockets."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import orjson

from common.config import GatewayConfig
from common.errors import NotFound
from common.protocol import PROTOCOL_VERSION, ModelFacts
from gateway.client import Readiness
from gateway.routes import contextual, rerank
from gateway.schema import is_served

_PACKAGES = ("aiohttp", "tokenizers", "pyzmq", "numpy")


def render_health() -> bytes:
    """The gateway's process lives and its loop turns. Nothing else is asked, so nothing else can make this slow."""
    return b'{"status":"alive"}'


def render_ready(readiness: Readiness, facts: ModelFacts | None) -> bytes:
    body: dict[str, object] = {
        "status": readiness.status,
        "workers": {"ready": readiness.workers_ready, "total": readiness.workers_total},
        "model": None if facts is None else facts.name,
    }
    if readiness.reason:
        body["reason"] = readiness.reason
    return orjson.dumps(body)


def render_models(facts: ModelFacts, created_s: int) -> bytes:
    return orjson.dumps({"object": "list", "data": [_model(facts, created_s)]})


def render_model(model: str, facts: ModelFacts, created_s: int) -> bytes:
    """Raises NotFound (model_not_found)."""
    if not is_served(model, facts.name):
        raise NotFound("This model is not served here; GET /v1/models lists what is.", code="model_not_found")
    return orjson.dumps(_model(facts, created_s))


def render_info(config: GatewayConfig, facts: ModelFacts | None) -> bytes:
    """The model without its place on this host's disk, what runs it, and the limits that a client may meet."""
    body = {
        "model": None if facts is None else _facts(facts),
        "versions": {"hedgerow": _version("hedgerow"), "protocol": PROTOCOL_VERSION}
        | {name: _version(name) for name in _PACKAGES},
        "limits": {
            "max_body_bytes": config.max_body_bytes,
            "max_inputs": config.max_inputs,
            "max_request_tokens": config.max_request_tokens,
            "max_rerank_documents": min(config.max_inputs, rerank.MAX_DOCUMENTS),
            "max_contextual_documents": contextual.MAX_DOCUMENTS,
            "max_contextual_chunks": contextual.MAX_CHUNKS,
            "max_contextual_tokens": min(config.max_request_tokens, contextual.MAX_TOKENS),
            "max_input_tokens": None if facts is None else facts.max_tokens,
            "default_timeout_ms": config.default_timeout_s * 1000,
            "max_timeout_ms": config.max_timeout_s * 1000,
            "auto_truncate": config.auto_truncate,
        },
    }
    return orjson.dumps(body)


def _model(facts: ModelFacts, created_s: int) -> dict[str, object]:
    return {"id": facts.name, "object": "model", "created": created_s, "owned_by": "hedgerow"}


def _facts(facts: ModelFacts) -> dict[str, object]:
    return {
        "name": facts.name,
        "fingerprint": facts.fingerprint,
        "architecture": facts.architecture,
        "dtype": facts.dtype,
        "device": facts.device,
        "attention": facts.attention,
        "dimensions": facts.dimensions,
        "max_tokens": facts.max_tokens,
        "vocab_size": facts.vocab_size,
        "max_batch_tokens": facts.max_batch_tokens,
        "pooling": facts.pooling,
        "normalize": facts.normalize,
        "tasks": facts.tasks,
        "encodings": facts.encodings,
        "prompts": sorted(facts.prompts),
        "default_prompt_name": facts.default_prompt_name,
        "include_prompt": facts.include_prompt,
        "num_labels": facts.num_labels,
        "score_activation": facts.score_activation,
        "pair_template": facts.pair_template,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
