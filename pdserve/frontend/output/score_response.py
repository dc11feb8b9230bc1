"""Builds the answers of the score and rerank endpoints from the vectors of a plan's prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET

from pdserve.frontend.output.embedding_response import EmbeddingResponseBuilder
from pdserve.protocols.scoring import RerankDocument, RerankList, RerankResult, Score, ScoreList

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.frontend.output.score_format import Ranking

__all__ = ["ScoreResponseBuilder"]

_encode_json = msgspec.json.Encoder().encode


class ScoreResponseBuilder(EmbeddingResponseBuilder):
    """Collects the vectors of all prompts; `body` is the answer once `finished` is set."""

    @property
    def work(self) -> int:
        """Cost of `body`: of the numbers of all vectors, and of the documents that it repeats."""
        return super().work + self.plan.repeats

    def body(self) -> bytes:
        """The answer as JSON. Thread-safe, because a finished answer no longer changes."""
        plan = self.plan
        assert plan.scores is not None
        scores = plan.scores.scores([choice.vector for choice in self.choices])
        usage = self.usage(last=True)
        if (ranking := plan.scores.ranking) is not None:
            results = _results(ranking, scores)
            return _encode_json(
                RerankList(id=plan.answer_id, model=plan.model_name, results=results, usage=usage)
            )
        return _encode_json(
            ScoreList(
                id=plan.answer_id,
                created=plan.created,
                model=plan.model_name,
                data=[Score(index=index, score=score) for index, score in enumerate(scores)],
                usage=usage,
            )
        )


def _results(ranking: Ranking, scores: Sequence[float]) -> list[RerankResult]:
    texts = ranking.texts
    return [
        RerankResult(
            index=index,
            relevance_score=scores[index],
            document=UNSET if texts is None else RerankDocument(text=texts[index]),
        )
        for index in ranking.order(scores)
    ]
