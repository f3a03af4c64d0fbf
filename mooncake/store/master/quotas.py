"""The master's handlers for tenants' quotas."""

from __future__ import annotations

from mooncake.errors import Refusal
from mooncake.store import messages as m
from mooncake.store.master.catalog import Catalog
from mooncake.store.master.effects import Received
from mooncake.store.master.log_records import QuotaSet
from mooncake.store.master.tenants import check_tenant


class QuotaRequests:
    """Answers SetQuota and AskQuotas."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def set_quota(self, message: m.SetQuota, _: Received, now: float) -> m.Quotas | m.RefusedReply:
        tenant = "" if message.tenant == "default" else message.tenant
        refusal = check_tenant(tenant)
        if refusal is not None:
            return m.RefusedReply(refusal)
        if message.size_bytes is not None and message.size_bytes < 0:
            return m.RefusedReply(
                Refusal("invalid_size", f"a quota of {message.size_bytes} bytes; at least 0")
            )
        readable = self._catalog.objects.readable.values()
        self._catalog.tenants.set_quota(tenant, message.size_bytes, readable)
        self._catalog.records.append(QuotaSet(tenant, message.size_bytes))
        return self._quotas()

    def ask(self, _: m.AskQuotas, __: Received, now: float) -> m.Quotas:
        return self._quotas()

    def _quotas(self) -> m.Quotas:
        return m.Quotas([account.status() for account in self._catalog.tenants.accounts.values()])
