"""From a parsed request to the model's output: tokenize, charge the key, submit, wait, and count.

There is one method for each kind of request. A request for embeddings may be `partial`: then an input that fails is
left out, and the others run again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from common.config import GatewayConfig
from common.errors import DeadlineExceeded, ServiceError
from common.metrics import Metrics
from common.text.tokenization import TokenIds
from common.wire.messages import Spans
from common.wire.transport import now_ns
from gateway.call import Call
from gateway.edge.budgets import Budgets
from gateway.model_requests import (
    ContextualRequest,
    EmbeddingRequest,
    LabelsRequest,
    LocalRequest,
    ModelOutput,
    PairsRequest,
    Request,
)
from gateway.open_request import Embedded, OpenRequest, Options
from gateway.tokenizing import Model, TokenizedInputs, TokenizedPairs

# How often a partial request may run again, each time without one more input that failed.
_MAX_RERUNS = 64

T = TypeVar("T")


class Executor:
    """Runs the requests of one gateway. Each runs on its call's model, in its call's lane."""

    def __init__(self, config: GatewayConfig, metrics: Metrics) -> None:
        self._metrics = metrics
        self._budgets = Budgets(config.run_dir)
        self._methods: Mapping[type[Request], Callable[[Call, Model, Any], Awaitable[ModelOutput]]] = {
            EmbeddingRequest: self._embed,
            ContextualRequest: self._embed_in_context,
            PairsRequest: self._score_pairs,
            LabelsRequest: self._score_labels,
        }

    async def run(self, call: Call, model: Model, request: Request) -> ModelOutput:
        """What the model makes of a request, before the call's deadline.

        Raises:
            RateLimited: the key has too few tokens left.
            InvalidRequest: an input cannot be run; `param` names it.
            ServiceError: see `RequestTokenizer` and `SchedulerClient.submit`.
        """
        if call.key is not None:
            self._budgets.check(call.key, now_ns())
        call.served.client.check_queue(call.lane, call.tenant)
        return await self._methods[type(request)](call, model, request)

    async def answer_locally(self, call: Call, model: Model, request: LocalRequest) -> list[bytes]:
        """What the gateway's own tokenizer answers for each input, as JSON.

        Raises:
            DeadlineExceeded: it took too long.
            InvalidRequest, InternalError: see `RequestTokenizer`.
        """
        return await _in_time(call, call.served.tokenizer.answer_locally(model, request))

    # --- one method for each kind of request ---

    async def _embed(self, call: Call, model: Model, request: EmbeddingRequest) -> ModelOutput:
        with call.tokenize:
            tokenized = call.served.tokenizer.tokenize_query(model, request)
        if tokenized is None:
            tokenized = await _in_time(call, call.served.tokenizer.tokenize_inputs(model, request))
        self._charge(call, tokenized.sequences, num_runs=1 + len(request.more_encodings))
        embedded, *more = await self._run_good_inputs(call, model, request, tokenized)
        num_tokens = sum(map(len, tokenized.sequences))
        self._count_inputs(len(tokenized.sequences), num_tokens)
        return ModelOutput(
            embedded.rows,
            model.facts,
            num_tokens,
            call.request_id,
            tokenized.failures,
            tokenized.places,
            None if tokenized.spans is None else list(map(len, tokenized.spans)),
            dict(zip(request.more_encodings, (other.rows for other in more), strict=True)),
        )

    async def _embed_in_context(self, call: Call, model: Model, request: ContextualRequest) -> ModelOutput:
        documents = await _in_time(call, call.served.tokenizer.tokenize_documents(model, request))
        sequences = [document.ids for document in documents]
        num_tokens = self._charge(call, sequences)
        spans = [document.spans for document in documents]
        try:
            embedded = await self._submit(call, model, request, sequences, spans=spans)
        except ServiceError as error:
            if error.sequence is not None:
                error.param = request.name_of(error.sequence)
            raise
        self._count_inputs(len(embedded.rows), num_tokens)
        return ModelOutput(embedded.rows, model.facts, num_tokens, call.request_id)

    async def _score_pairs(self, call: Call, model: Model, request: PairsRequest) -> ModelOutput:
        pairs = await _in_time(call, call.served.tokenizer.tokenize_pairs(model, request))
        return await self._score(call, model, request, pairs)

    async def _score_labels(self, call: Call, model: Model, request: LabelsRequest) -> ModelOutput:
        pairs = await _in_time(call, call.served.tokenizer.tokenize_labelled(model, request))
        return await self._score(call, model, request, pairs)

    # --- their steps ---

    async def _run_good_inputs(
        self, call: Call, model: Model, request: EmbeddingRequest, tokenized: TokenizedInputs
    ) -> list[Embedded]:
        """The rows of all inputs, in each encoding. A partial request drops inputs that fail from `tokenized`."""
        runs = [request, *(replace(request, encoding=other, normalize=False) for other in request.more_encodings)]
        num_reruns = 0
        while True:
            try:
                return [
                    await self._submit(call, model, one, tokenized.sequences, spans=tokenized.spans) for one in runs
                ]
            except ServiceError as error:
                if error.sequence is None:
                    raise
                error.param = request.inputs.name_of(tokenized.places[error.sequence])
                if not request.partial or num_reruns >= _MAX_RERUNS:
                    raise
                # The scheduler answers a request as a whole, so the other inputs run again. This is rare and costs the
                # key nothing.
                tokenized.drop({error.sequence: error.with_traceback(None)})
                num_reruns += 1

    async def _score(
        self, call: Call, model: Model, request: PairsRequest | LabelsRequest, pairs: TokenizedPairs
    ) -> ModelOutput:
        type_starts = pairs.type_starts if model.facts.has_token_types else None
        num_tokens = self._charge(call, pairs.sequences)
        try:
            embedded = await self._submit(call, model, request, pairs.sequences, type_starts=type_starts)
        except ServiceError as error:
            if error.sequence is not None:
                error.param = request.name_of(pairs.first_pairs[error.sequence])
            raise
        self._count_inputs(len(pairs.places), num_tokens)
        return ModelOutput(embedded.rows[pairs.places], model.facts, num_tokens, call.request_id)

    def _charge(self, call: Call, sequences: list[TokenIds], *, num_runs: int = 1) -> int:
        """Charge all runs of a request to its key, before the first. Returns the number of tokens of one run.

        Raises:
            RateLimited: the key has too few tokens left.
        """
        num_tokens = sum(map(len, sequences))
        if call.key is not None:
            self._budgets.charge(call.key, num_tokens * num_runs, now_ns())
        return num_tokens

    async def _submit(
        self,
        call: Call,
        model: Model,
        request: Request,
        sequences: list[TokenIds],
        *,
        type_starts: list[int] | None = None,
        spans: list[Spans] | None = None,
    ) -> Embedded:
        call.fingerprint = model.facts.fingerprint
        options = Options(
            fingerprint=model.facts.fingerprint,
            dimensions=request.dimensions,
            normalize=request.normalize,
            encoding=request.encoding,
            lane=call.lane,
            deadline_ns=call.deadline_ns,
            tenant=call.tenant,
            trace=call.trace,
        )
        num_bytes = OpenRequest.num_bytes(sequences, options, spans)
        call.held.grow(num_bytes)
        try:
            embedded = await call.served.client.submit(sequences, options, type_starts=type_starts, spans=spans)
        except ServiceError:
            call.held.shrink(num_bytes)  # a partial request may run again
            raise
        call.queue_us += embedded.queue_us
        call.step_us += embedded.step_us
        return embedded

    def _count_inputs(self, num_inputs: int, num_tokens: int) -> None:
        self._metrics.input_tokens.inc(num_tokens)
        self._metrics.inputs.inc(num_inputs)


async def _in_time(call: Call, tokenization: Awaitable[T]) -> T:
    """Await a tokenization until the call's deadline. Raises DeadlineExceeded."""
    try:
        with call.tokenize:
            async with asyncio.timeout(call.remaining_s):
                return await tokenization
    except TimeoutError:
        raise DeadlineExceeded(
            "The deadline passed while the input was tokenized. Allow more time, or send less."
        ) from None
