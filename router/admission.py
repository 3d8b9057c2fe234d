"""Whether a Generate makes sense, before anything is done for it. Pure; knows nothing of load."""

from collections.abc import Sequence

from cluster.protocol.errors import InvalidRequest
from cluster.protocol.messages import Generate


def check_request(request: Generate, drafter_names: Sequence[str], max_lens: Sequence[int]) -> None:
    """Raises InvalidRequest naming the field. `max_lens` are the contexts of the verifiers, 0 = it does not say."""
    drafter = request.speculation.drafter
    if drafter and drafter not in drafter_names:
        known = ", ".join(map(repr, drafter_names)) or "none"
        raise InvalidRequest(f"no drafter named {drafter!r}; known: {known}", field="speculation.drafter")
    if not 1 <= request.prompt_len <= len(request.tokens):
        raise InvalidRequest(
            f"expected 1 to {len(request.tokens)} of its tokens to be the prompt, got {request.prompt_len}",
            field="prompt",
        )
    if request.sampling.max_tokens < 1:
        raise InvalidRequest(f"expected at least 1, got {request.sampling.max_tokens}", field="max_tokens")
    if max_lens and 0 not in max_lens and request.prompt_len >= max(max_lens):
        raise InvalidRequest(
            f"maximum context length is {max(max_lens)} tokens, the prompt has {request.prompt_len} and at least "
            "one must follow",
            field="prompt",
        )
