"""How each RPC is called: its deadline, and whether it may be repeated."""

import json
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPolicy:
    """How one RPC is called.

    Attributes:
        timeout_seconds: deadline of a unary call; None for streams, which have an idle limit.
        repeatable: whether UNAVAILABLE may be retried without doing something twice.
    """

    timeout_seconds: float | None
    repeatable: bool


_READ: Final = CallPolicy(timeout_seconds=10, repeatable=True)
_WRITE: Final = CallPolicy(timeout_seconds=10, repeatable=False)
_STREAM: Final = CallPolicy(timeout_seconds=None, repeatable=False)

POLICIES: Final[dict[tuple[str, str], CallPolicy]] = {
    ("Files", "UploadFile"): _STREAM,
    ("Files", "GetFile"): _READ,
    ("Files", "ListFiles"): _READ,
    ("Files", "DeleteFile"): _WRITE,
    ("Files", "ReadFile"): _STREAM,
    ("Uploads", "CreateUpload"): _WRITE,
    ("Uploads", "AddUploadPart"): _STREAM,
    # Reads all of the content where an MD5 is to be checked; answers the same when repeated.
    ("Uploads", "CompleteUpload"): CallPolicy(timeout_seconds=600, repeatable=True),
    ("Uploads", "CancelUpload"): _WRITE,
    ("Batches", "CreateBatch"): _WRITE,
    ("Batches", "GetBatch"): _READ,
    ("Batches", "ListBatches"): _READ,
    ("Batches", "CancelBatch"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Batches", "GetUsage"): _READ,
    ("Events", "WatchBatch"): _STREAM,
    # It waits up to 20 s for something to happen.
    ("Events", "ReadBatchEvents"): CallPolicy(timeout_seconds=30, repeatable=True),
    ("Models", "ListModels"): _READ,
    ("Models", "GetModel"): _READ,
    ("Admin", "PutModels"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Admin", "DeleteModel"): _WRITE,
    ("Admin", "CreateKey"): _WRITE,
    ("Admin", "ListKeys"): _READ,
    ("Admin", "RevokeKey"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Admin", "LookUpKey"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Admin", "ListUsage"): _READ,
    ("Admin", "ListProjects"): _READ,
    ("Admin", "SetProjectQuota"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Webhooks", "CreateWebhookEndpoint"): _WRITE,
    ("Webhooks", "GetWebhookEndpoint"): _READ,
    ("Webhooks", "ListWebhookEndpoints"): _READ,
    ("Webhooks", "UpdateWebhookEndpoint"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Webhooks", "DeleteWebhookEndpoint"): _WRITE,
    ("Webhooks", "RotateWebhookSecret"): _WRITE,
    # Longer than its receiver is given.
    ("Webhooks", "TestWebhookEndpoint"): CallPolicy(timeout_seconds=30, repeatable=False),
    ("Webhooks", "ListWebhookEventTypes"): _READ,
    ("Webhooks", "ListWebhookDeliveries"): _READ,
    ("Webhooks", "RedeliverWebhook"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Work", "Lead"): CallPolicy(timeout_seconds=2, repeatable=True),
    ("Work", "Resign"): CallPolicy(timeout_seconds=1, repeatable=True),
    ("Work", "GetWindow"): _READ,
    # A lost answer leaves chunks that reclaiming finds again: repeating would cut further ones.
    ("Work", "CutChunks"): _WRITE,
    ("Work", "ReportPools"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReclaimChunks"): _WRITE,
    ("Work", "RegisterExecutor"): CallPolicy(timeout_seconds=10, repeatable=True),
    ("Work", "OpenAttempt"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReadLines"): _STREAM,
    ("Work", "AppendResults"): _STREAM,
    ("Work", "Beat"): CallPolicy(timeout_seconds=2, repeatable=True),
    ("Work", "HandBack"): CallPolicy(timeout_seconds=5, repeatable=True),
    ("Work", "ReportDeath"): CallPolicy(timeout_seconds=10, repeatable=True),
}
"""One row for each RPC; a test holds it against the protos."""


def service_config() -> str:
    """Return the policies as gRPC's own configuration of a channel to one address."""
    methods: list[dict[str, Any]] = []
    for (service, method), policy in POLICIES.items():
        config: dict[str, Any] = {
            "name": [{"service": f"nightshift.v1.{service}", "method": method}],
        }
        if policy.timeout_seconds is not None:
            # A restarting service is waited for, up to the deadline; a call that never left is
            # safe to send later whatever it does.
            config["waitForReady"] = True
        if policy.repeatable:
            config["retryPolicy"] = {
                "maxAttempts": 5,
                "initialBackoff": "0.05s",
                "maxBackoff": "1s",
                "backoffMultiplier": 3,
                "retryableStatusCodes": ["UNAVAILABLE"],
            }
        methods.append(config)
    return json.dumps({"methodConfig": methods})


def policy_of(method: str) -> CallPolicy | None:
    """Return the policy of `/package.Service/Method`; None for what is not ours, such as health."""
    service, _, name = method.lstrip("/").partition("/")
    return POLICIES.get((service.rpartition(".")[2], name))
