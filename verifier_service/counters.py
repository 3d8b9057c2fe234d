"""What an engine has done since its start. Plain numbers; nothing here decides anything."""

from dataclasses import dataclass


@dataclass(slots=True)
class EngineCounters:
    """What happened since the start; monotonic."""

    steps: int = 0
    rows: int = 0
    prefill_rows: int = 0
    prefix_query_tokens: int = 0  # rows that new and returning sessions needed
    prefix_hit_tokens: int = 0  # those of them that were found
    prefix_evicted_pages: int = 0
    preemptions: int = 0  # sessions that lost their pages for a while
    verified_blocks: int = 0
    drafted_tokens: int = 0  # draft tokens that were judged
    accepted_tokens: int = 0
    bad_draft_ids: int = 0  # cut from blocks: no token of the target
    unusable_blocks: int = 0  # their law contradicts itself: treated as empty
    stale: int = 0
    repeated: int = 0
    refused: int = 0
    failed_sessions: int = 0
