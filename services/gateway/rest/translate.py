"""Wire messages to OpenAI objects. Every key is always there, with null where there is no value."""

from typing import Any, Final

from google.protobuf.message import Message

from protos.nightshift.v1 import batches_pb2, common_pb2, files_pb2, models_pb2, uploads_pb2

_STATUS_PREFIX: Final = "BATCH_STATUS_"
_UPLOAD_STATUS_PREFIX: Final = "UPLOAD_STATUS_"

_BATCH_TIMES: Final = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)

# Ours beside OpenAI's: clients keep keys that they do not know.
_EXTENSION: Final = ("pool", "queue_position", "executors", "reason", "engine_revision")


def optional(message: Any, field: str) -> Any:
    """Return an optional field's value; None when it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def file_object(file: files_pb2.File) -> dict[str, Any]:
    """Return OpenAI's File."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": optional(file, "expires_at"),
        "filename": file.filename,
        "purpose": file.purpose,
        "status": file.status or "processed",
        "status_details": None,
    }


def deleted_file_object(file_id: str) -> dict[str, Any]:
    """Return what answers a deletion."""
    return {"id": file_id, "object": "file", "deleted": True}


def upload_object(upload: uploads_pb2.Upload) -> dict[str, Any]:
    """Return OpenAI's Upload."""
    status = uploads_pb2.UploadStatus.Name(upload.status)
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "filename": upload.filename,
        "purpose": upload.purpose,
        "status": status.removeprefix(_UPLOAD_STATUS_PREFIX).lower(),
        "file": file_object(upload.file) if upload.HasField("file") else None,
    }


def upload_part_object(part: uploads_pb2.UploadPart) -> dict[str, Any]:
    """Return OpenAI's UploadPart."""
    return {
        "id": part.id,
        "object": "upload.part",
        "created_at": part.created_at,
        "upload_id": part.upload_id,
    }


def batch_object(batch: batches_pb2.Batch) -> dict[str, Any]:
    """Return OpenAI's Batch."""
    times = {
        name: batch.expires_at if name == "expires_at" else optional(batch, name)
        for name in _BATCH_TIMES
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": optional(batch, "model"),
        "errors": _errors_object(batch),
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch_status(batch.status),
        "output_file_id": optional(batch, "output_file_id"),
        "error_file_id": optional(batch, "error_file_id"),
        "created_at": batch.created_at,
        **times,
        "request_counts": _counts_object(batch.request_counts),
        "usage": usage_object(batch.usage) if batch.HasField("usage") else None,
        "metadata": dict(batch.metadata) if batch.has_metadata else None,
        "nightshift": {
            **{name: optional(batch.nightshift, name) for name in _EXTENSION},
            "engines": [
                {"pool": each.pool, "revisions": list(each.revisions)}
                for each in batch.nightshift.engines
            ],
        },
    }


def _counts_object(counts: batches_pb2.RequestCounts) -> dict[str, Any]:
    return {"total": counts.total, "completed": counts.completed, "failed": counts.failed}


def batch_status(status: batches_pb2.BatchStatus.ValueType) -> str:
    """Return a status as OpenAI spells it, such as `in_progress`."""
    return batches_pb2.BatchStatus.Name(status).removeprefix(_STATUS_PREFIX).lower()


def _errors_object(batch: batches_pb2.Batch) -> dict[str, Any] | None:
    if not batch.errors:
        return None
    return {
        "object": "list",
        "data": [
            {
                "code": error.code,
                "line": optional(error, "line"),
                "message": error.message,
                "param": optional(error, "param"),
            }
            for error in batch.errors
        ],
    }


def usage_object(usage: common_pb2.Usage) -> dict[str, Any]:
    """Return OpenAI's usage of a batch."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def project_usage_object(answer: batches_pb2.GetUsageResponse) -> dict[str, Any]:
    """Return a project's usage: its sum, and the part of each key."""
    sums = batches_pb2.KeyUsage()
    for part in answer.by_key:
        sums.batches += part.batches
        for name in ("total", "completed", "failed"):
            _add(sums.request_counts, part.request_counts, name)
        for name in ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens"):
            _add(sums.usage, part.usage, name)
    return {
        "object": "usage",
        "project": answer.project_id,
        **_sums_object(sums),
        "by_key": [
            {
                "key_id": optional(part, "key_id"),
                "key_name": part.key_name or None,
                **_sums_object(part),
            }
            for part in answer.by_key
        ],
    }


def _add(into: Message, part: Message, name: str) -> None:
    setattr(into, name, getattr(into, name) + getattr(part, name))


def _sums_object(part: batches_pb2.KeyUsage) -> dict[str, Any]:
    return {
        "batches": part.batches,
        "request_counts": _counts_object(part.request_counts),
        "usage": usage_object(part.usage),
    }


def model_object(model: models_pb2.Model) -> dict[str, Any]:
    """Return OpenAI's Model."""
    return {
        "id": model.id,
        "object": "model",
        "created": model.created_at,
        "owned_by": "nightshift",
        "shutdown_date": None,
    }
