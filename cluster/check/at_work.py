"""Whether drafts were at work in all that was asked: parity of a server that never speculates proves nothing."""

from functools import partial

from cluster.check.errors import NotCheckable, RequestFailed
from cluster.check.finding import Cell, Verdict, drafts_seen, passed
from cluster.check.twins import Twins


class AtWork:
    """Runs last."""

    name = "speculation"

    async def cells(self, twins: Twins) -> list[Cell]:
        return [Cell("drafts at work", partial(self._at_work, twins))]

    async def _at_work(self, twins: Twins) -> Verdict:
        if not any(answer.usage and answer.usage.accepted is not None for answer in twins.fast.seen):
            raise NotCheckable("the server does not report accepted draft tokens, so acceptance could not be seen")
        try:
            return passed(f"{drafts_seen(twins.fast.seen, 'accepted')} in {len(twins.fast.seen)} answers")
        except NotCheckable as nothing:
            raise RequestFailed(f"is speculation on? {nothing}") from nothing
