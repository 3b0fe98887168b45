"""Where requests are held before anything of them is queued, until they are let in or sent away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from octavo_gateway.errors import ApiError


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """A request at the door: its tokens of work, those of them that are of its prompts, and its ticket to come."""

    work: int
    prompt_tokens: int
    ticket: asyncio.Future[int]

    @property
    def is_gone(self) -> bool:
        """Whether it has gone away, though its task has not run since."""
        return self.ticket.cancelled()


class Door:
    """The owner of those that are held, in the order they came."""

    def __init__(self, give_back: Callable[[int], None]) -> None:
        """``give_back``: takes the ticket of one who has gone away when it came."""
        self._give_back = give_back
        self._held: dict[Held, None] = {}
        # Tokens of all that are held: of work, and of prompts.
        self.work = self.prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._held)

    async def hold(self, work: int, prompt_tokens: int) -> int:
        """Until there is a ticket. Raises what the request is sent away with."""
        held = Held(work, prompt_tokens, asyncio.get_running_loop().create_future())
        self._held[held] = None
        self.work += work
        self.prompt_tokens += prompt_tokens
        try:
            return await held.ticket
        except asyncio.CancelledError:
            self.forget(held)
            if held.ticket.done() and not held.ticket.cancelled() and held.ticket.exception() is None:
                self._give_back(held.ticket.result())
            raise

    @property
    def newest(self) -> Held:
        """Who came last."""
        return next(reversed(self._held))

    @property
    def oldest(self) -> Held:
        """Who came first."""
        return next(iter(self._held))

    def let_in(self, held: Held, ticket: int) -> None:
        """It goes in, and counts as gone in from now on, whenever its task runs again."""
        self.forget(held)
        held.ticket.set_result(ticket)

    def send_away(self, held: Held, error: ApiError) -> None:
        """It is refused."""
        self.forget(held)
        if not held.ticket.cancelled():
            held.ticket.set_exception(error)

    def forget(self, held: Held) -> None:
        """It is not held any more. Forgetting one twice does nothing."""
        if held in self._held:
            del self._held[held]
            self.work -= held.work
            self.prompt_tokens -= held.prompt_tokens
