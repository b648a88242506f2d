"""The endpoints that a batch may name: one list for gateway, store, engines and commands."""

from typing import Final

CHAT_COMPLETIONS: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
EMBEDDINGS: Final = "/v1/embeddings"
RESPONSES: Final = "/v1/responses"
SCORE: Final = "/v1/score"
RERANK: Final = "/v1/rerank"

ENDPOINTS: Final = (CHAT_COMPLETIONS, COMPLETIONS, EMBEDDINGS, RESPONSES, SCORE, RERANK)
"""All of them, in the order in which messages list them; the last two are not OpenAI's."""
