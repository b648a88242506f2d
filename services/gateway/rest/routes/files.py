"""/v1/files: upload, list, get, delete, content."""

from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from protos.nightshift.v1 import common_pb2, files_pb2
from services.gateway import checks
from services.gateway.auth import Caller
from services.gateway.context import Context
from services.gateway.rest.download import ContentResponse
from services.gateway.rest.envelope import JsonResponse, list_object
from services.gateway.rest.routes.resource import resource, with_idempotency_key
from services.gateway.rest.translate import deleted_file_object, file_object
from services.gateway.rest.upload import receive_upload

_MOST: Final = checks.MAX_FILES_LIMIT

_PAGE: Final = 500
"""Files of one answer of the store: names of more could exceed a gRPC message."""


class FileRoutes:
    """Routes of files."""

    def __init__(self, context: Context) -> None:
        """Serve the files of `context`'s store."""
        self._context = context
        self._store = context.store

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/v1/files/{file_id}"
        return [
            *resource(self._context, "/v1/files", {"GET": self.list, "POST": self.upload}),
            *resource(self._context, one, {"GET": self.get, "DELETE": self.delete}),
            *resource(self._context, f"{one}/content", {"GET": self.content}),
        ]

    async def upload(self, request: Request, caller: Caller) -> Response:
        """Take a file as a multipart form."""
        caller = with_idempotency_key(request, caller)
        return JsonResponse(file_object(await receive_upload(request, self._store, caller)))

    async def get(self, request: Request, caller: Caller) -> Response:
        """Read one file's metadata."""
        file_id = checks.file_id_of(request.path_params["file_id"])
        answer = await self._store.call(
            self._store.files.GetFile, files_pb2.GetFileRequest(file_id=file_id), caller
        )
        return JsonResponse(file_object(answer.file))

    async def list(self, request: Request, caller: Caller) -> Response:
        """List files by order of creation."""
        query = request.query_params
        left = checks.limit_of(query, default=_MOST, maximum=_MOST)
        ascending = checks.is_ascending(query)
        after = query.get("after", "")
        if after:
            checks.file_id_of(after, param="after")
        items: list[dict[str, Any]] = []
        has_more = True
        while left > 0 and has_more:
            wanted = files_pb2.ListFilesRequest(
                page=common_pb2.PageRequest(after=after, limit=min(left, _PAGE)),
                purpose=query.get("purpose", ""),
                ascending=ascending,
            )
            answer = await self._store.call(self._store.files.ListFiles, wanted, caller)
            items += map(file_object, answer.files)
            has_more = answer.has_more
            if not answer.files:
                break
            left -= len(answer.files)
            after = answer.files[-1].id
        return JsonResponse(list_object(items, has_more=has_more))

    async def delete(self, request: Request, caller: Caller) -> Response:
        """Delete a file; batches that run on it are not hurt."""
        file_id = checks.file_id_of(request.path_params["file_id"])
        answer = await self._store.call(
            self._store.files.DeleteFile, files_pb2.DeleteFileRequest(file_id=file_id), caller
        )
        return JsonResponse(deleted_file_object(answer.file_id or file_id))

    async def content(self, request: Request, caller: Caller) -> Response:
        """Stream a file's bytes."""
        file_id = checks.file_id_of(request.path_params["file_id"])
        return ContentResponse(self._store, caller, file_id)
