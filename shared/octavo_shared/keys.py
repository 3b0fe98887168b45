"""Names of everything Octavo keeps in Redis for one model (docs/log.md says who writes and deletes what)."""

from __future__ import annotations

from dataclasses import dataclass

from octavo_shared.ids import RequestId


@dataclass(frozen=True, slots=True)
class Keys:
    """Names of everything Octavo keeps in Redis for one model."""

    model: str

    def _key(self, *parts: str) -> str:
        return ":".join(("octavo", "{" + self.model + "}", *parts))

    @property
    def requests(self) -> str:
        return self._key("requests")

    @property
    def aborts(self) -> str:
        return self._key("aborts")

    @property
    def life(self) -> str:
        return self._key("term", "life")

    @property
    def term(self) -> str:
        return self._key("term")

    @property
    def lease(self) -> str:
        return self._key("lease")

    @property
    def limits(self) -> str:
        return self._key("limits")

    @property
    def metrics(self) -> str:
        return self._key("metrics")

    @property
    def control(self) -> str:
        return self._key("control")

    def answer(self, ask_id: str) -> str:
        return self._key("control", ask_id)

    def log(self, name: str) -> str:
        return self._key("log", name)

    def gateway(self, name: str) -> str:
        return self._key("gateway", name)

    def bucket(self, name: str) -> str:
        return self._key("rate", name)

    def request(self, request_id: RequestId) -> str:
        return self._key("request", str(request_id))

    def idempotency(self, tenant: str, key: str) -> str:
        # The tenant's length first: no other tenant can choose a key that spells the same name.
        return self._key("idempotency", str(len(tenant)), tenant, key)
