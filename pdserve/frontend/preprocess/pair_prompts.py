"""Writes a query and a document into one prompt, as a reranker was trained to read them.

A chat template that knows the roles `query` and `document` writes the prompt; without one, the
tokenizer joins both texts as a pair. A document that does not fit loses its end, never the text
around it, since the score is computed after that. Runs in the text pool.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from pdserve.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.frontend.model_registry import PreparedModel
    from pdserve.text.chat.chat_template import ChatTemplate
    from pdserve.token_ids import TokenIds

__all__ = ["Pair", "PairPrompts", "pair_template"]

_QUERY_ROLE: Final = re.compile(r"""(['"])query\1""")
_DOCUMENT_ROLE: Final = re.compile(r"""(['"])document\1""")
_TRIES: Final = 4
"""Most times that a document is cut: tokens of a text and of its beginning differ a little."""
_AT_ONCE: Final = 64
"""Prompts that are tokenised together; the texts of all would take as much memory again."""


def pair_template(model: PreparedModel) -> ChatTemplate | None:
    """The model's template if it writes a query and a document; None: it is for chats only."""
    if "default" not in model.templates.names:
        return None
    template = model.templates.select()
    roles = _QUERY_ROLE.search(template.source), _DOCUMENT_ROLE.search(template.source)
    return template if all(roles) else None


@dataclass(frozen=True, slots=True)
class Pair:
    """A query and a document, and the document's name in errors."""

    query: str
    document: str
    name: str


@dataclass(frozen=True, slots=True)
class PairPrompts:
    """How the pairs of one request become prompts."""

    model: PreparedModel
    instruction: str | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    """Variables for the template."""
    keep: int | None = None
    """Most tokens of a prompt; None: a longer one is not cut."""
    query_tokens: int = 0
    """Most tokens of a query; 0: all."""
    document_tokens: int = 0
    """Most tokens of a document; 0: all."""

    def encode(self, pairs: Sequence[Pair]) -> list[TokenIds]:
        """The prompt of each pair. Errors: `InvalidRequest` for what the template refuses, and for
        a pair that cannot be cut to `keep` tokens."""
        write = self._writer()
        cut: dict[str, str] = {}
        found: list[TokenIds] = []
        for first in range(0, len(pairs), _AT_ONCE):
            part = [self._shortened(pair, cut) for pair in pairs[first : first + _AT_ONCE]]
            prompts = write([(pair.query, pair.document) for pair in part])
            found += [self._fit(pair, ids, write) for pair, ids in zip(part, prompts, strict=True)]
        return found

    def _writer(self) -> Callable[[Sequence[tuple[str, str]]], list[TokenIds]]:
        tokenizer, template = self.model.tokenizer, pair_template(self.model)
        if template is None:
            return tokenizer.encode_pairs

        def write(texts: Sequence[tuple[str, str]]) -> list[TokenIds]:
            prompts = [self._render(template, query, document) for query, document in texts]
            return tokenizer.encode_batch(prompts, add_special_tokens=False)

        return write

    def _render(self, template: ChatTemplate, query: str, document: str) -> str:
        messages = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        variables = self.variables
        if self.instruction is not None:
            # Templates take the task as a message or as a variable.
            messages.insert(0, {"role": "system", "content": self.instruction})
            variables = {"instruction": self.instruction, **variables}
        return template.render(messages, template_kwargs=variables)

    def _shortened(self, pair: Pair, cut: dict[str, str]) -> Pair:
        """The pair within the limits of query and document. `cut`: shortened queries, each of which
        may be in many pairs."""
        query, document = pair.query, pair.document
        if self.query_tokens:
            if query not in cut:
                cut[query] = self._beginning(query, self.query_tokens)
            query = cut[query]
        if self.document_tokens:
            document = self._beginning(document, self.document_tokens)
        return Pair(query, document, pair.name)

    def _beginning(self, text: str, tokens: int) -> str:
        ids = self.model.tokenizer.encode(text, add_special_tokens=False)
        return text if len(ids) <= tokens else self._text(ids[:tokens])

    def _text(self, ids: Sequence[int]) -> str:
        text = self.model.tokenizer.decode(ids, skip_special_tokens=False)
        # The cut may have divided a character.
        return text.rstrip("\ufffd")

    def _fit(
        self,
        pair: Pair,
        ids: TokenIds,
        write: Callable[[Sequence[tuple[str, str]]], list[TokenIds]],
    ) -> TokenIds:
        keep = self.keep
        if keep is None or len(ids) <= keep:
            return ids
        document = self.model.tokenizer.encode(pair.document, add_special_tokens=False)
        around, left = len(ids) - len(document), len(document)
        for _ in range(_TRIES):
            left -= len(ids) - keep
            if left < 1:
                break
            (ids,) = write([(pair.query, self._text(document[:left]))])
            if len(ids) <= keep:
                return ids
        raise InvalidRequest(
            f"a prompt of {keep} tokens leaves no room for '{pair.name}' beside about {around} "
            "tokens of query and template: shorten the query, or set 'max_tokens_per_query'",
            param=pair.name,
        )
