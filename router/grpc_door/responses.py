"""What became of an answer, as messages. Pure, and knows nothing of calls."""

from collections.abc import Sequence

from cluster.protocol import outrider_v1_pb2 as v1
from router.http.answer import Answer, Piece
from router.http.logprobs import TokenLogprob
from router.http.text_codec import TextCodec


def chunk(index: int, piece: Piece, codec: TextCodec) -> v1.GenerateChunk:
    return v1.GenerateChunk(
        index=index, text=piece.text, token_ids=piece.token_ids, logprobs=named(piece.logprobs, codec)
    )


def complete(index: int, answer: Answer, codec: TextCodec) -> v1.GenerateComplete:
    """Of an answer whose pieces have ended."""
    drafts = answer.tally
    message = v1.GenerateComplete(
        index=index,
        finish_reason=answer.finish_reason,
        usage=v1.Usage(prompt_tokens=answer.prompt_tokens, completion_tokens=answer.completion_tokens),
        speculative=speculative(drafts.steps, drafts.drafted, drafts.accepted),
        prompt_logprobs=named(answer.prompt_logprobs, codec),
    )
    if isinstance(answer.stop_reason, int):
        message.matched_token_id = answer.stop_reason
    elif answer.stop_reason is not None:
        message.matched_stop_str = answer.stop_reason
    return message


def speculative(drafts: int, drafted: int, accepted: int) -> v1.SpeculativeMetrics:
    return v1.SpeculativeMetrics(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        accept_length=1 + accepted / drafts if drafts else 1.0,
        accept_rate=accepted / drafted if drafted else 0.0,
    )


def named(tokens: Sequence[TokenLogprob], codec: TextCodec) -> list[v1.TokenLogprob]:
    def one(token_id: int, logprob: float | None) -> v1.TokenLogprob:
        return v1.TokenLogprob(token_id=token_id, token=codec.token_bytes(token_id), logprob=logprob)

    messages = []
    for token in tokens:
        message = one(token.token_id, token.logprob)
        message.top_logprobs.extend(one(*pair) for pair in token.best)
        messages.append(message)
    return messages
